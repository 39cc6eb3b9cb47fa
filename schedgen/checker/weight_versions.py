"""Rule 5 where weights change without a flush, and rule 9: which version of its weights every job uses.

Update k of a stage takes microbatches m k to m k + m - 1 and makes version k + 1; m is the number of the stage's
owners, or with two buffers (2bw) `accumulated` of the header. Update by update, every owner has its backwards of these
microbatches, the ALLREDUCE if there are several owners, and STEP: so every gradient is in exactly one update, at every
owner.
"""

from __future__ import annotations

import numpy as np

from schedgen.checker.gradient_sums import norms
from schedgen.checker.proof import Proof
from schedgen.ir.effects import RECEIVERS, SENDERS, Buffer, Effect
from schedgen.ir.instructions import COMPUTE, F, Kind, Op
from schedgen.ir.weights import TWO_BUFFERS, VERTICAL
from schedgen.util.arrays import AnyInts, Numbers, places_in_runs


class Steps:
    """The STEPs of all owners, grouped by *pair* of rank and stage, in the order of their rows."""

    def __init__(self, proof: Proof) -> None:
        """Refuse unless every owner makes all its updates, in order, and no other rank makes any."""
        header, rows = proof.header, proof.rows_of(Op.STEP)
        owned = np.argwhere(header.is_owner)
        self.pair = np.full((header.workers, header.stages), -1, np.int64)  # number of the pair; -1: not an owner
        self.pair[tuple(owned.T)] = np.arange(len(owned))
        self.stages = owned[:, 1]  # by pair
        self.rounds = np.array(header.weight_versions.rounds)  # microbatches of an update, by stage
        self.counts = -(-header.microbatches // self.rounds)[self.stages]  # updates, by pair
        self.begin = np.concatenate([[0], np.cumsum(self.counts)])
        self.length = len(proof.program)
        proof.refuse_any(5, rows[self.pairs(proof, rows) < 0], "this rank does not own the stage")
        rows, pair, place = self.in_turn(proof, rows)
        for i in np.flatnonzero(proof.version[rows] != place + 1)[:1]:
            proof.refuse(5, int(rows[i]), f"the next step of this stage here makes version {place[i] + 1}")
        proof.refuse_any(5, rows[place >= self.counts[pair]], "no gradient is left for this step")
        for missing in np.flatnonzero(np.bincount(pair, minlength=len(self.counts)) < self.counts)[:1]:
            rank, stage = owned[missing].tolist()
            proof.refuse_rank(5, rank, f"STEP of stage {stage} to version {self.counts[missing]} is missing")
        self.rows = rows
        self.keys = pair * (self.length + 1) + rows

    def pairs(self, proof: Proof, rows: AnyInts) -> Numbers:
        """The pair of the rank and the stage of each row."""
        return self.pair[proof.rank[rows], proof.stage[rows]]

    def in_turn(self, proof: Proof, rows: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """The rows pair by pair, each pair in its order; the pair of each, and its place within that."""
        pair = self.pairs(proof, rows)
        order = np.argsort(pair, kind="stable")
        return rows[order], pair[order], places_in_runs(pair[order])

    def before(self, pair: Numbers, rows: AnyInts) -> Numbers:
        """How many STEPs of a pair come before each row."""
        counts: Numbers = np.searchsorted(self.keys, pair * (self.length + 1) + rows) - self.begin[pair]
        return counts


def rule_9(proof: Proof) -> None:
    """Refuse a wrong version and, where weights have versions, what breaks rule 5; runs before buffers are followed."""
    header = proof.header
    if header.has_flush:
        return
    if header.stepped_together:
        proof.refuse_rank(9, 0, f"{header.stepped_together} step together: their weights have no versions")
    for d in range(len(header.compute)):
        wrong = (header.weights[d] != header.compute[d]) | (header.compute[d] != header.compute[F])
        for s, b in np.argwhere(wrong)[:1]:
            rank = int(header.compute[d, s, b])
            name = header.directions[d]
            proof.refuse_rank(9, rank, f"{name}({s}, {b}) is not on the worker of its weights and of its forward")
    moves = proof.rows_of(*SENDERS, *RECEIVERS, Op.ADD)
    moves = moves[np.isin(proof.kind[moves], (Kind.W, Kind.DW))]
    proof.refuse_any(9, moves, "weights that have versions are never sent, nor are their gradients")
    steps = Steps(proof)
    _rounds(proof, steps)
    _versions(proof, steps)


def _rounds(proof: Proof, steps: Steps) -> None:
    """Rule 5: every gradient is in the update of its microbatch, and the stage's owners sum each update once."""
    backwards = proof.touches(Buffer.DW, Effect.ADD).rows
    backwards = backwards[np.isin(proof.op[backwards], COMPUTE)]
    update = proof.mb[backwards] // steps.rounds[proof.stage[backwards]]
    made = steps.before(steps.pairs(proof, backwards), backwards)
    for i in np.flatnonzero(made != update)[:1]:
        proof.refuse(5, int(backwards[i]), f"this gradient belongs to the step to version {update[i] + 1}")
    sums, several = proof.rows_of(Op.ALLREDUCE), np.array(proof.header.several_owners)
    proof.refuse_any(5, sums[steps.pairs(proof, sums) < 0], "this rank does not own the stage")
    proof.refuse_any(5, sums[~several[proof.stage[sums]]], "this stage has one owner, so there is nothing to sum")
    for row in sums.tolist():
        if proof.header.groups[proof.group[row]] != proof.header.owners[proof.stage[row]]:
            proof.refuse(5, row, "this is not the group of the stage's owners")
    sums, pair, place = steps.in_turn(proof, sums)
    wrong = (steps.before(pair, sums) != place) | (place >= steps.counts[pair])
    proof.refuse_any(5, sums[wrong], "one ALLREDUCE belongs to each step of this stage")
    wanted = np.where(several[steps.stages], steps.counts, 0)
    for missing in np.flatnonzero(np.bincount(pair, minlength=len(wanted)) < wanted)[:1]:
        rank, stage = np.argwhere(steps.pair == missing)[0].tolist()
        proof.refuse_rank(5, rank, f"an ALLREDUCE of dw.{stage} is missing")
    _freed(proof, steps, np.concatenate([backwards, sums]))
    # A sum comes after all backwards of its update: none is between the sum and the STEP.
    last = np.full(len(steps.rows), -1, np.int64)
    np.maximum.at(last, steps.begin[steps.pairs(proof, backwards)] + update, backwards)
    proof.refuse_any(5, sums[sums < last[steps.begin[pair] + place]], "this sum is not complete here")
    ends = np.full((proof.header.workers, proof.header.stages), -1, np.int32)
    np.maximum.at(ends, (proof.rank[steps.rows], proof.stage[steps.rows]), steps.rows)
    norms(proof, ends, np.full_like(ends, -1))


def _freed(proof: Proof, steps: Steps, adds: Numbers) -> None:
    """Prove that each dw is freed after its STEP and before it is added to anew; the newest weights are never freed.

    Rule 7 covers the last dw, and the freeing of buffers that do not exist yet.
    """
    frees = proof.rows_of(Op.FREE)
    weights, frees = (frees[proof.kind[frees] == kind] for kind in (Kind.W, Kind.DW))
    pair = steps.pairs(proof, weights)
    newest = (pair >= 0) & (proof.version[weights] == steps.counts[pair])
    proof.refuse_any(7, weights[newest], "these are the newest weights, which are never freed")
    frees = frees[steps.pairs(proof, frees) >= 0]
    frees, pair, place = steps.in_turn(proof, frees)
    proof.refuse_any(5, frees[steps.before(pair, frees) <= place], "no STEP has used this sum yet")
    keys = pair * (steps.length + 1) + frees
    pair = steps.pairs(proof, adds)
    freed = np.searchsorted(keys, pair * (steps.length + 1) + adds) - np.searchsorted(keys, pair * (steps.length + 1))
    for row in np.sort(adds[freed < steps.before(pair, adds)])[:1]:
        proof.refuse(5, int(row), f"dw.{proof.stage[row]} still holds the gradient of the step before")


def _versions(proof: Proof, steps: Steps) -> None:
    """Rule 9: a forward uses the version that `updates` prescribes, its other jobs the version of the forward."""
    header = proof.header
    forwards = proof.rows_of(Op.FWD)
    newest = np.empty((header.stages, header.microbatches), np.int64)
    newest[proof.stage[forwards], proof.mb[forwards]] = steps.before(steps.pairs(proof, forwards), forwards)
    right, which = newest, "the newest here"
    if header.weight_versions.updates == VERTICAL:
        first = [stage for stage, producers in enumerate(header.graph.producers) if not producers]
        # By microbatch: how many microbatches are in the version that is the newest where it enters.
        entered = (newest[first] * steps.rounds[first, None]).min(axis=0)
        right, which = entered // steps.rounds[:, None], "the one with which the microbatch entered"
    elif header.weight_versions.updates == TWO_BUFFERS:
        delayed = header.weight_versions.delayed(np.arange(header.microbatches))
        right, which = np.broadcast_to(delayed, newest.shape), "the one that the update before the last made"
    others = proof.rows_of(*(op for op in COMPUTE if op != Op.FWD))
    for rows, words in ((forwards, "version {} is " + which), (others, "its forward uses version {}")):
        version = right[proof.stage[rows], proof.mb[rows]]
        for i in np.flatnonzero(proof.version[rows] != version)[:1]:
            proof.refuse(9, int(rows[i]), words.format(version[i]))
