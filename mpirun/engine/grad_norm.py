"""The norm of the gradient: of every parameter, wherever its pieces are, and of the whole.

In canonical mode a norm has the same bits however the parameter is divided:
squares are added in float64 along a binary tree over its lines of 64 bytes,
and between lines alone it is cut. A piece gives the sums of the largest
subtrees that it covers, at most two of each height.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpirun.engine.stage import Stage
from mpirun.engine.weight_shards import Piece, Unit, pieces, spans
from mpirun.model.shapes import StageShape
from schedgen.ir.header import Header
from schedgen.ir.weight_shards import LINE

Node = tuple[int, int]  # of the tree: its height above the lines, and its place among those as high


def norms(gradients: Sequence[Tensor], canonical: bool = False) -> list[float]:
    """Their 2-norms, summed up in float32 at least."""
    if not gradients:
        return []
    if canonical:
        return [math.sqrt(root(subtrees(lines(one)))) for one in gradients]
    found = [torch.linalg.vector_norm(one, dtype=torch.promote_types(one.dtype, torch.float32)) for one in gradients]
    return torch.stack(found).tolist() if len({one.dtype for one in found}) == 1 else [one.item() for one in found]


def whole_norm(norms: Sequence[float]) -> float:
    """The norm of the whole gradient from those of its parts, in the order of the model."""
    return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64))) if len(norms) else 0.0


def lines(piece: Tensor) -> Tensor:
    """The sum of squares of every line of 64 bytes, float64."""
    flat = piece.detach().reshape(-1)
    real = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    line = LINE // real.element_size()
    sums = torch.nn.functional.pad(real.double().square(), (0, -len(real) % line)).view(-1, line)
    while sums.shape[1] > 1:
        sums = sums[:, 0::2] + sums[:, 1::2]
    return sums[:, 0]


def subtrees(sums: Tensor, first: int = 0) -> Iterator[tuple[Node, float]]:
    """The largest subtrees in lines whose first is line `first` of the parameter, and their sums."""
    height = 0
    while len(sums):
        if first % 2:
            yield (height, first), float(sums[0])
            first, sums = first + 1, sums[1:]
        if len(sums) % 2:
            yield (height, first + len(sums) - 1), float(sums[-1])
            sums = sums[:-1]
        sums, first, height = sums[0::2] + sums[1::2], first // 2, height + 1


def root(parts: Iterable[tuple[Node, float]]) -> float:
    """The sum over the whole tree, from subtrees that cover it; where it has no lines, a sum is zero."""
    known = dict(parts)
    height, most = 0, max((height for height, _ in known), default=0)
    while height < most or sum(h == height for h, _ in known) > 1:
        places = {place // 2 for h, place in known if h == height}
        known |= {
            (height + 1, place): known.get((height, 2 * place), 0.0) + known.get((height, 2 * place + 1), 0.0)
            for place in places
        }
        height += 1
    return known.get((height, 0), 0.0)


class Told(NamedTuple):
    """What a rank tells of a parameter at NORM."""

    parameter: int  # its place among the stage's
    piece: Piece  # what of it the rank has
    places: slice  # where that goes
    sums: bool  # of subtrees; else it is a norm


class Norms:
    """Numbers by place, each told by one rank: the norm of every parameter, in the order of the model.

    Of a parameter in pieces it is the norm of each or, in canonical mode, the sums over its subtrees.
    """

    def __init__(self, header: Header, shapes: Sequence[StageShape], rank: int, canonical: bool) -> None:
        self.canonical, self.length = canonical, 0
        self.mine: dict[Unit, list[Told]] = {}
        self.parameters: list[tuple[slice, list[Node]]] = []  # places and, if these are of subtrees, which
        for stage, shape in enumerate(shapes):
            found: list[list[tuple[int, Piece]]] = [[] for _ in shape.parameter_names]
            size = shape.weight_bytes // shape.dtype.itemsize
            for via, span in spans(size, shape.dtype, header.weight_shards.parts(stage)).items():
                for piece in pieces(shape.layout, span):
                    found[piece.parameter].append((via, piece))
            for parameter, of in enumerate(found):
                begin, which, sums = self.length, list[Node](), canonical and len(of) > 1
                for via, piece in of:
                    nodes = _nodes(piece, shape.dtype) if sums else []
                    places = slice(self.length, self.length + (len(nodes) if sums else 1))
                    if header.weight_shards.holders(stage, via)[0] == rank:
                        self.mine.setdefault((stage, via), []).append(Told(parameter, piece, places, sums))
                    self.length, which = places.stop, which + nodes
                self.parameters.append((slice(begin, self.length), which))

    def told(self, unit: Unit, stage: Stage, total: Tensor) -> dict[int, float]:
        """By place, what this rank tells of a part of which it has the gradient, shape (n,)."""
        mine = self.mine.get(unit, [])
        views = [view for view in stage.in_part(unit[1], total) if view.numel()] if mine else []
        found: dict[int, float] = {}
        plain = [(one.places.start, view) for one, view in zip(mine, views, strict=True) if not one.sums]
        names = [stage.names[one.parameter] for one in mine if not one.sums]
        sizes = norms([view for _, view in plain], self.canonical)
        for (place, _), name, size in zip(plain, names, sizes, strict=True):
            found[place] = 0.0 if name in stage.shared else size  # an earlier stage tells
        for one, view in zip(mine, views, strict=True):
            if one.sums:
                first = one.piece.begin * view.element_size() // LINE
                sums = [size for _, size in subtrees(lines(view), first)]
                found |= dict(zip(range(one.places.start, one.places.stop), sums, strict=True))
        return found

    def known(self, values: Sequence[float]) -> list[float]:
        """The norm of every parameter, from the numbers of all places."""
        return [
            math.sqrt(root(zip(which, values[places], strict=True))) if which else math.hypot(*values[places])
            for places, which in self.parameters
        ]


def _nodes(piece: Piece, dtype: torch.dtype) -> list[Node]:
    """The subtrees that a piece covers."""
    count, first = -(-piece.length * dtype.itemsize // LINE), piece.begin * dtype.itemsize // LINE
    return [node for node, _ in subtrees(torch.zeros(count), first)]
