"""What becomes of what each forward saves until its backward: it is kept, redone, or away in the memory of the host.

`choose` decides it for a given order, forward by forward, so that no worker holds more than its memory. Which rows hold
what, for F1 of a worker (R: RECOMPUTE, o: OFFLOAD, f: FREE, r: RELOAD; PREFETCH = 1):

    keep    F0 F1 F2 F3 B0 B1        held from F1 to B1
    redo    F0 F1 F2 F3 B0 R B1      held during F1, as its graph, and from R to B1
    away    F0 F1o F2 fF3 rB0 B1     held from F1 to F2, and from B0 to B1

If all forwards keep the same amount, the fewest are redone by choosing, whenever too much is held, the one whose
backward comes last: the others' intervals, from forward to backward, are a maximum k-colourable subgraph of an interval
graph, if a worker saves k. Away goes what the link to the host carries meanwhile: the copies of all forwards away on a
worker, from a forward to its backward, may take a given share of the time of its jobs there.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedgen.compiler.options import Options
from schedgen.ir.instructions import B, F
from schedgen.util.arrays import Flags, Numbers, Times

ROOM = 1 + 1e-12  # sums of bytes are rounded
PREFETCH = Options().prefetch  # jobs that each copy is given


class Way(IntEnum):
    """What becomes of what a forward saves."""

    KEEP = 0
    REDO = 1
    AWAY = 2


Ways = NDArray[np.int8]  # by stage and microbatch


class Kept(NamedTuple):
    """What jobs hold and take, by stage: bytes, or 1 saved forward and nothing else; times in the unit of the costs."""

    inputs: Times  # from the forward to the end of the last backward job
    saved: Times
    half: Times  # from I to the end of W
    whole: Times  # in place of `half`, where what is saved is away between them
    graph: Times  # during the forward alone, if it is redone
    redo: Times  # the time of a RECOMPUTE
    copy: Times  # the time of a copy to the host's memory, or back
    length: Times  # the time of a job, (D, S)


class WorkerOrder(NamedTuple):
    """The jobs of a worker in their order, by forward, of n: shape (n,) if nothing else is said."""

    stage: Numbers
    mb: Numbers
    place: Numbers  # (D, n): the place among the worker's jobs
    end: Times  # (D n,): when the job at each place ends, if the worker is never idle and redoes nothing

    @property
    def forwards(self) -> tuple[Numbers, Numbers]:
        """The forwards, as an index of arrays by stage and microbatch."""
        return self.stage, self.mb


def worker_orders(n: Numbers, worker: Numbers, length: Times, workers: int) -> list[WorkerOrder]:
    """By worker, its order. `n`: a number of every job, (D, S, B), that grows along each; `worker`: (S, B)."""
    orders = []
    for w in range(workers):
        s, b = np.nonzero(worker == w)
        places = np.argsort(np.argsort(n[:, s, b], axis=None, kind="stable")).reshape(len(n), -1)
        lengths = np.empty(places.size)
        lengths[places] = length[:, s]
        orders.append(WorkerOrder(s, b, places, np.cumsum(lengths)))
    return orders


class Held(NamedTuple):
    """What a worker holds during each of its rows, jobs and R; and by forward, in which rows it begins and ends."""

    amount: Times
    first: Numbers  # of the forward
    backward: Numbers  # of its first backward job
    last: Numbers  # of its last

    def is_away(self, at: int) -> Flags:
        """By forward, whether it holds nothing during row `at`, if it is away."""
        before, between = (
            (begin + PREFETCH < at) & (at < end - PREFETCH)
            for begin, end in ((self.first, self.backward), (self.backward, self.last))
        )
        return before | between


def held(order: WorkerOrder, kept: Kept, way: Ways) -> Held:
    """What a worker holds; `way`: by forward, (n,)."""
    s, D, redone = order.stage, len(order.place), way == Way.REDO
    before = np.sort(order.place[B, redone])  # each has an R before it
    rows = order.place + np.searchsorted(before, order.place, side="right")
    first, backward, last = rows[F], rows[B], rows[D - 1]
    change, alone = np.zeros((2, order.place.size + len(before) + 1))
    half = kept.half[s] * (D == 3)
    for begin, end in ((first, backward), (backward, last)):
        away = (way == Way.AWAY) & (begin + PREFETCH + 1 < end - PREFETCH)
        np.add.at(change, (begin + PREFETCH + 1)[away], -kept.saved[s[away]])
        np.add.at(change, (end - PREFETCH)[away], kept.saved[s[away]])
    half = np.where(away, kept.whole[s], half)  # between the halves, which come last
    for row, amount in (
        (first, kept.inputs[s]),
        (np.where(redone, backward - 1, first), kept.saved[s]),
        (backward, half),
        (last + 1, -kept.inputs[s] - kept.saved[s] - half),
    ):
        np.add.at(change, row, amount)
    alone[first[redone]] = kept.graph[s[redone]]
    return Held((np.cumsum(change) + alone)[:-1], first, backward, last)


def most_held(orders: Sequence[WorkerOrder], kept: Kept, ways: Ways) -> Times:
    """By worker, the most that its jobs hold at once; `ways`: (S, B)."""
    return np.array([held(order, kept, ways[order.forwards]).amount.max(initial=0.0) for order in orders])


def choose(
    orders: Sequence[WorkerOrder], kept: Kept, capacity: Times, ways: Ways, share: float = 0.0, redo: bool = True
) -> Ways | None:
    """Ways, from those given on, so that each worker w holds at most capacity[w]; None if none that is tried does.

    share  of the time of jobs that copies may take; 0: nothing goes away
    redo   whether forwards may be redone
    """
    ways = ways.copy()
    for order, room in zip(orders, (capacity * ROOM).tolist(), strict=True):
        way = ways[order.forwards]
        while len(over := np.flatnonzero((now := held(order, kept, way)).amount > room)):
            changed, to = _away(order, now, over[0], kept, way, share), Way.AWAY
            if changed is None and redo:
                changed, to = _redo(order, now, over[0], kept, way), Way.REDO
            if changed is None:
                return None
            way[changed] = to
        ways[order.forwards] = _without_needless(order, kept, way, room)
    return ways


def _redo(order: WorkerOrder, now: Held, at: int, kept: Kept, way: Ways) -> int | None:
    """Of the forwards that hold something during row `at`, the one whose redoing makes most room for its time."""
    there = (way != Way.REDO) & (now.first <= at) & (at < now.backward)
    gone = (way == Way.AWAY) & now.is_away(at)
    benefit = (now.backward - at) * (kept.saved / np.maximum(kept.redo, 1e-9))[order.stage]
    return _largest(np.where(there & ~gone, benefit, -1.0))


def _away(order: WorkerOrder, now: Held, at: int, kept: Kept, way: Ways, share: float) -> int | None:
    """Of the forwards kept during row `at` whose copies the link has time for, the one that is longest away."""
    there = (way == Way.KEEP) & now.is_away(at)
    if not share or not there.any():
        return None
    time, others, copy = order.end[order.place[B]] - order.end[order.place[F]], way == Way.AWAY, kept.copy[order.stage]
    together = (now.first[others] < now.backward[:, None]) & (now.backward[others] > now.first[:, None])
    gain = (now.last - at) * kept.saved[order.stage] / np.maximum(copy, 1e-9)
    return _largest(np.where(there & (together @ copy[others] + copy <= share * time), gain, -1.0))


def _largest(benefit: Times) -> int | None:
    best = int(np.argmax(benefit))
    return best if benefit[best] >= 0 else None


def _without_needless(order: WorkerOrder, kept: Kept, way: Ways, room: float) -> Ways:
    """The ways, but forwards are kept where there is room after all, tried from the most expensive to redo."""
    price = np.select([way == Way.REDO, way == Way.AWAY], [kept.redo[order.stage], 0.0], -1.0)
    for k in np.lexsort((-order.place[F], -price))[: np.count_nonzero(way)].tolist():
        was, way[k] = way[k], Way.KEEP
        if (held(order, kept, way).amount > room).any():
            way[k] = was
    return way
