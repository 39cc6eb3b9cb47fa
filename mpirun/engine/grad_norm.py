"""Gradient norms: of every parameter, whose pieces may be on several ranks, and of the whole gradient; clipping by it.

With --canonical a norm has the same bits however the parameter is divided. Squares are added in float64 along a binary
tree whose leaves are the parameter's 64-byte lines; no shard boundary cuts a line. The owner of a piece contributes the
sums of the largest subtrees that the piece covers, at most two of each height.

For example, a parameter of six lines with the sums of squares a to f, whose lines 0-2 and 3-5 are on two ranks:

    height 3                    (3, 0)                    all
    height 2        (2, 0)                 (2, 1)         a + b + c + d, e + f + 0
    height 1  (1, 0)     (1, 1)      (1, 2)               a + b, c + d, e + f
    lines     a    b     c  |  d     e    f

The first rank contributes (1, 0) = a + b and (0, 2) = c, the second (0, 3) = d and (1, 2) = e + f. All ranks then add
((a + b) + (c + d)) + ((e + f) + 0), as the owner of the whole parameter does, which contributes (2, 0) and (1, 2).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpirun.engine.core.stage import LocalStage
from mpirun.model.stage_shape import Piece, StageShape, Unit, pieces, shard_spans
from schedgen.ir.header import Header
from schedgen.ir.weights import LINE

Sums = NDArray[np.float64]
Node = tuple[int, int]  # a node of the tree: its height above the lines, and its number among the nodes of that height


def tensor_norms(gradients: Sequence[Tensor], canonical: bool) -> list[float]:
    """The 2-norm of each tensor, accumulated in float32 or wider."""
    if not gradients:
        return []
    if canonical:
        return [math.sqrt(tree_sum(subtrees(line_sums(gradient)))) for gradient in gradients]
    return norms_on_device(gradients).tolist()


def norms_on_device(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norms of one or more tensors, accumulated in float32 or wider; the host does not wait for the device."""
    types = {torch.promote_types(dtype, torch.float32) for dtype in {x.dtype for x in gradients}}
    if len(types) == 1:
        return torch.stack(torch._foreach_norm(list(gradients), 2, dtype=types.pop()))
    wide = [(x, torch.promote_types(x.dtype, torch.float32)) for x in gradients]
    return torch.stack([torch.linalg.vector_norm(x, dtype=dtype).double() for x, dtype in wide])


def line_sums(piece: Tensor) -> Sums:
    """The sum of squares of every line of 64 bytes, float64, shape (lines,), in the host's memory."""
    flat = piece.detach().reshape(-1)
    real = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    line = LINE // real.element_size()
    sums = torch.nn.functional.pad(real.double().square(), (0, -len(real) % line)).view(-1, line)
    while sums.shape[1] > 1:
        sums = sums[:, 0::2] + sums[:, 1::2]
    return sums[:, 0].cpu().numpy()


def subtrees(sums: Sums, first: int = 0) -> Iterator[tuple[Node, float]]:
    """The largest subtrees that consecutive lines cover, with their sums; `first`: the number of the first line."""
    height = 0
    while len(sums):
        if first % 2:
            yield (height, first), float(sums[0])
            first, sums = first + 1, sums[1:]
        if len(sums) % 2:
            yield (height, first + len(sums) - 1), float(sums[-1])
            sums = sums[:-1]
        sums, first, height = sums[0::2] + sums[1::2], first // 2, height + 1


