"""PipeDream's dynamic programme: the stages and replicas for which a pipeline's slowest stage is fastest.

A minibatch takes, on m workers joined by links of B bytes a second, from cut i to cut j, as one stage (T) and as the
best pipeline (A)

    T(i -> j, m) = (seconds(i -> j) + 4 (m - 1)/m |w_ij| / B) / m
    A(j, m) = min of T(0 -> j, m) and, over cuts s between and 0 < m' < m,
              max(A(s, m - m'), 2 a_s / (B m'), 2 a_j / (B m'), T(s -> j, m'))

where w_ij are the bytes of the weights between the cuts and a_s those that cross cut s. These are the terms of
PipeDream's optimizer. The paper [Narayanan et al. 2019, PipeDream, section 3.1] prints
max(seconds, 2 (m - 1) |w| / B) / m for T, 2 a_s / B for what enters a stage, and nothing for what leaves it. Layers are
cut along their order.

A replica of a stage has as many minibatches in flight as there are workers at its stage and after it, divided by the
stage's replicas and rounded up (NOAM of the first stage, section 3.2). Each of them has its own activations and its own
version of the weights (section 3.3).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from schedgen.planner.layer_profile import Layers
from schedgen.simulator.network import Network
from schedgen.util.arrays import Floats, Ints
from schedgen.util.errors import UsageError, number_of
from schedgen.util.jit import kernel

MOST_WORKERS = 2**12


class Prefixes(NamedTuple):
    """The first layers of a model, n times more of them: none, and up to each cut between two stages, and all."""

    end: Ints  # (n,) how many layers
    seconds: Floats  # (n,) of their forwards and backwards
    weight: Floats  # (n,) bytes
    kept: Floats  # (n,) bytes of a minibatch between forward and backward
    crossing: Floats  # (n,) bytes of the outputs that layers after the cut read


def prefixes(layers: Layers) -> Prefixes:
    """The prefixes for cuts before every layer that costs something; one that costs nothing is no stage of its own."""
    costs = (layers.seconds > 0) | (layers.weight > 0) | (layers.kept > 0)
    end = np.array([0, *np.flatnonzero(costs)[1:], len(layers.names)])
    seconds, weight, kept = (
        np.concatenate([[0.0], np.cumsum(amount)])[end] for amount in (layers.seconds, layers.weight, layers.kept)
    )
    return Prefixes(end, seconds, weight, kept, layers.crossing[end])


class ReplicatedStage(NamedTuple):
    """Layers `begin` to `end - 1`, on `replicas` workers."""

    begin: int
    end: int
    replicas: int
    in_flight: int  # minibatches that a replica keeps
    seconds: float  # per minibatch: computing and exchanging gradients
    transfer: float  # seconds per minibatch: receiving and sending, as far as they count
    compute: float  # seconds of a minibatch on one worker
    weight: float  # bytes
    memory: float  # bytes of a replica: outputs and weights of all minibatches in flight


class Partition(NamedTuple):
    """Stages in order; `seconds` per minibatch is the largest of their seconds and transfers."""

    seconds: float
    stages: tuple[ReplicatedStage, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """By stage, how many layers there are to its end."""
        return tuple(stage.end for stage in self.stages)

    @property
    def replicas(self) -> tuple[int, ...]:
        """By stage, its replicas."""
        return tuple(stage.replicas for stage in self.stages)


def on_links(
    layers: Layers, workers: int, network: Network | None = None, bandwidth: float | None = None
) -> tuple[Layers, float]:
    """The layers on this network or links in place of the profile's, and bytes a second: those given, else those of the
    slowest link. One worker has no links, and then a byte may take no time.

    UsageError for too many workers, or if nothing says how fast links are.
    """
    if not 1 <= workers <= MOST_WORKERS:
        raise UsageError(f"a plan is for 1 to {MOST_WORKERS} workers, not {workers}")
    if bandwidth is not None and (network or not bandwidth > 0):
        raise UsageError("bandwidth should be above 0 bytes a second, and left out beside a network")
    machine = layers.machine.on(network) if network else layers.machine
    if bandwidth:
        levels = tuple(level._replace(beta=1 / bandwidth, card=0.0) for level in machine.network.levels)
        machine = machine.on(machine.network._replace(levels=levels))
    machine.network.check(workers)
    beta = machine.network.slowest(workers)
    if bandwidth is None and not beta and workers > 1:
        raise UsageError("nothing says how fast links are (beta is 0): give --bandwidth, or a machine file with beta")
    return layers._replace(machine=machine), bandwidth or (1 / beta if beta else math.inf)


def partition(prefixes: Prefixes, workers: int, bandwidth: float, memory: float = math.inf) -> Partition:
    """The best partition on all workers; UsageError if none keeps to `memory` bytes per worker."""
    pipelines = _pipelines(prefixes, workers, workers, bandwidth, memory)
    if math.isinf(pipelines.seconds[-1, -1]):
        raise UsageError(f"no partition on {number_of(workers, 'worker')} fits into --memory {memory:g}")
    return _partition_on(workers, prefixes, pipelines, bandwidth)


def unreplicated(prefixes: Prefixes, bandwidth: float, most: int) -> list[Partition]:
    """The best partitions into 1, 2, ... stages of one worker each, up to `most` or to the number of cuts."""
    most = min(most, len(prefixes.end) - 1)
    pipelines = _pipelines(prefixes, most, 1, bandwidth, math.inf)
    return [_partition_on(workers, prefixes, pipelines, bandwidth) for workers in range(1, most + 1)]


def replicated_seconds(seconds: float, weight: float, m: int, bandwidth: float) -> float:
    """T: the time of a minibatch on m workers of which each takes `seconds` and has `weight` bytes of weights."""
    return (seconds + 4 * (m - 1) * weight / (m * bandwidth)) / m


class _Pipelines(NamedTuple):
    """The best pipelines to each cut on 0, 1, ... workers; arrays (n, workers + 1)."""

    seconds: Floats  # A
    last_cut: Ints  # where the last stage begins
    last_copies: Ints  # on how many workers the last stage is


def _pipelines(prefixes: Prefixes, workers: int, most_copies: int, bandwidth: float, memory: float) -> _Pipelines:
    n, held = len(prefixes.end), prefixes.kept + prefixes.weight
    return _Pipelines(
        *_solve.sized(n * n * workers * most_copies)(
            workers, most_copies, float(bandwidth), memory, prefixes.seconds, prefixes.weight, held, prefixes.crossing
        )
    )


def _partition_on(workers: int, prefixes: Prefixes, pipelines: _Pipelines, bandwidth: float) -> Partition:
    """The best pipeline to the last cut on this many workers."""
    cut, m, behind = len(prefixes.end) - 1, workers, 0
    stages: list[ReplicatedStage] = []
    while m > 0:
        before, q = int(pipelines.last_cut[cut, m]), int(pipelines.last_copies[cut, m])
        compute, weight, kept = (
            float(sums[cut] - sums[before]) for sums in (prefixes.seconds, prefixes.weight, prefixes.kept)
        )
        # PipeDream's optimizer leaves out what the first stage sends.
        crossing = prefixes.crossing[[before, cut]].max() if m > q else 0.0
        in_flight = _minibatches_in_flight(behind, q)
        stage = ReplicatedStage(
            begin=int(prefixes.end[before]),
            end=int(prefixes.end[cut]),
            replicas=q,
            in_flight=in_flight,
            seconds=replicated_seconds(compute, weight, q, bandwidth),
            transfer=float(2 * crossing / (bandwidth * q)),
            compute=compute,
            weight=weight,
            memory=in_flight * (kept + weight),
        )
        stages.insert(0, stage)
        cut, m, behind = before, m - q, behind + q
    return Partition(max(max(stage.seconds, stage.transfer) for stage in stages), tuple(stages))


@kernel
def _minibatches_in_flight(behind: int, copies: int) -> int:
    """Minibatches that a copy of a stage keeps, with so many workers at the stages behind it."""
    return (behind + copies - 1) // copies + 1


@kernel
def _solve(
    workers: int, most_copies: int, bandwidth: float, memory: float,
    seconds: Floats, weight: Floats, held: Floats, crossing: Floats,
) -> tuple[Floats, Ints, Ints]:  # fmt: skip
    """The arrays of _Pipelines, with at most `most_copies` of a stage; `held`: bytes that a minibatch in flight takes,
    summed up to each cut."""
    n = len(weight)
    best = np.full((n, workers + 1), np.inf)
    last_cut, copies = np.full((n, workers + 1), -1, np.int32), np.zeros((n, workers + 1), np.int32)
    for j in range(1, n):
        for m in range(1, workers + 1):
            if m <= most_copies and _minibatches_in_flight(workers - m, m) * held[j] <= memory:
                best[j, m] = (seconds[j] + 4 * (m - 1) * weight[j] / (m * bandwidth)) / m
                last_cut[j, m], copies[j, m] = 0, m
            for q in range(1, min(m - 1, most_copies) + 1):
                in_flight = _minibatches_in_flight(workers - m, q)
                leaves = 2 * crossing[j] / (bandwidth * q)
                if leaves >= best[j, m]:
                    continue
                for s in range(j - 1, 0, -1):
                    stage = (seconds[j] - seconds[s] + 4 * (q - 1) * (weight[j] - weight[s]) / (q * bandwidth)) / q
                    if stage >= best[j, m]:  # and so does every stage that begins before s
                        break
                    if best[s, m - q] >= best[j, m] or in_flight * (held[j] - held[s]) > memory:
                        continue
                    time = max(max(stage, 2 * crossing[s] / (bandwidth * q)), max(leaves, best[s, m - q]))
                    if time < best[j, m]:
                        best[j, m], last_cut[j, m], copies[j, m] = time, s, q
    return best, last_cut, copies
