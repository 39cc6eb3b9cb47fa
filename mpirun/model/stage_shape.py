"""What every rank knows of a stage: shapes and types, memory, how its weights are divided, which layers draw."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpirun.model.dataflow import ALIGN, TensorSpec
from mpirun.model.parallel_layers import SlicedDim
from schedgen.ir.weights import shard_offsets


class Place(NamedTuple):
    """Where a parameter lies in its stage's flat weights, which are bytes."""

    begin: int  # in bytes
    size: torch.Size
    dtype: torch.dtype

    @property
    def end(self) -> int:
        """The offset of the byte after its last one."""
        return self.begin + self.size.numel() * self.dtype.itemsize

    def of(self, flat: Tensor) -> Tensor:
        """The parameter in a flat tensor, in its shape."""
        return flat[self.begin : self.end].view(self.dtype).view(self.size)


class StageShape(NamedTuple):
    """What every rank knows of a stage: its outputs on one microbatch, and its trained parameters."""

    outputs: tuple[TensorSpec, ...]
    parameter_names: tuple[str, ...]  # of the trained parameters
    weight_bytes: int = 0  # of these parameters, flat
    overwrites_inputs: bool = False  # whether it changes its inputs in place
    overwrites_buffers: bool = False  # whether it changes them, or might in other microbatches
    changed_buffers: tuple[str, ...] = ()  # the buffers that it changed in the trial
    aliased_outputs: tuple[int, ...] = ()  # outputs that lie in the memory of its inputs or parameters
    random_layers: tuple[str, ...] = ()  # layers that draw random numbers, or might in other microbatches
    layout: tuple[Place, ...] = ()  # of the trained parameters in the flat weights
    sliced_dims: Mapping[str, SlicedDim] = {}  # the parameters and buffers that are divided among slices
    model_stage: int = 0  # its index; of a slice or replica, that of the model function's stage


def flat_layout(parameters: Sequence[Tensor]) -> tuple[list[Place], int]:
    """Where each parameter lies in the stage's flat weights, one type after the other, and the bytes of all."""
    places, end = dict[int, Place](), 0
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        for number, parameter in enumerate(parameters):
            if parameter.dtype == dtype:
                places[number] = Place(end, parameter.shape, dtype)
                end += -(-parameter.nbytes // ALIGN) * ALIGN
    return [places[number] for number in range(len(parameters))], end


Unit = tuple[int, int]  # a stage and a shard of its weights; shard -1: they are not divided
Layout = Sequence[Place]  # of a stage's parameters


class Piece(NamedTuple):
    """The piece of a parameter that lies in one shard of its stage's weights."""

    parameter: int  # its number among the stage's parameters
    begin: int  # in the flat parameter, in elements
    length: int  # in elements
    offset: int  # in the shard, in bytes
    dtype: torch.dtype
    size: Sequence[int]  # (length,), or () if the parameter has no dimensions

    def of_parameter(self, parameter: Tensor) -> Tensor:
        """This piece of a tensor with the parameter's shape; its shape is `size`."""
        return parameter.reshape(-1)[self.begin : self.begin + self.length].view(self.size)

    def of_shard(self, shard: Tensor) -> Tensor:
        """This piece of a flat tensor that is laid out like the shard; its shape is `size`."""
        return shard[self.offset : self.offset + self.length * self.dtype.itemsize].view(self.dtype).view(self.size)


def shard_spans(size: int, shards: Sequence[int]) -> dict[int, slice]:
    """By shard, its slice of flat weights of `size` bytes; `shards`: (-1,) where they are not divided."""
    ends = shard_offsets(size, len(shards))
    return {shard: slice(*ends[number : number + 2]) for number, shard in enumerate(shards)}


def pieces(layout: Layout, span: slice) -> Iterator[Piece]:
    """The pieces in a shard, in the order of the parameters; a parameter without elements has none."""
    for parameter, place in enumerate(layout):
        begin, end, width = max(place.begin, span.start), min(place.end, span.stop), place.dtype.itemsize
        if begin < end:
            first, length = (begin - place.begin) // width, (end - begin) // width
            size = (length,) if place.size else ()
            yield Piece(parameter, first, length, begin - span.start, place.dtype, size)
