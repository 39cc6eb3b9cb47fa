"""Weight shards: the parts that a stage's flat weights are divided into, and the piece of each parameter in a part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from schedgen.ir.instructions import Instruction, Kind, Op
from schedgen.ir.weight_shards import part_offsets

Unit = tuple[int, int]  # a stage and a part of its weights; part -1: they are not divided
Layout = Sequence[tuple[int, torch.Size]]  # where each parameter begins in its stage's flat weights, and its shape


class Piece(NamedTuple):
    """The piece of a parameter that lies in one part of its stage's weights; all numbers count elements."""

    parameter: int  # its number among the stage's parameters
    begin: int  # in the flat parameter
    length: int
    offset: int  # in the part

    def of_parameter(self, parameter: Tensor) -> Tensor:
        """The piece of a tensor of the parameter's shape, shape (length,)."""
        return parameter.reshape(-1)[self.begin : self.begin + self.length]

    def of_part(self, part: Tensor) -> Tensor:
        """The piece of a flat tensor laid out as the part is, shape (length,)."""
        return part[self.offset : self.offset + self.length]


def part_slices(size: int, dtype: torch.dtype, parts: Sequence[int]) -> dict[int, slice]:
    """By part, its slice of flat weights of `size` elements; `parts`: (-1,) where they are not divided."""
    ends = [end // dtype.itemsize for end in part_offsets(size * dtype.itemsize, len(parts))]
    return {part: slice(*ends[number : number + 2]) for number, part in enumerate(parts)}


def pieces(layout: Layout, span: slice) -> Iterator[Piece]:
    """The pieces in a part, in the order of the parameters; a parameter without elements has none."""
    for parameter, (start, shape) in enumerate(layout):
        begin, end = max(start, span.start), min(start + shape.numel(), span.stop)
        if begin < end:
            yield Piece(parameter, begin - start, end - begin, begin - span.start)


def first_fetches(instructions: Sequence[Instruction]) -> set[int]:
    """The rows of the FETCH_Ws that begin a copy of a stage: no other part of it is live there."""
    live_parts: dict[int, set[int]] = {}  # by stage
    first = set()
    for row, i in enumerate(instructions):
        parts = live_parts.setdefault(i.stage, set())
        if i.op == Op.FETCH_W:
            if not parts:
                first.add(row)
            parts.add(i.part)
        elif i.op == Op.FREE and i.kind == Kind.W:
            parts.discard(i.part)
    return first
