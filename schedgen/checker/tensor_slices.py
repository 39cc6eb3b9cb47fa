"""Rules 10 and 11, about the slices of stages: terms are summed over slices, and copies stay equal.

Rule 10: every output and gradient of a sliced stage is summed over its slices once, before it is used. A slice
gives a part of the sum: x.s.b by its FWD, g.p.b by its BWD or BWD_I for every producer p. The rank of that job has one
ALLREDUCE of the part, over the ranks of all slices, before any SEND or job of that rank uses the part. By rule 2 it
comes after the job, and by rule 6 all ranks enter it together.

Rule 11: all slices of a replicated stage add up its gradient in one order and grouping. A sum of floating-point numbers
depends on its order and grouping, and nothing is exchanged between the slices of a replicated stage. What is added to
dw.s on a rank is a sequence of terms: the gradient of a microbatch, or a partial, which is such a sequence itself. The
owners' ALLREDUCE adds their sums in the order of their ranks. So the gradient of a slice is a tree, and the trees of
all slices of a stage must be the same.
"""

from __future__ import annotations

from collections import defaultdict
from graphlib import TopologicalSorter

import numpy as np

from schedgen.checker.proof import Proof
from schedgen.ir.effects import Buffer, Effect
from schedgen.ir.instructions import B, F, Kind, Op, buffer_name
from schedgen.ir.program import Program
from schedgen.util.arrays import Numbers
from schedgen.util.errors import UsageError

Term = int | tuple[int, ...]  # the number of a partial's sequence, or the microbatches of consecutive backwards
Place = tuple[int, int]  # (stage, rank): a dw


def rule_10(proof: Proof) -> None:
    """Refuse a part of a sum that is never summed, is summed by the wrong ranks, or is used before its sum."""
    header = proof.header
    if not header.tensor_parallel:
        proof.refuse_any(10, proof.program.exchanges(), "stages have no tensor slices in this file")
        return
    split = header.tensor_parallel.sliced
    _check_summed(proof, Buffer.X, F, np.flatnonzero(split), np.full(split.sum(), -1), np.flatnonzero(split))
    if header.is_forward:
        return
    edges = [
        (producer, header.graph.gradient_consumer(producer, consumer), consumer)
        for producer, consumer in header.graph.edges
        if split[consumer]
    ]
    _check_summed(proof, Buffer.G, B, *np.array(edges, np.int64).reshape(-1, 3).T)


