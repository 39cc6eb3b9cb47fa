"""Which forwards of an order to redo so that it keeps to a memory limit: as few and as cheap ones as possible.

An order is given by a number of every job, (D, S, B), that grows along each worker. A forward that is redone keeps only
its inputs until its backward begins and, while it runs, its graph; RECOMPUTE then restores what the backward reads. If
all forwards keep the same amount, the fewest are redone by choosing, whenever too much is held, the one whose backward
comes last: the others' intervals, from forward to backward, are a maximum k-colourable subgraph of an interval graph,
if a worker saves k.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedgen.ir.instructions import B, F
from schedgen.util.arrays import Flags, Numbers, Times

ROOM = 1 + 1e-12  # sums of bytes are rounded


class Kept(NamedTuple):
    """What jobs hold, by stage: bytes, or 1 saved forward and nothing else."""

    inputs: Times  # from the forward to the end of the last backward job, redone or not
    saved: Times  # the same if the forward is not redone, else from RECOMPUTE on
    half: Times  # from I to the end of W
    redo: Times  # the time of a RECOMPUTE
    graph: Times  # during the forward alone, if it is redone


def redone(place: Numbers, worker: Numbers, kept: Kept, capacity: Times) -> Flags | None:
    """(S, B): the forwards to redo; None if a worker holds too much even if all those that help are redone.

    place     a number of every job, (D, S, B), that grows along each worker
    worker    by stage and microbatch
    capacity  by worker
    """
    flags = np.zeros(worker.shape, bool)
    for w in range(len(capacity)):
        while True:
            jobs, peaks = _peaks(place, worker, w, kept, flags)
            over = np.flatnonzero(peaks > capacity[w] * ROOM)
            if not len(over):
                break
            at = place[tuple(jobs[:, over[0]])]
            held = (worker == w) & ~flags & (place[F] <= at) & (place[B] > at)
            if not held.any():
                return None
            benefit = (place[B] - at) * (kept.saved / np.maximum(kept.redo, 1e-9))[:, None]
            flags[np.unravel_index(np.argmax(np.where(held, benefit, -1.0)), flags.shape)] = True
    return flags


def without_needless(flags: Flags, place: Numbers, worker: Numbers, kept: Kept, capacity: Times) -> Flags:
    """The flags, except of forwards that can be kept after all, tried from the most expensive to redo."""
    flags = flags.copy()
    order = sorted(np.argwhere(flags).tolist(), key=lambda job: (-kept.redo[job[0]], -place[F, job[0], job[1]]))
    for s, b in order:
        flags[s, b] = False
        w = int(worker[s, b])
        flags[s, b] = (_peaks(place, worker, w, kept, flags)[1] > capacity[w] * ROOM).any()
    return flags


def most_held_with_redone(place: Numbers, worker: Numbers, kept: Kept, flags: Flags, workers: int) -> Times:
    """By worker, the most that its jobs hold at once."""
    return np.array([_peaks(place, worker, w, kept, flags)[1].max(initial=0.0) for w in range(workers)])


def _peaks(place: Numbers, worker: Numbers, w: int, kept: Kept, flags: Flags) -> tuple[Numbers, Times]:
    """The jobs (3, n) of a worker in order, as direction, stage, microbatch; and what is held during each."""
    jobs = np.argwhere(np.broadcast_to(worker == w, place.shape)).T
    jobs = jobs[:, np.argsort(place[tuple(jobs)], kind="stable")]
    d, s, b = jobs
    again = flags[s, b]
    last = d == len(place) - 1
    half = kept.half[s] if len(place) == 3 else np.zeros(len(s))
    takes = np.select([d == F, d == B], [kept.inputs[s] + kept.saved[s] * ~again, half + kept.saved[s] * again], 0.0)
    gives = np.where(last, kept.inputs[s] + kept.saved[s] + half, 0.0)
    alone = kept.graph[s] * (again & (d == F))
    return jobs, np.cumsum(takes) - np.concatenate([[0.0], np.cumsum(gives)[:-1]]) + alone
