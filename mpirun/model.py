"""The model contract: stages, a loss, and how a microbatch is cut from a text.

`--model MODULE:FUNCTION` names a function that takes the number of stages and
returns a `Model`. Nothing in it knows about ranks, steps or seeds.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorConverter, FakeTensorMode

from mpirun.batches import Make, Microbatch, Minibatch
from mpirun.device import autocast
from mpirun.randomness import Watch, number
from mpirun.tensor import WHOLE, Cut, Shard, cuts
from mpirun.wiring import Input, Like, Reads, Source, Value
from schedgen.errors import UsageError
from schedgen.program import Header

Layers = Mapping[str, Callable[[], nn.Module]]
ALIGN = 64  # bytes: where each parameter begins in a stage's flat weights


class Model(NamedTuple):
    """What a model function returns.

    stages  one entry a stage. Preferably its layers, a mapping from name to a
            function that builds one: they run one after the other, weights
            and dropout are seeded by the layers' names, and so do not depend
            on how layers are cut into stages. Or a function that builds the
            stage's module, or the module itself.
            forward takes what `reads` says and returns one tensor, or a tuple
            of them; shapes are the same for every microbatch. A stage's trained parameters have one type,
            and are found by named_parameters: hooks on them, or references
            kept elsewhere, are lost. It may not change buffers that its
            output depends on, and draws random numbers from torch's default
            generator only.
    loss    (output of the last stage, target) -> scalar, a mean over the
            microbatch. The gradient is the mean over microbatches. Where
            the last stage returns a tuple, so is the output.
    batch   (text, rng) -> (input, target) of one microbatch, each a tensor
            or any pytree of them. `text` is a uint8 tensor, shape (bytes,);
            `rng` is seeded by the run's seed, the step and the microbatch.
            Or a Minibatch, which is made whole and cut.
    length  how many bytes of text `batch` needs at least.
    tied    parameters that are one: for each, its places as (stage, name).
            All get the first one's value, and the sum of their gradients.
    reads   by stage: what each argument of its forward is, a Value (output k
            of an earlier stage) or an Input (leaf k of the input). None:
            the first output of each of its producers in the schedule; where
            it has none, all leaves.
    loss_of "microbatch", or "minibatch": loss takes the outputs and targets
            of all microbatches, one behind the other along dimension 0. The
            schedule must then have all forwards of the last stage before
            its first backward, as gpipe has.
    split   stages that are sums over shards (see mpirun.tensor), never the
            last. What builds them, or their layers, is called with `shard` if
            it has a parameter of that name, and without it for the whole.
            Their parameters have no hooks and no randomness in forward.
    shards  set by mpirun where the schedule has shards: stages are so many
            of each that the function gave, one behind the other.
    """

    stages: Sequence[Layers | Callable[[], nn.Module] | nn.Module]
    loss: Callable[[Any, Any], Tensor]
    batch: Make | Minibatch
    length: int = 1
    tied: Sequence[Sequence[tuple[int, str]]] = ()
    reads: Reads | None = None
    loss_of: str = "microbatch"
    split: Sequence[int] = ()
    shards: int = 1

    def wiring(self, producers: Sequence[Sequence[int]], leaves: int) -> Reads:
        """`reads`, or what it is where it is None, of an input with so many leaves."""
        if self.reads is not None:
            return self.reads
        inputs = [Input(index) for index in range(leaves)]
        return [[Value(p, 0) for p in before] or inputs for before in producers]


class Shape(NamedTuple):
    """What every rank knows of a stage: its outputs on one microbatch, and its trained parameters."""

    outputs: tuple[Like, ...]
    names: tuple[str, ...]  # of the trained parameters
    weights: int = 0  # bytes of all of them, flat
    overwrites: bool = False  # whether it changes its inputs in place
    aliases: tuple[int, ...] = ()  # outputs that lie in the memory of its inputs or parameters
    draws: tuple[str, ...] = ()  # layers that draw random numbers
    loss: int = 0  # the last stage: bytes of the loss, which is its x
    layout: tuple[tuple[int, torch.Size], ...] = ()  # of the trained parameters: where each begins, flat, and its shape
    type: torch.dtype = torch.float32  # of the trained parameters
    cuts: Mapping[str, Cut] = {}  # the parameters that shards have their share of
    stage: int = -1  # of the model, where the schedule's stage is a shard of it


def load(name: str, stages: int, seed: int, layers: Sequence[int] | None = None) -> Model:
    """The model `name` (MODULE:FUNCTION) cut into `stages` stages.

    `layers`: how many parts of the model, asked for as so many stages, make each stage; None: one.
    """
    if layers is not None:
        return joined(load(name, sum(layers), seed), layers)
    module_name, colon, function_name = name.partition(":")
    if not colon:
        raise UsageError(f"--model {name}: should be MODULE:FUNCTION")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UsageError(f"--model {name}: cannot import {module_name}: {type(error).__name__}: {error}") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UsageError(f"--model {name}: {module_name} has no function {function_name}")
    torch.manual_seed(seed)  # for models that return modules, not functions
    try:
        model = function(stages)
    except UsageError as error:
        raise UsageError(f"--model {name}: {error}") from None
    except (Exception, SystemExit) as error:
        raise UsageError(f"--model {name}: {function_name}({stages}) raised {type(error).__name__}: {error}") from None
    if not isinstance(model, Model):
        raise UsageError(f"--model {name}: should return an mpirun.Model, not {type(model).__name__}")
    if model.loss_of not in ("microbatch", "minibatch"):
        raise UsageError(f"--model {name}: loss_of should be microbatch or minibatch, not {model.loss_of!r}")
    if not isinstance(model.stages, Sequence):
        raise UsageError(f"--model {name}: stages should be a list, not {type(model.stages).__name__}")
    if len(model.stages) != stages:
        raise UsageError(f"--model {name}: has {len(model.stages)} stages, but the schedule has {stages}")
    for stage, name in (place for tie in model.tied for place in tie):
        if not 0 <= stage < stages:
            raise UsageError(f"the model ties {name} of stage {stage}, but there are {stages} stages")
    for stage in model.split:
        if not 0 <= stage < stages - 1:
            raise UsageError(f"the model splits stage {stage}, but it may split 0 to {stages - 2}: the last is whole")
    return model


def check_shards(model: Model, header: Header) -> None:
    """UsageError where the schedule splits other stages than the model."""
    if header.tensor > 1:
        whole = [stage for stage in range(len(model.stages)) if stage not in model.split]
        if list(header.whole) != whole:
            if not model.split:
                raise UsageError("the schedule has shards, but no stage of the model can be split")
            ours, theirs = (",".join(map(str, stages)) for stages in (whole, header.whole))
            wanted = ",".join(map(str, whole[:-1]))
            how = f"with --whole {wanted}" if wanted else "without --whole"
            raise UsageError(f"the model is whole in stages {ours}, the schedule in {theirs}: compile it {how}")


def _of_shard(sources: Sequence[Source], t: int, count: int) -> list[Source]:
    """What shard t of a stage reads: the outputs of shards t."""
    return [one._replace(stage=one.stage * count + t) if isinstance(one, Value) else one for one in sources]


def sharded(model: Model, count: int) -> Model:
    """The model with so many shards of every stage: of one that is not split, as many that are the same."""
    if count == 1:
        return model
    stages: list[Layers | Callable[[], nn.Module] | nn.Module] = []
    ties = [[(stage * count + t, name) for stage, name in tie] for tie in model.tied for t in range(count)]
    for stage, entry in enumerate(model.stages):
        if stage not in model.split:
            stages += [entry] * count
            continue
        if isinstance(entry, nn.Module):
            raise UsageError(f"stage {stage} of the model is split, but it is a module, not what builds one")
        if any(place == stage for tie in model.tied for place, _ in tie):
            raise UsageError(f"stage {stage} of the model is split, but shares parameters with others")
        for t in range(count):
            shard = Shard(t, count)
            if isinstance(entry, Mapping):
                stages.append({name: partial(_shard, make, shard) for name, make in entry.items()})
            else:
                stages.append(partial(_shard, entry, shard))
    reads = None if model.reads is None else [_of_shard(one, t, count) for one in model.reads for t in range(count)]
    many = model._replace(stages=stages, tied=[], reads=reads, shards=count)
    for stage in model.split:  # what is not cut is shared by all that have it
        with _fake():
            of_shards = [build(many, stage * count + t, 0) for t in range(count)]
        names = [{name for name, one in module.named_parameters() if one.requires_grad} for module in of_shards]
        shared = set.intersection(*names) - set(cuts(of_shards[0]))
        ties += [
            [(stage * count + t, name) for t in range(count)]
            for name, _ in of_shards[0].named_parameters()
            if name in shared
        ]
    return many._replace(tied=ties)


def _shard(make: Callable[..., nn.Module], shard: Shard) -> nn.Module:
    """One shard of what `make` builds: built as a whole, with the weights that it would have so, and then cut."""
    if "shard" not in inspect.signature(make).parameters:
        return make()
    whole = make()
    part = make(shard=shard)
    of_part = cuts(part)
    values = dict(itertools.chain(whole.named_parameters(), whole.named_buffers()))
    with torch.no_grad():
        for name, one in itertools.chain(part.named_parameters(), part.named_buffers()):
            if name in values:
                one.copy_(of_part[name].part(values[name], shard) if name in of_part else values[name])
    return part


def among_shards(model: Model, tie: Sequence[tuple[int, str]]) -> bool:
    """Whether a tie is of the shards of one stage of the model."""
    return len({stage for stage, _ in tie}) > len({stage // model.shards for stage, _ in tie}) == 1


def joined(model: Model, layers: Sequence[int]) -> Model:
    """The model with stages of so many of its own, one behind the other."""
    stages: list[Layers] = []
    stage_of: list[int] = []
    parts = iter(model.stages)
    for stage, count in enumerate(layers):
        merged: dict[str, Callable[[], nn.Module]] = {}
        for part in itertools.islice(parts, count):
            if not isinstance(part, Mapping):
                raise UsageError("the schedule joins stages of the model, but they are not given by their layers")
            if twice := merged.keys() & part.keys():
                raise UsageError(f"the schedule joins stages of the model, but two layers are called {min(twice)}")
            merged |= part
            stage_of.append(stage)
        stages.append(merged)
    alone = [stage for stage, count in enumerate(layers) if count == 1]
    first = [sum(layers[:stage]) for stage in range(len(layers))]
    return model._replace(
        split=[stage for stage in alone if first[stage] in model.split],
        stages=stages,
        tied=[[(stage_of[stage], name) for stage, name in places] for places in model.tied],
    )


def flat_layout(parameters: Sequence[Tensor], dtype: torch.dtype) -> tuple[list[tuple[int, torch.Size]], int]:
    """Where each parameter lies in the stage's flat weights, with its shape, and their number of elements."""
    step = ALIGN // dtype.itemsize
    layout, end = [], 0
    for parameter in parameters:
        layout.append((end, parameter.shape))
        end += -(-parameter.numel() // step) * step
    return layout, end


def build(model: Model, stage: int, seed: int) -> nn.Module:
    """The module of one stage, its weights seeded by layer, or else by stage: the same on whichever rank."""
    module = _untied(model, stage, seed)
    for tie in model.tied:
        first_stage, first_name = tie[0]
        if among_shards(model, tie):  # equal as they are
            continue
        if any(place == stage for place, _ in tie):
            source = module if first_stage == stage else _untied(model, first_stage, seed)
            value = source.get_parameter(first_name)
            mine = [name for place, name in tie if place == stage]
            kept = module.get_parameter(mine[0])
            kept.data.copy_(value.data)
            for name in mine[1:]:
                owner, _, last = name.rpartition(".")
                setattr(module.get_submodule(owner), last, kept)
    return module


def _untied(model: Model, stage: int, seed: int) -> nn.Module:
    entry = model.stages[stage]
    if isinstance(entry, nn.Module):
        return copy.deepcopy(entry)
    place = stage // model.shards
    if isinstance(entry, Mapping):
        return nn.Sequential(OrderedDict((name, _built(place, make, seed, name)) for name, make in entry.items()))
    return _built(place, entry, seed, f"stage {place}")


def _built(stage: int, make: Callable[[], nn.Module], seed: int, name: str) -> nn.Module:
    torch.manual_seed(number(seed, name) % 2**63)
    try:
        module = make()
    except (Exception, SystemExit) as error:
        raise UsageError(f"stage {stage} of the model cannot be built: {type(error).__name__}: {error}") from None
    if not isinstance(module, nn.Module):
        raise UsageError(f"stage {stage} of the model should be an nn.Module, not {type(module).__name__}")
    return module


def shard_of(model: Model, stage: int) -> Shard:
    """What a stage of the schedule is of one of the model's."""
    return Shard(stage % model.shards, model.shards) if stage // model.shards in model.split else WHOLE


def is_copy(model: Model, stage: int) -> bool:
    """Whether a stage is a shard that is the same as the one before it."""
    return stage % model.shards > 0 and stage // model.shards not in model.split


def shared_before(model: Model, stage: int, names: Iterable[str]) -> set[str]:
    """Of the parameters of a stage, those that an earlier stage has too."""
    if is_copy(model, stage):
        return set(names)
    return {
        name for tie in model.tied for place, name in tie if place == stage and min(place for place, _ in tie) < stage
    }


def entry_name(model: Model, stage: int, name: str) -> str:
    """The name of a stage's parameter or buffer in the whole model; of a tied one that of its first place.

    Where a stage is given by its layers, names do not depend on how layers are cut into stages.
    """
    for tie in model.tied:
        if (stage, name) in tie:
            stage, name = tie[0]
    name = name.replace("_orig_mod.", "")  # of torch.compile
    return name if isinstance(model.stages[stage], Mapping) else f"stage{stage // model.shards}.{name}"


class _Forgetful(FakeTensorConverter):
    """Keeps no weak references to fake tensors: torch refuses to convert a module (`to`) that has such parameters."""

    def set_tensor_memo(self, t: Tensor, v: Tensor) -> None:
        pass


def _fake() -> FakeTensorMode:
    fake = FakeTensorMode(allow_non_fake_inputs=True)  # stages given as modules, and tensors they refer to
    fake.fake_tensor_converter = _Forgetful()
    return fake


def shapes(model: Model, reads: Reads, batch: Microbatch, mixed: torch.dtype | None = None) -> list[Shape]:
    """What every stage gives, found by running all stages on fake tensors: no data, no messages.

    `reads`: what each stage reads; `mixed`: the type that torch's autocast computes in.
    """
    leaves, target = batch.leaves, batch.target
    for stage, source in ((s, one) for s, sources in enumerate(reads) for one in sources if isinstance(one, Input)):
        if source.leaf >= len(leaves):
            raise UsageError(f"stage {stage} reads leaf {source.leaf} of the input, which has {len(leaves)}")
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # what it logs is raised besides
    fake = _fake()
    outputs: list[list[Tensor]] = []
    found: list[Shape] = []
    for stage, entry in enumerate(model.stages):
        with nullcontext() if isinstance(entry, nn.Module) else fake:  # a fake mode cannot copy real tensors
            module = build(model, stage, 0)
        with fake, torch.no_grad():
            watch = Watch(module, list(entry) if isinstance(entry, Mapping) else [])
            inputs = [_source(one, outputs, leaves, stage) for one in reads[stage]]
            inputs = [fake.from_tensor(x) if isinstance(x, Tensor) and not fake.is_our_fake(x) else x for x in inputs]
            versions = [x._version for x in inputs if isinstance(x, Tensor)]
            try:
                with autocast("cpu", mixed), watch:
                    output = module(*inputs)
            except (Exception, SystemExit) as error:
                raise UsageError(
                    f"stage {stage} fails on the shapes it gets: {type(error).__name__}: {error}"
                ) from None
        every = [output] if isinstance(output, Tensor) else output
        if not isinstance(every, (list, tuple)) or not every or not all(isinstance(x, Tensor) for x in every):
            raise UsageError(f"stage {stage} should return a tensor or a tuple of them, not {type(output).__name__}")
        split = model.shards > 1 and stage // model.shards in model.split
        if split and watch.found:
            raise UsageError(
                f"stage {stage // model.shards} of the model is split, but draws random numbers, as dropout does: "
                "that belongs into a stage that is whole"
            )
        if split and len(every) > 1:
            raise UsageError(f"stage {stage // model.shards} of the model is split: it should return one tensor")
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        parameters = [parameter for _, parameter in named]
        dtype = parameters[0].dtype if parameters else torch.float32
        layout, size = flat_layout(parameters, dtype)
        found.append(
            Shape(
                tuple(Like(tuple(x.shape), x.dtype) for x in every),
                tuple(name for name, _ in named),
                size * dtype.itemsize,
                overwrites=versions != [x._version for x in inputs if isinstance(x, Tensor)],
                aliases=_aliases(every, [*inputs, *module.parameters(), *module.buffers()]),
                draws=tuple(watch.found),
                layout=tuple(layout),
                type=dtype,
                cuts=cuts(module),
                stage=stage // model.shards if model.shards > 1 else -1,
            )
        )
        if split and stage % model.shards and found[-1].outputs != found[-2].outputs:
            (one,), (other,) = found[-2].outputs, found[-1].outputs
            raise UsageError(
                f"shards of stage {stage // model.shards} of the model are parts of a sum, but one gives "
                f"{one.dtype} of shape {one.size}, another {other.dtype} of shape {other.size}"
            )
        outputs.append(list(every))
    if model.loss_of == "minibatch":  # what it is a loss of is not here
        return found
    try:
        with autocast("cpu", mixed):
            loss = model.loss(whole([torch.zeros(one.size, dtype=one.dtype) for one in found[-1].outputs]), target)
    except (Exception, SystemExit) as error:
        raise UsageError(f"the loss fails on the shapes it gets: {type(error).__name__}: {error}") from None
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UsageError("the loss should be one number")
    last = len(found) - model.shards
    return found[:last] + [one._replace(loss=loss.element_size()) for one in found[last:]]


def _aliases(outputs: Sequence[Tensor], others: Sequence[Any]) -> tuple[int, ...]:
    taken = {x.untyped_storage()._cdata for x in others if isinstance(x, Tensor)}
    return tuple(index for index, x in enumerate(outputs) if x.untyped_storage()._cdata in taken)


def whole(outputs: Sequence[Tensor]) -> Any:
    """The last stage's outputs as the loss takes them."""
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _source(one: Source, outputs: Sequence[Sequence[Tensor]], leaves: Sequence[Any], stage: int) -> Any:
    if isinstance(one, Input):
        return leaves[one.leaf]
    if one.output >= len(outputs[one.stage]):
        raise UsageError(
            f"stage {stage} reads output {one.output} of stage {one.stage}, which returns {len(outputs[one.stage])}"
        )
    return outputs[one.stage][one.output]
