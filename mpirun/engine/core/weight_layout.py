"""Weight shards: how a stage's flat weights are divided, and the piece of each parameter that lies in a shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpirun.comm.ordered_allreduce import Section
from mpirun.model.stage_shape import Place
from schedgen.ir.instructions import Instruction, Kind, Op
from schedgen.ir.weights import shard_offsets

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


def sections(layout: Layout) -> list[Section]:
    """The sections of flat weights, one for the parameters of each type."""
    found: dict[torch.dtype, Section] = {}
    for place in layout:
        begin = found[place.dtype].begin if place.dtype in found else place.begin
        found[place.dtype] = Section(begin, place.end, place.dtype)
    return list(found.values())


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


def first_fetches(instructions: Sequence[Instruction]) -> set[int]:
    """The rows of the FETCH_Ws that begin a copy of a stage's weights: no other shard of the copy is live then."""
    live_shards: dict[int, set[int]] = {}  # by stage
    first = set()
    for row, i in enumerate(instructions):
        shards = live_shards.setdefault(i.stage, set())
        if i.op == Op.FETCH_W:
            if not shards:
                first.add(row)
            shards.add(i.shard)
        elif i.op == Op.FREE and i.kind == Kind.W:
            shards.discard(i.shard)
    return first
