"""A lower bound on a candidate's time and memory from its placement and order, before it is compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from schedgen.compiler.place import place_jobs, priorities
from schedgen.ir.cost import by_stage, has_both, redo_duration, shortest_halves, without_redo
from schedgen.ir.instructions import B, F
from schedgen.planner.candidates import Candidate
from schedgen.planner.stage_costs import StageCosts
from schedgen.simulator.lower_bounds import window_bound
from schedgen.util.arrays import Floats, Ints


class CandidateBound(NamedTuple):
    """No schedule of a candidate takes fewer seconds a step, or fewer bytes on the worker that needs most."""

    seconds: float
    bytes: float
    least: float  # bytes, for any way to gather the layers into as many stages


def candidate_bound(candidate: Candidate) -> CandidateBound:
    """The bound that holds for all stage costs of a candidate."""
    scheme, sizes = candidate.scheme, candidate.sizes
    shape = (sizes.stages, sizes.microbatches, 3 if scheme.split else 2)
    weights, compute, *_ = place_jobs(scheme, *shape)
    n = priorities(scheme, *shape) if scheme.mode == "strict" else None
    bounds = [_bound(candidate, costs, weights[..., 0], compute[..., 0], n) for costs in candidate.costs]
    return CandidateBound(*map(min, zip(*bounds, strict=True)))


def _bound(candidate: Candidate, costs: StageCosts, weights: Ints, compute: Ints, n: Any) -> CandidateBound:
    """The bound for one of the stage costs; by job, (D, S, B): `weights`, `compute`, `n`, which is None if greedy."""
    S, workers, machine = candidate.sizes.stages, candidate.sizes.workers or 1, costs.machine
    times = costs.durations(candidate.scheme.split)
    if candidate.scheme.unsplit_backward is not None and has_both(costs.times):
        times |= shortest_halves(costs.times, S)
    lengths = np.array([*without_redo(times).values()])
    recompute = redo_duration(times) if candidate.recompute else np.zeros(S)
    owned = by_stage(machine.weight if machine.owned is None else machine.owned, S)
    weight, saved, step = (by_stage(amount, S) for amount in (machine.weight, machine.saved, machine.step))
    message, copy = map(machine.message_times, (costs.passed_on, weight))
    sends, receives, steps = np.zeros((3, workers))  # seconds of a worker's link out, of its link in, of its STEPs
    owns, copies = np.zeros((2, workers))  # bytes of its own stages and their gradients, of its largest foreign copy
    counts = np.zeros(S)  # owners of each stage
    for s in range(S):
        owners = np.zeros(workers, bool)
        owners[np.unique(weights[:, s])] = True
        counts[s] = owners.sum()
        owns[owners] += owned[s] + weight[s]
        steps[owners] += step[s]
        guests = np.zeros(workers, bool)
        guests[np.unique(compute[:, s])] = True
        guests &= ~owners
        receives[guests] += copy[s]
        copies[guests] = np.maximum(copies[guests], 2 * weight[s])  # the copy and its gradient
        for d, (a, b) in ((F, (s - 1, s)), (B, (s, s - 1))):
            if s:
                crosses = compute[d, a] != compute[d, b]
                sends += message[s - 1] * np.bincount(compute[d, a][crosses], minlength=workers)
                receives += message[s - 1] * np.bincount(compute[d, b][crosses], minlength=workers)
    kept = np.concatenate([[0.0], costs.passed_on]) + (0 if candidate.recompute else saved)
    latency = window_bound(compute, lengths, recompute, message, workers) + steps.max()
    seconds = float(max(latency, sends.max(), receives.max()))
    least = counts.min() * (owned + weight).sum() / len(np.unique(weights))
    peak = owns + copies + _saved(kept, compute, workers, n)
    return CandidateBound((1 - 1e-9) * seconds, float(peak.max()), float(least))


def _saved(kept: Floats, compute: Ints, workers: int, n: Any) -> Floats:
    """The peak bytes that each worker saves for backwards; `kept`: bytes of a job, by stage; n is None: of one job."""
    peak = np.zeros(workers)
    bytes = np.broadcast_to(kept[:, None], compute.shape[1:])
    if n is None:
        np.maximum.at(peak, compute[F].ravel(), bytes.ravel())
        return peak
    worker = compute[: B + 1].ravel()
    order = np.lexsort((n[: B + 1].ravel(), worker))
    alive = np.cumsum(np.concatenate([bytes.ravel(), -bytes.ravel()])[order])  # each worker's sum ends at 0
    np.maximum.at(peak, worker[order], alive)
    return peak
