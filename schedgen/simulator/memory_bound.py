"""A lower bound on a worker's time with limited memory, by the idle time that no order avoids at its two ends.

Until the first job that releases memory has ended, a worker starts no more forwards than its memory holds. It can do
little else until then, because the first backward comes only after the path to the loss and back. So the work from time
0 to any time t before then is bounded, and t minus this bound is idle time. With time reversed the same holds at the
end, where jobs that release memory take it. If the two stretches, of lengths t and u, do not overlap within the time T,

    T >= work + idle time in the first + idle time in the last.

If they overlap, t + u - T of their idle time may be counted twice, and the sum on the right is at most t + u. So
whenever that sum is more than t + u, it is a bound.

T may also be the window of another worker whose jobs precede all jobs of this one. Then jobs that nothing waits for,
the last of their microbatch, may run after T, at most as many as memory holds. The last stretch counts them as work
whenever they run, so its idle time may be negative. The sum remains a bound, since such a job adds to the work as much
as it takes from the idle time.

For a chain of p stages with memory for p forwards this gives the bubbles of ZB-H1, (p - 1) (F + I - W), as the least
that is possible (Qi et al. 2023, section 2), if F is no shorter than W. For a V of 8 workers and 24 microbatches of
equal jobs it gives 167, 164, ... 149 for memory of 8 to 14 half forwards, as sail-sg/zero-bubble's search finds.

An example: 1F1B on two stages, one a worker, with F = B = 1, three microbatches and memory for two forwards.

    time      0   1   2   3   4   5   6   7   8
    worker 0  F0  F1  .   B0  F2  B1  .   B2        a backward here cannot begin before t = 3: F, then F and B there
    worker 1      F0  B0  F1  B1  F2  B2

In [0, 3] worker 0 can run F0 and F1; then its memory is full, so 3 - 2 = 1 is idle. With time reversed, the same holds
of [5, 8]: B2 and B1 take the memory, no F ends after 5, and 1 is idle. The work is 6, so T >= 6 + 1 + 1 = 8, which
this list reaches; 8 is more than t + u = 3 + 3, so no idle time was counted twice. With memory for one forward, 2 is
idle at each end, and T >= 10.

Memory is reserved: the first job to release memory waits for all forwards of its microbatch on this worker. Forwards
that cannot have begun by t need memory later, so that other jobs may take only the rest.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np

from schedgen.util.arrays import Flags, Floats, Numbers, Times

MOST_NODES = 24  # nodes of a worker: with more, fewer times t are considered, and no memory is reserved


class WorkerJobs(NamedTuple):
    """The jobs of one worker, by node (a direction and a stage) in the order of directions."""

    stage: Numbers
    head: Times  # the least time from 0 to its start
    tail: Times  # the least time from its end to T; -inf: it may run after T
    length: Times
    jobs: Numbers  # how many there are
    takes: Floats  # memory that a job takes when it begins; below 0: memory that it releases when it ends
    needs: Flags  # needs[k, j]: within a microbatch, job k waits for job j

    def reversed(self) -> WorkerJobs:
        """The same jobs with time reversed."""
        return WorkerJobs(
            stage=self.stage[::-1],
            head=self.tail[::-1],
            tail=self.head[::-1],
            length=self.length[::-1],
            jobs=self.jobs[::-1],
            takes=-self.takes[::-1],
            needs=self.needs.T[::-1, ::-1],
        )


def memory_bound(worker: WorkerJobs, capacity: float) -> float:
    """The least time T that a worker needs from time 0; `capacity`: its memory, in the unit of `takes`."""
    work = float((worker.length * worker.jobs).sum())
    longest = work
    for (t, idle), (u, other) in product(_idle(worker, capacity), _idle(worker.reversed(), capacity)):
        least = float(work + idle + other)
        if least > (t + u) * (1 + 1e-9):
            longest = max(longest, least)
    return longest


def _idle(worker: WorkerJobs, capacity: float) -> list[tuple[float, float]]:
    """Times t, each with the least idle time in [0, t]; t is at most the first end of a job that releases memory.

    Jobs with a head of -inf may run before 0, but count as work in [0, t].
    """
    backs = np.flatnonzero(worker.takes < 0)
    until = float((worker.head + worker.length)[backs].min()) if len(backs) else np.inf
    times = np.unique(np.append(worker.head, until))
    times = times[np.isfinite(times) & (times <= until)]
    is_small = len(worker.head) <= MOST_NODES
    if not is_small:
        times = times[np.linspace(0, len(times) - 1, MOST_NODES).astype(np.int64)]
    takes = np.maximum(worker.takes, 0)
    before = bool((worker.head == -np.inf).any())
    times = np.append(times, 0.0) if before else times
    found = [] if before else [(0.0, 0.0)]
    for t in times:
        late = np.where(worker.head >= t, takes, 0.0)
        reserves = {float(late[worker.needs[k]].sum()) for k in backs} if is_small else {0.0}
        least = min(reserves, default=0.0)
        idle = float(t) - _most_work(worker, takes, float(t), capacity - least)
        found.append((float(t), idle if before else max(0.0, idle)))
    return found


def _most_work(worker: WorkerJobs, takes: Floats, t: float, room: float) -> float:
    """An upper bound on the work by time t while no memory is released: jobs may be cut, as in a fractional knapsack.

    Every job that takes memory also enables the jobs after it in its stage that take none.
    """
    left = np.minimum(worker.length * worker.jobs, np.maximum(t - worker.head, 0.0))  # by node, each by itself
    amounts = np.unique(takes[takes > 0])
    if len(amounts) == 1:
        room = float(amounts[0] * np.floor(room / amounts[0] + 1e-9))
    pieces: list[tuple[float, float, float]] = []  # work per unit of memory, work, memory
    total = 0.0
    for stage in np.unique(worker.stage):
        leader, behind = -1, []
        for k in [*np.flatnonzero(worker.stage == stage).tolist(), -1]:
            if k >= 0 and (takes[k] == 0 or worker.length[k] == 0):
                behind.append(k)
                continue
            if leader < 0:
                total += float(left[behind].sum())
            else:
                pieces += _pieces(worker, float(takes[leader]), left, [leader, *behind])
            leader, behind = k, []
    for density, work, memory in sorted(pieces, reverse=True):
        part = min(1.0, max(room, 0.0) / memory)
        total += part * work
        room -= memory
        if density <= 0 or room <= 0:
            break
    return total


def _pieces(worker: WorkerJobs, takes: float, left: Times, group: list[int]) -> list[tuple[float, float, float]]:
    """The work of a job that takes memory and of those after it, cut where one of them can do no more by time t."""
    length = worker.length[group]
    lasts = np.divide(left[group], length, out=np.zeros(len(group)), where=length > 0)  # in jobs
    pieces, done = [], 0.0
    for until in np.unique(np.minimum(lasts, lasts[0])):
        rate = float(length[lasts > done].sum())
        if until > done:
            pieces.append((rate / takes, rate * (until - done), (until - done) * takes))
        done = float(until)
    return pieces
