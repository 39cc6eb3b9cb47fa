"""PipeDream's dynamic programme: stages and their replicas that make the slowest stage of a pipeline fastest.

The workers are a hierarchy: level k has m_k components of level k - 1, joined
by links of bandwidth B_k; a component of level 0 is a worker. On m components
of level k, one stage, and a pipeline, from cut i to cut j take a minibatch
[Narayanan et al. 2019, PipeDream, section 3.1]

    T_k(i -> j, m) = (A_{k-1}(i -> j, m_{k-1}) + 4 (m - 1)/m |w_ij| / B_k) / m
    A_k(i -> j, m) = min of T_k(i -> j, m) and, over cuts s between and 0 < m' < m,
                     max(A_k(i -> s, m - m'), 2 a_s / (B_k m'), 2 a_j / (B_k m'), T_k(s -> j, m'))

with A_0 the seconds of the layers, |w_ij| the bytes of their weights and a_s
the bytes that cross a cut (none the last). These are the terms of PipeDream's
optimizer. As the paper prints them, T takes the larger of computing and
exchanging gradients instead of the sum and has 2 (m - 1) there, and transfers
are 2 a_s / B_k.

Of the workers at a stage and behind it each replica has a share, and keeps as
many minibatches in flight, each with its activations and version of weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from schedgen.ir.instructions import Ints
from schedgen.planner.layer_downsets import Cuts, Flags
from schedgen.planner.layer_profile import Numbers
from schedgen.util.errors import UsageError
from schedgen.util.jit import kernel
from schedgen.util.progress import over

MOST_WORKERS = 2**12
MOST_ENTRIES = 2**28  # of a table


class Level(NamedTuple):
    """So many components of the level below, joined by links of so many bytes a second."""

    components: int
    bandwidth: float


class Stage(NamedTuple):
    begin: int  # its layers are those between these two cuts
    end: int
    replicas: int
    in_flight: int  # minibatches that a replica keeps
    seconds: float  # a minibatch: computing and exchanging gradients
    transfer: float  # a minibatch: what enters and what leaves, as far as it counts


class Partition(NamedTuple):
    seconds: float  # a minibatch: the largest of all stages' seconds and transfers
    stages: tuple[Stage, ...]


def hierarchy(
    workers: int | None, topology: Sequence[int] | None, bandwidths: Sequence[float] | None, beta: float
) -> list[Level]:
    """The levels that a user asks for: of `workers`, if there is no topology; with links of 1 / beta, unless given."""
    components = topology or ([workers] if workers else [])
    if not components:
        raise UsageError("plan needs --workers W or --topology AxB (see schedgen plan --help)")
    if workers not in (None, math.prod(components)):
        words = "x".join(map(str, components))
        raise UsageError(f"--topology {words} has {math.prod(components)} workers, not {workers}")
    if bandwidths is None:
        if not beta:
            raise UsageError("the profile does not say how fast links are: give --bandwidth")
        bandwidths = [1 / beta] * len(components)
    if len(bandwidths) != len(components):
        raise UsageError(f"--bandwidth needs {len(components)} numbers, one for each level, not {len(bandwidths)}")
    return [Level(*pair) for pair in zip(components, bandwidths, strict=True)]


def partition(cuts: Cuts, levels: Sequence[Level], memory: float = math.inf) -> Partition:
    """The best partition on all workers; `memory`: the most bytes a worker may hold.

    Raises UsageError where there is none.
    """
    solver = _Solver(cuts, levels, memory)
    found = solver.from_cut(len(levels), 0, 0)
    if math.isinf(found.best[-1, -1]):
        raise UsageError(f"no partition on {solver.workers[-1]} workers fits into --memory {memory:g}")
    return _slowest(solver.stages(found))


def straight(cuts: Cuts, bandwidth: float, most: int) -> list[Partition]:
    """The best partitions without replicas into 1, 2, ... stages, `most` of them unless there are fewer layers."""
    solver = _Solver(cuts, [Level(min(most, len(cuts.seconds) - 1), bandwidth)], math.inf, replicas=1)
    found = solver.from_cut(1, 0, 0)
    return [_slowest(solver.stages(found, components=m)) for m in range(1, solver.levels[0].components + 1)]


def data_parallel(cuts: Cuts, levels: Sequence[Level]) -> float:
    """Seconds a minibatch with all layers on every worker."""
    seconds = float(cuts.seconds[-1])
    for level in levels:
        seconds = _replicated(seconds, float(cuts.weight[-1]), level.components, level.bandwidth)
    return seconds


def _replicated(seconds: float, weight: float, m: int, bandwidth: float) -> float:
    """T: so many seconds and bytes of weights on m components."""
    return (seconds + 4 * (m - 1) * weight / (m * bandwidth)) / m


def _slowest(stages: list[Stage]) -> Partition:
    return Partition(max(max(one.seconds, one.transfer) for one in stages), tuple(stages))


class _Pipelines(NamedTuple):
    """The best pipelines at a level from one cut; arrays (n, m_k + 1): to a cut, on so many components."""

    level: int
    begin: int
    tail: int
    best: Numbers  # A
    cut: Ints  # where the last stage begins
    copies: Ints  # on how many components that lies


class _Solver:
    """A component's tail: the workers behind it over the number of its copies, rounded up.

    A worker of tail t keeps t + 1 minibatches. On a component of tail t, a
    stage of q copies with p workers of the component behind it gives each the
    tail ceil((t + p) / q). Where memory is no matter, tables are for tail 0 only.
    """

    def __init__(self, cuts: Cuts, levels: Sequence[Level], memory: float, replicas: int = MOST_WORKERS) -> None:
        self.cuts, self.levels, self.memory, self.replicas = cuts, levels, memory, replicas
        self.workers = [math.prod(level.components for level in levels[:k]) for k in range(len(levels) + 1)]
        if self.workers[-1] > MOST_WORKERS:
            raise UsageError(f"a plan is for {MOST_WORKERS} workers at the most, not {self.workers[-1]}")
        self.held = cuts.kept + cuts.weight
        self.heaviest = np.maximum.accumulate(cuts.weight)
        self.behind = np.ascontiguousarray(cuts.follows.T)  # [j, i]: j follows i
        self.tails: list[list[int]] = [[0]] * len(levels)  # by level below the highest
        above = [0]
        for k in range(len(levels), 1, -1):
            above = sorted({int(one) for tail in above for one in self._tails(k, tail)[1:, 1:].ravel()})
            self.tails[k - 1] = above = [0] if math.isinf(memory) else above
        # By level, seconds on a component: [its tail, to cut j, from cut i]; and the least from i or before.
        seconds = np.where(self.behind, cuts.seconds[:, None] - cuts.seconds, np.inf)
        self.tables = [seconds[None]]
        self.least = [np.minimum.accumulate(seconds[None], axis=2)]
        for k in range(1, len(levels)):
            self.tables.append(self._table(k))
            self.least.append(np.minimum.accumulate(self.tables[k], axis=2))

    def _table(self, k: int) -> Numbers:
        n = len(self.held)
        if len(self.tails[k]) * n * n > MOST_ENTRIES:
            raise UsageError(f"{n - 1} layers on {self.workers[-1]} workers with --memory are too many for a plan")
        table = np.full((len(self.tails[k]), n, n), np.inf)
        jobs = [(at, begin) for at in range(len(self.tails[k])) for begin in range(n - 1)]
        for at, begin in over(jobs, f"level {k}", len(jobs)):
            table[at, :, begin] = self.from_cut(k, begin, self.tails[k][at]).best[:, -1]
        return table

    def _tails(self, k: int, tail: int) -> Ints:
        """On a component of level k, [m, q]: the tail of q copies behind which lie all but m components (q <= m)."""
        M = self.levels[k - 1].components
        m, q = np.arange(M + 1)[:, None], np.maximum(np.arange(M + 1), 1)
        workers = tail + (M - m) * self.workers[k - 1]
        return (-(-workers // np.minimum(q, np.maximum(m, 1)))).astype(np.int32)

    def from_cut(self, k: int, begin: int, tail: int) -> _Pipelines:
        """The best pipelines on a component of level k and of that tail that begin at a cut."""
        M, bandwidth = self.levels[k - 1]
        n = len(self.held)
        tails = self._tails(k, tail)
        which = np.searchsorted(self.tails[k - 1], tails) if len(self.tails[k - 1]) > 1 else np.zeros_like(tails)
        found = _solve.sized(n * n * M * min(M, self.replicas) * (n if len(self.levels) > 1 else 1))(
            begin, M, min(M, self.replicas), float(bandwidth), self.tables[k - 1], self.least[k - 1],
            which.astype(np.int32), tails + 1, self.cuts.weight, self.heaviest, self.held,
            self.memory if k == 1 else np.inf, self.cuts.crossing, self.behind,
        )  # fmt: skip
        return _Pipelines(k, begin, tail, *found)

    def stages(self, found: _Pipelines, end: int = -1, components: int = -1) -> list[Stage]:
        """The stages of the best pipeline to a cut, on so many components; all unless given."""
        bandwidth = self.levels[found.level - 1].bandwidth
        tails = self._tails(found.level, found.tail)
        j, m = range(len(self.held))[end], range(found.best.shape[1])[components]
        stages: list[Stage] = []
        while m > 0:
            i, q = int(found.cut[j, m]), int(found.copies[j, m])
            into, out = (2 * float(self.cuts.crossing[cut]) / (bandwidth * q) for cut in (i, j))
            weight = float(self.cuts.weight[j] - self.cuts.weight[i])
            parts = [
                one._replace(
                    replicas=one.replicas * q,
                    seconds=_replicated(one.seconds, weight, q, bandwidth),
                    transfer=_replicated(one.transfer, weight, q, bandwidth) if one.transfer else 0.0,
                )
                for one in self._inner(found.level - 1, i, j, int(tails[m, q]))
            ]
            if m > q:  # not the first: PipeDream's optimizer leaves out what that sends
                parts[0] = parts[0]._replace(transfer=max(parts[0].transfer, into))
                parts[-1] = parts[-1]._replace(transfer=max(parts[-1].transfer, out))
            stages[:0] = parts
            j, m = i, m - q
        return stages

    def _inner(self, k: int, i: int, j: int, tail: int) -> list[Stage]:
        """The stages on a component of level k."""
        if k == 0:
            return [Stage(i, j, 1, tail + 1, float(self.cuts.seconds[j] - self.cuts.seconds[i]), 0.0)]
        return self.stages(self.from_cut(k, i, tail), j)


@kernel
def _solve(
    begin: int, components: int, most: int, bandwidth: float, table: Numbers, least: Numbers, which: Ints,
    in_flight: Ints, weight: Numbers, heaviest: Numbers, held: Numbers, room: float, crossing: Numbers, behind: Flags,
) -> tuple[Numbers, Ints, Ints]:  # fmt: skip
    """A from the cut `begin`; `which`: by components used and copies, the table of the stage that is the last."""
    n = len(weight)
    best = np.full((n, components + 1), np.inf)
    cut, copies = np.full((n, components + 1), -1, np.int32), np.zeros((n, components + 1), np.int32)
    for j in range(begin + 1, n):
        if not behind[j, begin]:
            continue
        for m in range(1, components + 1):
            if m <= most and in_flight[m, m] * (held[j] - held[begin]) <= room:
                exchange = 4 * (m - 1) * (weight[j] - weight[begin]) / (m * bandwidth)
                best[j, m] = (table[which[m, m], j, begin] + exchange) / m
                cut[j, m], copies[j, m] = begin, m
            for q in range(1, min(m - 1, most) + 1):
                of = which[m, q]
                out = 2 * crossing[j] / (bandwidth * q)
                if out >= best[j, m]:
                    continue
                for s in range(j - 1, begin, -1):
                    # No stage from here or before to j takes less.
                    if (least[of, j, s] + 4 * (q - 1) * (weight[j] - heaviest[s]) / (q * bandwidth)) / q >= best[j, m]:
                        break
                    if best[s, m - q] >= best[j, m] or not behind[j, s]:
                        continue
                    if in_flight[m, q] * (held[j] - held[s]) > room:
                        continue
                    exchange = 4 * (q - 1) * (weight[j] - weight[s]) / (q * bandwidth)
                    time = max((table[of, j, s] + exchange) / q, 2 * crossing[s] / (bandwidth * q))
                    time = max(time, max(out, best[s, m - q]))
                    if time < best[j, m]:
                        best[j, m], cut[j, m], copies[j, m] = time, s, q
    return best, cut, copies
