"""The model contract: stages, a loss, and how a microbatch is cut from a text.

`--model MODULE:FUNCTION` names a function that takes the number of stages and
returns a `Model`. Nothing in it knows about ranks, steps or seeds.
"""

from __future__ import annotations

import copy
import importlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpirun.data.batches import Make, Minibatch
from mpirun.model.dataflow import Input, Reads, Value
from mpirun.model.parallel_layers import WHOLE, Shard
from mpirun.model.rng import number
from schedgen.util.errors import UsageError, raised

Layers = Mapping[str, Callable[[], nn.Module]]


class Model(NamedTuple):
    """What a model function returns.

    stages  one entry a stage. Preferably its layers, a mapping from name to a
            function that builds one: they run one after the other, weights
            and dropout are seeded by the layers' names, and so do not depend
            on how layers are cut into stages. Or a function that builds the
            stage's module, or the module itself.
            forward takes what `reads` says and returns one tensor, or a tuple
            of them; shapes are the same for every microbatch. A stage's
            trained parameters have one type, and are found by
            named_parameters: hooks on them, or references kept elsewhere,
            are lost. It may not change buffers that its
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
    named   stages are of one module, and parameters and buffers have their
            names in it, whatever the cut. A buffer, or a frozen parameter,
            of one name is the same in all stages that have it.
    split   stages that are sums over shards (see mpirun.model.parallel_layers), never the
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
    named: bool = False
    split: Collection[int] = ()
    shards: int = 1

    def wiring(self, producers: Sequence[Sequence[int]], leaves: int) -> Reads:
        """`reads`, or what it is where it is None, of an input with so many leaves."""
        if self.reads is not None:
            return self.reads
        inputs = [Input(index) for index in range(leaves)]
        return [[Value(p, 0) for p in before] or inputs for before in producers]


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
        raise UsageError(f"--model {name}: cannot import {module_name}: {raised(error)}") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UsageError(f"--model {name}: {module_name} has no function {function_name}")
    torch.manual_seed(seed)  # for models that return modules, not functions
    try:
        model = function(stages)
    except UsageError as error:
        raise UsageError(f"--model {name}: {error}") from None
    except (Exception, SystemExit) as error:
        raise UsageError(f"--model {name}: {function_name}({stages}) raised {raised(error)}") from None
    if not isinstance(model, Model):
        raise UsageError(f"--model {name}: should return an mpirun.Model, not {type(model).__name__}")
    try:
        return _checked(model, stages)
    except UsageError as error:
        raise UsageError(f"--model {name}: {error}") from None


def _checked(model: Model, stages: int) -> Model:
    """The same, its numbers Python's own; UsageError where a field is not what it should be."""
    _listed("stages", model.stages)
    if len(model.stages) != stages:
        raise UsageError(f"has {len(model.stages)} stages, not the {stages} that it is asked for")
    for stage, entry in enumerate(model.stages):
        layers = entry.items() if isinstance(entry, Mapping) else [("stage", entry)]
        if not layers or not all(isinstance(layer, str) and callable(make) for layer, make in layers):
            raise UsageError(f"stage {stage} should be layers by name, a function or a module, not {entry!r:.80}")
        for layer in [layer for layer, _ in layers if not layer or "." in layer]:
            raise UsageError(f"stage {stage} has a layer called {layer!r}, which no module can be")
        for module in [make for _, make in layers if isinstance(make, nn.Module)]:
            for name in [name for name, one in (*module.named_parameters(), *module.named_buffers()) if one.is_meta]:
                raise UsageError(f"stage {stage} has no values for {name}, which is on the meta device")
    make = model.batch.make if isinstance(model.batch, Minibatch) else model.batch
    for field, function in (("loss", model.loss), ("batch", make)):
        if not callable(function):
            raise UsageError(f"{field} should be a function, not {type(function).__name__}")
    if not isinstance(model.length, Integral) or model.length < 1:
        raise UsageError(f"length should be a number of bytes, not {model.length!r}")
    if not isinstance(model.loss_of, str) or model.loss_of not in ("microbatch", "minibatch"):
        raise UsageError(f"loss_of should be microbatch or minibatch, not {model.loss_of!r}")
    if not isinstance(model.split, Collection) or isinstance(model.split, str):
        raise UsageError(f"split should be a list, not {type(model.split).__name__}")
    for stage in model.split:
        if not isinstance(stage, Integral) or not 0 <= stage < stages - 1:
            raise UsageError(f"splits stage {stage!r}, which is none before the last: that is whole")
    _listed("tied", model.tied)
    seen: set[tuple[int, str]] = set()
    for tie in model.tied:
        _listed("a tie", tie)
        if not tie:
            raise UsageError("a tie has no places")
        for place in tie:
            pair = isinstance(place, Sequence) and len(place) == 2
            if not pair or not isinstance(place[0], Integral) or not isinstance(place[1], str):
                raise UsageError(f"a tie is of pairs (stage, name), not {place!r}")
            if not 0 <= place[0] < stages:
                raise UsageError(f"ties {place[1]} of stage {place[0]}, but there are {stages} stages")
            if tuple(place) in seen:
                raise UsageError(f"ties {place[1]} of stage {place[0]} twice")
            seen.add((place[0], place[1]))
    if model.reads is not None:
        _listed("reads", model.reads)
        for sources in model.reads:
            _listed("what a stage reads", sources)
    return model._replace(
        length=int(model.length),
        split=sorted({int(stage) for stage in model.split}),
        tied=[[(int(stage), name) for stage, name in tie] for tie in model.tied],
        shards=1,
    )


