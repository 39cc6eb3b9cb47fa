"""What every rank knows of all stages without having them: found on fake tensors, without data or messages."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorConverter, FakeTensorMode

from mpirun.data.batches import Microbatch
from mpirun.model.autocast import autocast
from mpirun.model.contract import Model, build
from mpirun.model.dataflow import Input, Like, Reads, Source
from mpirun.model.parallel_layers import Cut, cuts
from mpirun.model.rng import Watch
from schedgen.util.errors import UsageError, raised

ALIGN = 64  # bytes: where each parameter begins in a stage's flat weights


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


def whole(outputs: Sequence[Tensor]) -> Any:
    """The last stage's outputs as the loss takes them."""
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def flat_layout(parameters: Sequence[Tensor], dtype: torch.dtype) -> tuple[list[tuple[int, torch.Size]], int]:
    """Where each parameter lies in the stage's flat weights, with its shape, and their number of elements."""
    step = ALIGN // dtype.itemsize
    layout, end = [], 0
    for parameter in parameters:
        layout.append((end, parameter.shape))
        end += -(-parameter.numel() // step) * step
    return layout, end


class _Forgetful(FakeTensorConverter):
    """Keeps no weak references to fake tensors: torch refuses to convert a module (`to`) that has such parameters."""

    def set_tensor_memo(self, t: Tensor, v: Tensor) -> None:
        pass


def fake_mode() -> FakeTensorMode:
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
    fake = fake_mode()
    outputs: list[list[Tensor]] = []
    found: list[Shape] = []
    for stage, entry in enumerate(model.stages):
        with nullcontext() if _is_real(entry) else fake:  # a fake mode cannot copy real tensors
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
                raise UsageError(f"stage {stage} fails on the shapes it gets: {raised(error)}") from None
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
        raise UsageError(f"the loss fails on the shapes it gets: {raised(error)}") from None
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UsageError("the loss should be one number")
    last = len(found) - model.shards
    return found[:last] + [one._replace(loss=loss.element_size()) for one in found[last:]]


def _is_real(entry: object) -> bool:
    """Whether a stage, or a layer of it, is a module that is there already."""
    return isinstance(entry, nn.Module) or any(
        getattr(make, "real", False) for make in (entry.values() if isinstance(entry, Mapping) else [entry])
    )


def _aliases(outputs: Sequence[Tensor], others: Sequence[Any]) -> tuple[int, ...]:
    taken = {x.untyped_storage()._cdata for x in others if isinstance(x, Tensor)}
    return tuple(index for index, x in enumerate(outputs) if x.untyped_storage()._cdata in taken)


def _source(one: Source, outputs: Sequence[Sequence[Tensor]], leaves: Sequence[Any], stage: int) -> Any:
    if isinstance(one, Input):
        return leaves[one.leaf]
    if one.output < len(outputs[one.stage]) and outputs[one.stage][one.output].is_complex():
        raise UsageError(
            f"stage {stage} reads complex numbers, output {one.output} of stage {one.stage}, which are not sent: "
            "send torch.view_as_real of them"
        )
    if one.output >= len(outputs[one.stage]):
        raise UsageError(
            f"stage {stage} reads output {one.output} of stage {one.stage}, which returns {len(outputs[one.stage])}"
        )
    return outputs[one.stage][one.output]
