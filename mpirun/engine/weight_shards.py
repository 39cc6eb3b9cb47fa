"""The parts that a stage's weights are divided into: slices of them, flat, and what of a parameter lies in one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from schedgen.ir.instructions import Instruction, Kind, Op
from schedgen.ir.weight_shards import part_offsets

Unit = tuple[int, int]  # a stage and a part of its weights; -1: they are not divided
Layout = Sequence[tuple[int, torch.Size]]  # where each parameter begins in its stage's flat weights, and its shape


class Piece(NamedTuple):
    """What of a parameter lies in one part; all numbers count elements."""

    parameter: int  # its place among the stage's
    begin: int  # in the parameter, which is taken flat
    length: int
    at: int  # in the part

    def of(self, parameter: Tensor) -> Tensor:
        return parameter.reshape(-1)[self.begin : self.begin + self.length]

    def within(self, part: Tensor) -> Tensor:
        return part[self.at : self.at + self.length]


def spans(size: int, dtype: torch.dtype, parts: Sequence[int]) -> dict[int, slice]:
    """Where each part lies in flat weights of `size` elements; `parts`: (-1,) where they are one."""
    ends = [end // dtype.itemsize for end in part_offsets(size * dtype.itemsize, len(parts))]
    return {k: slice(*ends[place : place + 2]) for place, k in enumerate(parts)}


def pieces(layout: Layout, span: slice) -> Iterator[Piece]:
    """What lies in a part, in the order of the parameters; nothing of those without elements."""
    for parameter, (start, shape) in enumerate(layout):
        begin, end = max(start, span.start), min(start + shape.numel(), span.stop)
        if begin < end:
            yield Piece(parameter, begin - start, end - begin, begin - span.start)


def first_fetches(instructions: Sequence[Instruction]) -> set[int]:
    """The rows of the FETCH_Ws with which a copy of a stage begins: no other part of it is there."""
    there: dict[int, set[int]] = {}
    found = set()
    for row, i in enumerate(instructions):
        parts = there.setdefault(i.stage, set())
        if i.op == Op.FETCH_W:
            if not parts:
                found.add(row)
            parts.add(i.via)
        elif i.op == Op.FREE and i.kind == Kind.W:
            parts.discard(i.via)
    return found
