"""PipeDream's dynamic programme: the stages and replicas for which a pipeline's slowest stage is fastest.

A minibatch takes, on m components of level k of the workers, from cut i to cut j, as one stage (T) and as the best
pipeline (A)

    T_k(i -> j, m) = (A_{k-1}(i -> j, m_{k-1}) + 4 (m - 1)/m |w_ij| / B_k) / m
    A_k(i -> j, m) = min of T_k(i -> j, m) and, over cuts s between and 0 < m' < m,
                     max(A_k(i -> s, m - m'), 2 a_s / (B_k m'), 2 a_j / (B_k m'), T_k(s -> j, m'))

schedgen/README.md, "The partition", says what the terms are, and where they differ from those that the paper prints
[Narayanan et al. 2019, PipeDream, section 3.1].

A replica of a stage has as many minibatches in flight as there are workers at its stage and after it, divided by the
stage's replicas and rounded up (NOAM of the first stage, section 3.2). Each of them has its own activations and its own
version of the weights (section 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from schedgen.planner.layer_downsets import Downsets
from schedgen.util.arrays import Flags, Floats, Ints
from schedgen.util.errors import UsageError, number_of
from schedgen.util.jit import kernel
from schedgen.util.progress import over

MOST_WORKERS = 2**12
MOST_ENTRIES = 2**28  # of a table


class Level(NamedTuple):
    """`components` of the level below, joined by links of `bandwidth` bytes per second."""

    components: int
    bandwidth: float


class Hierarchy(tuple[Level, ...]):
    """The levels, the lowest first."""

    @property
    def workers(self) -> int:
        """How many workers there are in all."""
        return math.prod(level.components for level in self)

    @property
    def slowest(self) -> float:
        """The bandwidth of the slowest level."""
        return min(level.bandwidth for level in self)


class ReplicatedStage(NamedTuple):
    """The layers between cuts `begin` and `end`, on `replicas` workers."""

    begin: int
    end: int
    replicas: int
    in_flight: int  # minibatches that a replica keeps
    seconds: float  # per minibatch: computing and exchanging gradients
    transfer: float  # seconds per minibatch: receiving and sending, as far as they count


class Partition(NamedTuple):
    """Stages in order; `seconds` per minibatch is the largest of their seconds and transfers."""

    seconds: float
    stages: tuple[ReplicatedStage, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """By stage, the cut where it ends."""
        return tuple(stage.end for stage in self.stages)

    @property
    def replicas(self) -> tuple[int, ...]:
        """By stage, its replicas."""
        return tuple(stage.replicas for stage in self.stages)


def hierarchy(
    workers: int | None, topology: Sequence[int] | None, bandwidths: Sequence[float] | None, beta: float
) -> Hierarchy:
    """The levels that a user asks for, the lowest first; UsageError if the arguments do not agree.

    Without a topology there is one level of `workers`; without `bandwidths` all links have 1 / beta. One worker has no
    links, and then beta may be 0.
    """
    components = topology or ([workers] if workers else [])
    if not components:
        raise UsageError("plan needs --workers W or --topology AxB (see schedgen plan --help)")
    total = math.prod(components)
    if workers not in (None, total):
        raise UsageError(f"--topology {'x'.join(map(str, components))} has {total} workers, not {workers}")
    if total > MOST_WORKERS:
        raise UsageError(f"a plan is for {MOST_WORKERS} workers at the most, not {total}")
    if bandwidths is None:
        if not beta and total > 1:
            raise UsageError("the profile does not say how fast links are (its beta is 0): give --bandwidth")
        bandwidths = [1 / beta if beta else math.inf] * len(components)
    if len(bandwidths) != len(components):
        numbers = number_of(len(components), "number")
        raise UsageError(f"--bandwidth needs {numbers}, one for each level, not {len(bandwidths)}")
    return Hierarchy(Level(*pair) for pair in zip(components, bandwidths, strict=True))


def partition(downsets: Downsets, levels: Sequence[Level], memory: float = math.inf) -> Partition:
    """The best partition on all workers; UsageError if none keeps to `memory` bytes per worker."""
    solver = _Solver(downsets, levels, memory)
    pipelines = solver.from_cut(len(levels), 0, 0)
    if math.isinf(pipelines.best[-1, -1]):
        raise UsageError(f"no partition on {number_of(solver.workers[-1], 'worker')} fits into --memory {memory:g}")
    return _as_partition(solver.stages(pipelines))


def unreplicated(downsets: Downsets, bandwidth: float, most: int) -> list[Partition]:
    """The best partitions into 1, 2, ... stages of one worker each, up to `most` or to the number of layers."""
    solver = _Solver(downsets, [Level(min(most, len(downsets.seconds) - 1), bandwidth)], math.inf, most=1)
    pipelines = solver.from_cut(1, 0, 0)
    return [_as_partition(solver.stages(pipelines, components=m)) for m in range(1, solver.levels[0].components + 1)]


def data_parallel_seconds(downsets: Downsets, levels: Sequence[Level]) -> float:
    """Seconds per minibatch with all layers on every worker."""
    seconds = float(downsets.seconds[-1])
    for level in levels:
        seconds = _replicated_seconds(seconds, float(downsets.weight[-1]), level.components, level.bandwidth)
    return seconds


def _replicated_seconds(seconds: float, weight: float, m: int, bandwidth: float) -> float:
    """T_k of m components that take `seconds` each and have `weight` bytes of weights."""
    return (seconds + 4 * (m - 1) * weight / (m * bandwidth)) / m


def _as_partition(stages: list[ReplicatedStage]) -> Partition:
    return Partition(max(max(stage.seconds, stage.transfer) for stage in stages), tuple(stages))


class _Pipelines(NamedTuple):
    """The best pipelines at a level from cut `begin`; arrays (n, m_k + 1), by cut at the end and by components used."""

    level: int
    begin: int
    tail: int
    best: Floats  # A_k
    last_cut: Ints  # where the last stage begins
    last_copies: Ints  # on how many components the last stage is


class _Solver:
    """Tables of A_k for every level, from which partitions are read.

    A component's tail is the number of workers after it divided by the number of its copies, rounded up: a worker of
    tail t keeps t + 1 minibatches. Inside a component of tail t, a stage of q copies with p of the component's workers
    after it gives each copy the tail ceil((t + p) / q). Without a memory limit tails do not matter, and the tables
    are for tail 0 only.
    """

    def __init__(self, downsets: Downsets, levels: Sequence[Level], memory: float, most: int = MOST_WORKERS) -> None:
        """`memory`: bytes that a worker may hold; `most`: the most copies of a stage."""
        self.downsets, self.levels, self.memory, self.most = downsets, levels, memory, most
        self.workers = [math.prod(level.components for level in levels[:k]) for k in range(len(levels) + 1)]
        self.held = downsets.kept + downsets.weight  # bytes that a minibatch in flight takes, summed from cut 0
        self.heaviest = np.maximum.accumulate(downsets.weight)
        self.tails: list[list[int]] = [[0]] * len(levels)  # by level below the highest
        above = [0]
        for k in range(len(levels), 1, -1):
            above = sorted({int(inner) for tail in above for inner in self._inner_tails(k, tail)[1:, 1:].ravel()})
            self.tails[k - 1] = above = [0] if math.isinf(memory) else above
        # By level, seconds on a component: [its tail, to cut j, from cut i]; and the least from i or before.
        seconds = np.where(downsets.contains, downsets.seconds[:, None] - downsets.seconds, np.inf)
        self.tables = [seconds[None]]
        self.least = [np.minimum.accumulate(seconds[None], axis=2)]
        for k in range(1, len(levels)):
            self.tables.append(self._table(k))
            self.least.append(np.minimum.accumulate(self.tables[k], axis=2))

    def _table(self, k: int) -> Floats:
        n = len(self.held)
        if len(self.tails[k]) * n * n > MOST_ENTRIES:
            raise UsageError(f"{n - 1} layers on {self.workers[-1]} workers with --memory are too many for a plan")
        table = np.full((len(self.tails[k]), n, n), np.inf)
        entries = [(t, begin) for t in range(len(self.tails[k])) for begin in range(n - 1)]
        for t, begin in over(entries, f"level {k}", len(entries)):
            table[t, :, begin] = self.from_cut(k, begin, self.tails[k][t]).best[:, -1]
        return table

    def _inner_tails(self, k: int, tail: int) -> Ints:
        """[m, q]: in a component of level k, the tail of a stage's q copies if all but m components follow (q <= m)."""
        M = self.levels[k - 1].components
        m, q = np.arange(M + 1)[:, None], np.maximum(np.arange(M + 1), 1)
        workers = tail + (M - m) * self.workers[k - 1]
        return (-(-workers // np.minimum(q, np.maximum(m, 1)))).astype(np.int32)

    def from_cut(self, k: int, begin: int, tail: int) -> _Pipelines:
        """The best pipelines from cut `begin` on a component of level k with this tail."""
        M, bandwidth = self.levels[k - 1]
        n, most = len(self.held), min(M, self.most)
        tails = self._inner_tails(k, tail)
        index = np.searchsorted(self.tails[k - 1], tails) if len(self.tails[k - 1]) > 1 else np.zeros_like(tails)
        columns = _solve.sized(n * n * M * most * (n if len(self.levels) > 1 else 1))(
            begin, M, most, float(bandwidth), self.tables[k - 1], self.least[k - 1], index.astype(np.int32), tails + 1,
            self.downsets.weight, self.heaviest, self.held, self.memory if k == 1 else np.inf, self.downsets.crossing,
            self.downsets.contains,
        )  # fmt: skip
        return _Pipelines(k, begin, tail, *columns)

    def stages(self, pipelines: _Pipelines, end: int = -1, components: int = -1) -> list[ReplicatedStage]:
        """The stages of the best pipeline to cut `end` on this many components; by default to the last cut, on all."""
        bandwidth = self.levels[pipelines.level - 1].bandwidth
        tails = self._inner_tails(pipelines.level, pipelines.tail)
        j, m = range(len(self.held))[end], range(pipelines.best.shape[1])[components]
        stages: list[ReplicatedStage] = []
        while m > 0:
            i, q = int(pipelines.last_cut[j, m]), int(pipelines.last_copies[j, m])
            enters, leaves = (2 * float(self.downsets.crossing[cut]) / (bandwidth * q) for cut in (i, j))
            weight = float(self.downsets.weight[j] - self.downsets.weight[i])
            copies = [
                stage._replace(
                    replicas=stage.replicas * q,
                    seconds=_replicated_seconds(stage.seconds, weight, q, bandwidth),
                    transfer=_replicated_seconds(stage.transfer, weight, q, bandwidth) if stage.transfer else 0.0,
                )
                for stage in self._on_component(pipelines.level - 1, i, j, int(tails[m, q]))
            ]
            if m > q:  # not the first stage, whose sends PipeDream's optimizer leaves out
                copies[0] = copies[0]._replace(transfer=max(copies[0].transfer, enters))
                copies[-1] = copies[-1]._replace(transfer=max(copies[-1].transfer, leaves))
            stages[:0] = copies
            j, m = i, m - q
        return stages

    def _on_component(self, k: int, i: int, j: int, tail: int) -> list[ReplicatedStage]:
        """The stages from cut i to cut j on a component of level k."""
        if k == 0:
            seconds = float(self.downsets.seconds[j] - self.downsets.seconds[i])
            return [ReplicatedStage(i, j, 1, tail + 1, seconds, 0.0)]
        return self.stages(self.from_cut(k, i, tail), j)


@kernel
def _solve(
    begin: int, components: int, most: int, bandwidth: float, tables: Floats, least: Floats, index: Ints,
    in_flight: Ints, weight: Floats, heaviest: Floats, held: Floats, memory: float, crossing: Floats, contains: Flags,
) -> tuple[Floats, Ints, Ints]:  # fmt: skip
    """A_k from the cut `begin` with at most `most` copies of a stage, as the arrays of _Pipelines.

    By [m, q], the components used and the copies of the last stage: `index`, the table of A_{k-1} for that stage,
    and `in_flight`, the minibatches that its replicas keep.
    """
    n = len(weight)
    best = np.full((n, components + 1), np.inf)
    last_cut, copies = np.full((n, components + 1), -1, np.int32), np.zeros((n, components + 1), np.int32)
    for j in range(begin + 1, n):
        if not contains[j, begin]:
            continue
        for m in range(1, components + 1):
            if m <= most and in_flight[m, m] * (held[j] - held[begin]) <= memory:
                exchange = 4 * (m - 1) * (weight[j] - weight[begin]) / (m * bandwidth)
                best[j, m] = (tables[index[m, m], j, begin] + exchange) / m
                last_cut[j, m], copies[j, m] = begin, m
            for q in range(1, min(m - 1, most) + 1):
                t = index[m, q]
                leaves = 2 * crossing[j] / (bandwidth * q)
                if leaves >= best[j, m]:
                    continue
                for s in range(j - 1, begin, -1):
                    # No stage that begins here or before and ends at j takes less.
                    if (least[t, j, s] + 4 * (q - 1) * (weight[j] - heaviest[s]) / (q * bandwidth)) / q >= best[j, m]:
                        break
                    if best[s, m - q] >= best[j, m] or not contains[j, s]:
                        continue
                    if in_flight[m, q] * (held[j] - held[s]) > memory:
                        continue
                    exchange = 4 * (q - 1) * (weight[j] - weight[s]) / (q * bandwidth)
                    time = max((tables[t, j, s] + exchange) / q, 2 * crossing[s] / (bandwidth * q))
                    time = max(time, max(leaves, best[s, m - q]))
                    if time < best[j, m]:
                        best[j, m], last_cut[j, m], copies[j, m] = time, s, q
    return best, last_cut, copies
