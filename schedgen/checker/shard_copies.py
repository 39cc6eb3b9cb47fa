"""Rule 11: copies stay copies. All shards of a whole stage add up its gradient in one order and grouping.

A sum of floating-point numbers depends on its order and grouping, and nothing is exchanged between the shards of a
whole stage. What is added to dw.s on a rank is a sequence of terms: the gradient of a microbatch, or a partial, which
is such a sequence itself. The owners' ALLREDUCE adds their sums in the order of their ranks. So the gradient of a shard
is a tree, and the trees of all shards of a stage must be the same.
"""

from __future__ import annotations

from collections import defaultdict
from graphlib import TopologicalSorter

import numpy as np

from schedgen.checker.proof import Proof
from schedgen.ir.instructions import Kind, Op
from schedgen.ir.program import Program
from schedgen.util.errors import UsageError

Term = int | tuple[int, ...]  # the number of a partial's sequence, or the microbatches of backwards one behind another
Place = tuple[int, int]  # (stage, rank): a dw


def rule_11(proof: Proof) -> None:
    """Refuse shards of a whole stage whose gradients are not added up alike; rules 1 to 7 are proved."""
    if found := drifting(proof.program):
        stage, rank = found
        first = proof.header.tensor_parallel.siblings(stage)[0]
        words = f"dw.{stage} is not added up in the order and grouping of dw.{first}, of which it is a copy"
        proof.refuse_rank(11, rank, words)


def check_copies(program: Program) -> None:
    """UsageError where w places the shards of a whole stage so that they add up its gradient differently."""
    if found := drifting(program):
        stage, shard = divmod(found[0], program.header.tensor_parallel.degree)
        raise UsageError(
            f"w: the copies of whole stage {stage} would drift apart, for its shards 0 and {shard} add up their "
            "gradients in different orders or groups: place all shards of a whole stage alike"
        )


def drifting(program: Program) -> tuple[int, int] | None:
    """The first shard whose sum differs from that of its stage's first shard, and its first owner; None: all agree.

    For programs whose sums are right, by rules 1 to 7.
    """
    tensor, owners = program.header.tensor_parallel, program.header.owners
    if not tensor:
        return None
    sums = _sums(program)
    for stage in np.flatnonzero(~tensor.split).tolist():
        first = tensor.siblings(stage)[0]
        trees = [[sums[shard, rank] for rank in owners[shard] if (shard, rank) in sums] for shard in (first, stage)]
        if trees[0] != trees[1]:
            return stage, owners[stage][0]
    return None


def _sums(program: Program) -> dict[Place, int]:
    """The sequences of terms of all dw of whole stages, without ALLREDUCE, numbered: equal ones are equal numbers."""
    table, whole = program.rows, ~program.header.tensor_parallel.split
    adds = (table.op == Op.ADD) & (table.kind == Kind.DW)
    rows = np.flatnonzero(np.isin(table.op, (Op.BWD, Op.BWD_W)) | adds)
    rows = rows[whole[table.stage[rows]]]
    rows = rows[np.lexsort((rows, table.rank[rows], table.stage[rows]))]
    # A run of backwards, or an ADD, is one piece of a sequence.
    keys = np.stack([table.stage[rows], table.rank[rows], np.cumsum(adds[rows])], axis=1)
    begins = np.flatnonzero((keys[1:] != keys[:-1]).any(axis=1) | adds[rows][:-1]) + 1
    pieces: defaultdict[Place, list[np.ndarray]] = defaultdict(list)
    for piece in np.split(rows, begins):
        for row in piece[:1].tolist():
            pieces[int(table.stage[row]), int(table.rank[row])].append(piece)
    needs = {
        (stage, rank): [(stage, int(table.peer[piece[0]])) for piece in found if adds[piece[0]]]
        for (stage, rank), found in pieces.items()
    }
    numbers: dict[tuple[Term, ...], int] = {}
    sums: dict[Place, int] = {}
    for place in TopologicalSorter(needs).static_order():
        partials = iter(needs.get(place, ()))
        terms = tuple(
            sums[next(partials)] if adds[piece[0]] else tuple(table.mb[piece].tolist()) for piece in pieces[place]
        )
        alone = terms[0] if len(terms) == 1 else ()  # a partial that is only passed on stays what it is
        sums[place] = alone if isinstance(alone, int) else numbers.setdefault(terms, len(numbers))
    return sums
