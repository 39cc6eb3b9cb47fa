"""Rule 5 where weights change without a flush, and rule 9: which version of its weights every job uses.

A stage with m owners takes microbatches m k to m k + m - 1 to its update k,
which makes version k + 1. On every owner stand, update by update, its
backwards of these microbatches, the ALLREDUCE if there are several owners, and
STEP: so every gradient is in exactly one update, at every owner.
"""

from __future__ import annotations

import numpy as np

from schedgen.analysis.subject import Numbers, Subject
from schedgen.checker.gradients import norms
from schedgen.ir.instructions import F, Kind, Op


class Steps:
    """The STEPs of all owners, one pair of rank and stage after the other."""

    def __init__(self, subject: Subject) -> None:
        header = subject.header
        self.pair = np.full((header.workers, header.stages), -1, np.int64)  # number of the pair; -1: no owner
        owned = np.argwhere(subject.owner)
        self.pair[tuple(owned.T)] = np.arange(len(owned))
        self.stages = owned[:, 1]
        self.sizes = np.array(
            [header.weight_versions.round(stage) for stage in range(header.stages)]
        )  # microbatches of an update
        self.counts = -(-header.microbatches // self.sizes)[self.stages]  # updates, by pair
        self.begin = np.concatenate([[0], np.cumsum(self.counts)])
        self.length = len(subject.program)

    def take(self, subject: Subject, rows: Numbers) -> None:
        """The STEP rows; every owner has all its updates, in their order, and nobody else has one."""
        pair = self.pair[subject.rank[rows], subject.stage[rows]]
        for row in rows[pair < 0][:1]:
            subject.refuse(5, int(row), "this rank does not own the stage")
        order = np.argsort(pair, kind="stable")
        rows, pair = rows[order], pair[order]
        place = np.arange(len(rows)) - np.searchsorted(pair, pair)  # within its pair
        for row, k in zip(
            *(found[subject.peer[rows] != place + 1][:1].tolist() for found in (rows, place)), strict=True
        ):
            subject.refuse(5, row, f"the next step of this stage here makes version {k + 1}")
        for row in rows[place >= self.counts[pair]][:1]:
            subject.refuse(5, int(row), "no gradient is left for this step")
        for missing in np.flatnonzero(np.bincount(pair, minlength=len(self.counts)) < self.counts)[:1]:
            rank, stage = np.argwhere(self.pair == missing)[0].tolist()
            subject.refuse_rank(5, rank, f"STEP of stage {stage} to version {self.counts[missing]} is missing")
        self.rows = rows
        self.keys = pair * (self.length + 1) + rows

    def before(self, pair: Numbers, rows: Numbers) -> Numbers:
        """How many STEPs of a pair stand before each row."""
        found: Numbers = np.searchsorted(self.keys, pair * (self.length + 1) + rows) - self.begin[pair]
        return found


def rule_9(subject: Subject) -> None:
    """To be proved before buffers are followed."""
    header = subject.header
    if not header.weight_versions.count:
        return
    if header.tied:
        subject.refuse_rank(9, 0, "stages are tied: their weights have no versions of their own")
    if header.tensor_parallel.degree > 1:
        subject.refuse_rank(9, 0, "stages have shards: their weights have no versions")
    for d in range(len(header.compute)):
        wrong = (header.weights[d] != header.compute[d]) | (header.compute[d] != header.compute[F])
        for s, b in np.argwhere(wrong)[:1]:
            rank = int(header.compute[d, s, b])
            name = header.directions[d]
            subject.refuse_rank(9, rank, f"{name}({s}, {b}) is away from its weights or from its forward")
    moves = subject.having(Op.SEND, Op.RECV, Op.FETCH_W, Op.ADD)
    for row in moves[np.isin(subject.kind[moves], (Kind.W, Kind.DW))][:1]:
        subject.refuse(9, int(row), "weights that have versions do not travel, nor do their gradients")
    steps = Steps(subject)
    steps.take(subject, subject.having(Op.STEP))
    _rounds(subject, steps)
    _versions(subject, steps)


def _rounds(subject: Subject, steps: Steps) -> None:
    """Rule 5."""
    backwards = subject.having(Op.BWD, Op.BWD_W)
    stage = subject.stage[backwards]
    pair = steps.pair[subject.rank[backwards], stage]
    update = subject.mb[backwards] // steps.sizes[stage]
    found = steps.before(pair, backwards)
    for row, k in zip(*(column[found != update][:1].tolist() for column in (backwards, update)), strict=True):
        subject.refuse(5, row, f"this gradient belongs to the step to version {k + 1}")
    sums = subject.having(Op.ALLREDUCE)
    pair = steps.pair[subject.rank[sums], subject.stage[sums]]
    several = steps.sizes[subject.stage[sums]] > 1
    for wrong, words in (
        (pair < 0, "this rank does not own the stage"),
        (~several, "this stage has one owner"),
    ):
        for row in sums[wrong][:1]:
            subject.refuse(5, int(row), words)
    for row in sums.tolist():
        if subject.header.groups[subject.peer[row]] != subject.header.owners[subject.stage[row]]:
            subject.refuse(5, row, "this is not the group of the stage's owners")
    order = np.argsort(pair, kind="stable")
    sums, pair = sums[order], pair[order]
    found, place = steps.before(pair, sums), np.arange(len(sums)) - np.searchsorted(pair, pair)
    for row in sums[(found != place) | (place >= steps.counts[pair])][:1]:
        subject.refuse(5, int(row), "one ALLREDUCE belongs to each step of this stage")
    wanted = np.where(steps.sizes[steps.stages] > 1, steps.counts, 0)
    for missing in np.flatnonzero(np.bincount(pair, minlength=len(wanted)) < wanted)[:1]:
        rank, stage = np.argwhere(steps.pair == missing)[0].tolist()
        subject.refuse_rank(5, rank, f"an ALLREDUCE of dw.{stage} is missing")
    _freed(subject, steps, np.concatenate([backwards, sums]))
    # Behind the backwards of its update: no backward of it stands between the sum and its step.
    mine = steps.pair[subject.rank[backwards], subject.stage[backwards]]
    last = np.full(len(steps.rows), -1, np.int64)
    np.maximum.at(last, steps.begin[mine] + update, backwards)
    for row in sums[sums < last[steps.begin[pair] + place]][:1]:
        subject.refuse(5, int(row), "this sum is not complete here")
    ends = np.full((subject.header.workers, subject.header.stages), -1, np.int32)
    np.maximum.at(ends, (subject.rank[steps.rows], subject.stage[steps.rows]), steps.rows)
    norms(subject, ends, np.full_like(ends, -1))


def _freed(subject: Subject, steps: Steps, adds: Numbers) -> None:
    """Each sum is freed behind its step, before anything adds to the next; the newest weights never.

    The last sum, and what was freed before it is there, are left to rule 7.
    """
    frees = subject.having(Op.FREE)
    weights, frees = (frees[subject.kind[frees] == kind] for kind in (Kind.W, Kind.DW))
    pair = steps.pair[subject.rank[weights], subject.stage[weights]]
    for row in weights[(pair >= 0) & (subject.peer[weights] == steps.counts[pair])][:1]:
        subject.refuse(7, int(row), "no step follows: these weights stay")
    pair = steps.pair[subject.rank[frees], subject.stage[frees]]
    frees, pair = frees[pair >= 0], pair[pair >= 0]
    order = np.argsort(pair, kind="stable")
    frees, pair = frees[order], pair[order]
    place = np.arange(len(frees)) - np.searchsorted(pair, pair)
    for row in frees[steps.before(pair, frees) <= place][:1]:
        subject.refuse(5, int(row), "this sum has not been stepped with")
    keys = pair * (steps.length + 1) + frees
    pair = steps.pair[subject.rank[adds], subject.stage[adds]]
    freed = np.searchsorted(keys, pair * (steps.length + 1) + adds) - np.searchsorted(keys, pair * (steps.length + 1))
    for row in np.sort(adds[freed < steps.before(pair, adds)])[:1]:
        subject.refuse(5, int(row), f"dw.{subject.stage[row]} still holds the gradient of the step before")


def _versions(subject: Subject, steps: Steps) -> None:
    """A forward uses the version that `updates` says, all else the one of its forward."""
    header = subject.header
    forwards = subject.having(Op.FWD)
    stage, mb = subject.stage[forwards], subject.mb[forwards]
    newest = np.empty((header.stages, header.microbatches), np.int64)
    newest[stage, mb] = steps.before(steps.pair[subject.rank[forwards], stage], forwards)
    right, which = newest, "the newest here"
    if header.weight_versions.updates == "vertical":
        first = [stage for stage, producers in enumerate(header.graph.producers) if not producers]
        known = (newest[first] * steps.sizes[first, None]).min(axis=0)
        right, which = known // steps.sizes[:, None], "that of the microbatch's entry"
    for row in forwards[subject.peer[forwards] != right[stage, mb]][:1]:
        version = right[subject.stage[row], subject.mb[row]]
        subject.refuse(9, int(row), f"version {version} is {which}")
    others = subject.having(Op.BWD, Op.BWD_I, Op.BWD_W, Op.RECOMPUTE)
    for row in others[subject.peer[others] != right[subject.stage[others], subject.mb[others]]][:1]:
        version = right[subject.stage[row], subject.mb[row]]
        subject.refuse(9, int(row), f"its forward uses version {version}")


def staleness(subject: Subject) -> tuple[list[int], list[int]]:
    """Of a checked program, by stage: the most versions that an owner holds, and the most updates between the
    weights that a gradient was computed with and those that it changes."""
    header = subject.header
    forwards = subject.having(Op.FWD)
    sizes = np.array([header.weight_versions.round(stage) for stage in range(header.stages)])
    late = subject.mb[forwards] // sizes[subject.stage[forwards]] - subject.peer[forwards]
    most = np.zeros(header.stages, np.int64)
    np.maximum.at(most, subject.stage[forwards], late)
    changes = subject.having(Op.STEP, Op.FREE)
    changes = changes[(subject.op[changes] == Op.STEP) | (subject.kind[changes] == Kind.W)]
    frees = subject.op[changes] == Op.FREE
    keys = np.stack([subject.rank[changes], subject.stage[changes], subject.peer[changes] + frees], axis=1)
    outlive = {tuple(key) for key in keys[frees].tolist()}  # the steps that leave their version before alive
    alive: dict[tuple[int, int], int] = {}
    held = np.ones(header.stages, np.int64)
    for (rank, stage, version), free in zip(keys.tolist(), frees.tolist(), strict=True):
        now = alive.get((rank, stage), 1)
        now += -1 if free else (rank, stage, version) in outlive
        alive[rank, stage] = now
        held[stage] = max(held[stage], now)
    return held.tolist(), most.tolist()