def _check_summed(proof: Proof, buffer: Buffer, d: int, stage: Numbers, consumer: Numbers, giver: Numbers) -> None:
    """Rule 10 for the parts x.stage.*.consumer (or g) that jobs of direction d of the stages `giver` give."""
    header, T = proof.header, proof.header.tensor_parallel.degree
    # By stage and then edge, as x and g are numbered; the last entry is for names of no buffer.
    part_of = np.full(header.stages + len(header.graph.edges) + 1, -1, np.int64)
    part_of[header.graph.size_columns(stage, consumer)] = np.arange(len(stage))
    rank = header.compute[d][giver]  # of every part and microbatch
    sums = proof.touches(buffer, Effect.CHANGE)
    part, mb = part_of[sums.number // header.microbatches], sums.number % header.microbatches
    proof.refuse_any(10, sums.rows[part < 0], "the stage that computes this is not sliced: it is no part of a sum")
    proof.refuse_any(10, sums.rows[rank[part, mb] != sums.rank], "this rank does not compute it")
    slices = np.sort(header.compute[d].reshape(-1, T, header.microbatches), axis=1)  # the ranks of all slices
    groups = np.array([group if len(group) == T else (-1,) * T for group in header.groups], np.int64).reshape(-1, T)
    right = (groups[proof.group[sums.rows]] == slices[giver[part] // T, :, mb]).all(axis=1)
    proof.refuse_any(10, sums.rows[~right], "this is not the group of the stage's slices")
    summed = np.full(rank.shape, -1, np.int64)  # by part and microbatch: the row
    summed[part, mb] = sums.rows
    last = summed[part, mb]
    proof.refuse_any(10, last[last != sums.rows], "this is summed twice")

    def name(k: int, b: int) -> str:
        return buffer_name(Kind.X if buffer == Buffer.X else Kind.G, int(stage[k]), b, int(consumer[k]))

    for k, b in np.argwhere(summed < 0)[:1].tolist():
        proof.refuse_rank(10, int(rank[k, b]), f"ALLREDUCE of {name(k, b)} is missing")
    uses = proof.touches(buffer, Effect.READ, Effect.SEND)
    uses = uses.by(part_of[uses.number // header.microbatches] >= 0)
    part, mb = part_of[uses.number // header.microbatches], uses.number % header.microbatches
    here = rank[part, mb] == uses.rank
    first = np.full(rank.shape, len(proof.program), np.int64)
    np.minimum.at(first, (part[here], mb[here]), uses.rows[here])
    for k, b in np.argwhere(first < summed)[:1].tolist():
        proof.refuse(10, int(first[k, b]), f"{name(k, b)} is only a slice's part here")


def rule_11(proof: Proof) -> None:
    """Refuse slices of a replicated stage whose gradients are not added up alike; needs rules 1 to 7 proved."""
    if found := drifting(proof.program):
        stage, rank = found
        first = proof.header.tensor_parallel.slices_of(stage)[0]
        words = f"dw.{stage} is not added up in the order and grouping of dw.{first}, of which it is a copy"
        proof.refuse_rank(11, rank, words)


def check_copies(program: Program) -> None:
    """UsageError if w places the slices of a replicated stage so that they add up its gradient differently."""
    if found := drifting(program):
        stage, slice = divmod(found[0], program.header.tensor_parallel.degree)
        raise UsageError(
            f"w: the copies of replicated stage {stage} would drift apart, for its slices 0 and {slice} add up their "
            "gradients in different orders or groups: place all slices of a replicated stage alike"
        )


def drifting(program: Program) -> tuple[int, int] | None:
    """The first slice that adds up its gradient differently from its stage's first slice, and its first owner; or None.

    Only for programs whose sums are right, by rules 1 to 7.
    """
    tensor, owners = program.header.tensor_parallel, program.header.owners
    if not tensor:
        return None
    sums = _gradient_trees(program)
    for stage in np.flatnonzero(~tensor.sliced).tolist():
        first = tensor.slices_of(stage)[0]
        trees = [[sums[slice, rank] for rank in owners[slice] if (slice, rank) in sums] for slice in (first, stage)]
        if trees[0] != trees[1]:
            return stage, owners[stage][0]
    return None


def _gradient_trees(program: Program) -> dict[Place, int]:
    """By dw of replicated stages, a number for the tree by which it is added up before the owners' ALLREDUCE.

    Claim: two dw have the same number if and only if their trees are the same, so that their bits are. A tree is a
    sequence of terms, added from left to right, and a term is a run of microbatches or the number of a partial's tree.
    Two ranks that both compute b0, add the partial of a third rank, which computed b1 and b2, and then compute b3,

        ((b0 + (b1 + b2)) + b3)        terms: (0,), number of ((1, 2),), (3,)

    get one number. Numbers are given from the leaves up: a partial's tree has its number before the tree that adds it.
    """
    table, replicated = program.rows, ~program.header.tensor_parallel.sliced
    adds = (table.op == Op.ADD) & (table.kind == Kind.DW)
    rows = np.flatnonzero(np.isin(table.op, (Op.BWD, Op.BWD_W)) | adds)
    rows = rows[replicated[table.stage[rows]]]
    rows = rows[np.lexsort((rows, table.rank[rows], table.stage[rows]))]
    # A run of backwards, or an ADD, is one piece of a sequence.
    keys = np.stack([table.stage[rows], table.rank[rows], np.cumsum(adds[rows])], axis=1)
    begins = np.flatnonzero((keys[1:] != keys[:-1]).any(axis=1) | adds[rows][:-1]) + 1
    pieces: defaultdict[Place, list[np.ndarray]] = defaultdict(list)  # by dw, its terms in order, each as its rows
    for piece in np.split(rows, begins):
        for row in piece[:1].tolist():
            pieces[int(table.stage[row]), int(table.rank[row])].append(piece)
    needs = {  # by dw, the dw on other ranks whose partials it adds, in order
        (stage, rank): [(stage, int(table.source[piece[0]])) for piece in found if adds[piece[0]]]
        for (stage, rank), found in pieces.items()
    }
    numbers: dict[tuple[Term, ...], int] = {}
    sums: dict[Place, int] = {}
    for place in TopologicalSorter(needs).static_order():
        partials = iter(needs.get(place, ()))
        terms = tuple(
            sums[next(partials)] if adds[piece[0]] else tuple(table.mb[piece].tolist()) for piece in pieces[place]
        )
        alone = terms[0] if len(terms) == 1 else ()  # a partial that is only passed on stays the same sequence
        sums[place] = alone if isinstance(alone, int) else numbers.setdefault(terms, len(numbers))
    return sums