def tree_sum(covering: Iterable[tuple[Node, float]]) -> float:
    """The sum over the whole tree, from subtrees that cover it; nodes without lines count as zero."""
    sums = dict(covering)
    height, top = 0, max((height for height, _ in sums), default=0)
    while height < top or sum(h == height for h, _ in sums) > 1:
        parents = {number // 2 for h, number in sums if h == height}
        sums |= {
            (height + 1, number): sums.get((height, 2 * number), 0.0) + sums.get((height, 2 * number + 1), 0.0)
            for number in parents
        }
        height += 1
    return sums.get((height, 0), 0.0)


class Contribution(NamedTuple):
    """What the owner of a piece contributes to the norm of the piece's parameter."""

    rank: int  # the owner that contributes: of several, the one with the fewest elements so far
    parameter: int  # its number among the stage's parameters
    piece: Piece
    positions: slice  # where its numbers are among those of all ranks
    has_sums: bool  # the numbers are sums of subtrees; otherwise it is one number, the norm of the piece


class GradNorms:
    """The numbers from which ranks compute the norms of all parameters, each contributed by one rank.

    A parameter in one piece has one number, its norm. A parameter in several pieces has the norm of each piece or, with
    --canonical, the sums of each piece's subtrees. The numbers are in the order of the model.
    """

    def __init__(self, header: Header, shapes: Sequence[StageShape], rank: int, canonical: bool) -> None:
        """`shapes`: by stage. Sets `length`, the count of all numbers."""
        self.canonical, self.rank, self.length = canonical, rank, 0
        self.by_unit: dict[Unit, list[Contribution]] = {}  # of the units that this rank owns
        self.parameters: list[tuple[slice, list[Node]]] = []  # positions and, for sums of subtrees, their nodes
        shards, contributed = header.weight_shards, Counter[int]()  # elements, by rank
        for stage, shape in enumerate(shapes):
            by_parameter: list[list[tuple[int, Piece]]] = [[] for _ in shape.parameter_names]
            for shard, span in shard_spans(shape.weight_bytes, shards.of(stage)).items():
                for piece in pieces(shape.layout, span):
                    by_parameter[piece.parameter].append((shard, piece))
            for parameter, shard_pieces in enumerate(by_parameter):
                begin, all_nodes, has_sums = self.length, list[Node](), canonical and len(shard_pieces) > 1
                for shard, piece in shard_pieces:
                    nodes = _nodes(piece) if has_sums else []
                    positions = slice(self.length, self.length + (len(nodes) if has_sums else 1))
                    owners = shards.holders(stage, shard)
                    contributor = min(owners, key=lambda owner: (contributed[owner], owner))
                    contributed[contributor] += piece.length
                    if rank in owners:
                        contribution = Contribution(contributor, parameter, piece, positions, has_sums)
                        self.by_unit.setdefault((stage, shard), []).append(contribution)
                    self.length, all_nodes = positions.stop, all_nodes + nodes
                self.parameters.append((slice(begin, self.length), all_nodes))
        self.one_each = all(positions.stop - positions.start == 1 for positions, _ in self.parameters)

    def contributor(
        self, unit: Unit, stage: LocalStage, gradients: Sequence[Tensor], added: Tensor | None = None
    ) -> Callable[[np.ndarray], None]:
        """A function that writes this rank's numbers of a unit to their positions; `gradients`: of the unit's pieces.

        It leaves out parameters that no optimizer has, and tied ones that an earlier stage also has, which contributes
        their norms.
        `added`: numbers to add to the norms of an undivided stage, by parameter, shape (parameters,).
        """
        pairs = zip(self.by_unit.get(unit, []), [x for x in gradients if x.numel()], strict=True)
        own = [
            (entry, x)
            for entry, x in pairs
            if entry.rank == self.rank and stage.names[entry.parameter] not in stage.outside_norm
        ]
        whole = [x for entry, x in own if not entry.has_sums]
        positions = [entry.positions.start for entry, _ in own if not entry.has_sums]
        parameters = [entry.parameter for entry, _ in own]
        divided = [(entry, x) for entry, x in own if entry.has_sums]

        def contribute(numbers: np.ndarray) -> None:
            numbers[positions] = tensor_norms(whole, self.canonical)
            if added is not None:
                numbers[positions] += np.array(added.tolist())[parameters]
            for entry, x in divided:
                first = entry.piece.begin * x.element_size() // LINE
                numbers[entry.positions] = [total for _, total in subtrees(line_sums(x), first)]

        return contribute

    def norms(self, numbers: Sequence[float]) -> list[float]:
        """The norm of every parameter, from the numbers of all ranks."""
        if self.one_each:
            return list(numbers)
        return [
            math.sqrt(tree_sum(zip(nodes, numbers[positions], strict=True)))
            if nodes
            else math.hypot(*numbers[positions])
            for positions, nodes in self.parameters
        ]


def clip_factor(norm: float, limit: float) -> float:
    """The factor that a gradient of this norm is multiplied by, as in torch.nn.utils.clip_grad_norm_."""
    return min(limit / (norm + 1e-6), 1.0)


def _nodes(piece: Piece) -> list[Node]:
    width = piece.dtype.itemsize
    count, first = -(-piece.length * width // LINE), piece.begin * width // LINE
    return [node for node, _ in subtrees(np.zeros(count), first)]