def _listed(what: str, given: object) -> None:
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise UsageError(f"{what} should be a list, not {type(given).__name__}")


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


def build(model: Model, stage: int, seed: int) -> nn.Module:
    """The module of one stage, its weights seeded by layer, or else by stage: the same on whichever rank."""
    module = _untied(model, stage, seed)
    for tie in model.tied:
        first_stage, first_name = tie[0]
        if among_shards(model, tie):  # equal as they are
            continue
        if any(place == stage for place, _ in tie):
            source = module if first_stage == stage else _untied(model, first_stage, seed)
            value = _parameter(source, first_stage, first_name)
            mine = [name for place, name in tie if place == stage]
            kept, *others = (_parameter(module, stage, name) for name in mine)
            for one in (kept, *others):
                if (one.shape, one.dtype) != (value.shape, value.dtype):
                    raise UsageError(
                        f"the model ties {first_name} of stage {first_stage}, {value.dtype} of shape "
                        f"{tuple(value.shape)}, to {one.dtype} of shape {tuple(one.shape)} in stage {stage}"
                    )
            kept.data.copy_(value.data)
            for name in mine[1:]:
                owner, _, last = name.rpartition(".")
                setattr(module.get_submodule(owner), last, kept)
    return module


def _parameter(module: nn.Module, stage: int, name: str) -> nn.Parameter:
    try:
        return module.get_parameter(name)
    except AttributeError:
        raise UsageError(f"the model ties {name} of stage {stage}, which has no such parameter") from None


def _untied(model: Model, stage: int, seed: int) -> nn.Module:
    entry = model.stages[stage]
    if isinstance(entry, nn.Module):
        return copy.deepcopy(entry)
    place = stage // model.shards
    if isinstance(entry, Mapping):
        return nn.Sequential(OrderedDict((name, _built(place, make, seed, name)) for name, make in entry.items()))
    return _built(place, entry, seed, getattr(entry, "seeded", f"stage {place}"))


def _built(stage: int, make: Callable[[], nn.Module], seed: int, name: str) -> nn.Module:
    torch.manual_seed(number(seed, name) % 2**63)
    try:
        module = make()
    except UsageError as error:
        raise UsageError(f"stage {stage} of the model cannot be built: {error}") from None
    except (Exception, SystemExit) as error:
        raise UsageError(f"stage {stage} of the model cannot be built: {raised(error)}") from None
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

    Where a stage is given by its layers, or the model is `named`, names do not depend on how it is cut into stages.
    """
    for tie in model.tied:
        if (stage, name) in tie:
            stage, name = tie[0]
    name = name.replace("_orig_mod.", "")  # of torch.compile
    if model.named or isinstance(model.stages[stage], Mapping):
        return name
    return f"stage{stage // model.shards}.{name}"
