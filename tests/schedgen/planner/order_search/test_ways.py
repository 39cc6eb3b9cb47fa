"""The way of every forward, keep, redo or away, against all combinations of ways on small random orders."""

import itertools
from contextlib import suppress

import numpy as np
import pytest
from examples import further

from schedgen.planner.order_search.compiled_orders import compile_order, judge
from schedgen.planner.order_search.placed_problem import least_time
from schedgen.planner.order_search.question import Limits, Question
from schedgen.planner.order_search.recompute import _Tries
from schedgen.planner.order_search.ways import Way
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.simulator.machine import Machine
from schedgen.simulator.network import HostLink, Level, Network
from schedgen.util.errors import UsageError
from schedgen.util.jit import compiled_always


def small_case(seed):
    """A question with random costs and placement of up to 6 forwards, an order, and the peak of keeping all."""
    rng = np.random.default_rng(seed)
    stages, batches = [(1, 6), (1, 5), (2, 3), (3, 2), (1, 5), (2, 3)][seed % 6]
    workers = int(rng.integers(1, min(stages, 2) + 1))
    of_stage = np.concatenate([np.arange(workers), rng.integers(0, workers, stages - workers)])
    split = bool(rng.integers(2))

    def w(s, b, d):
        return of_stage[s] + 0 * b, of_stage[s] + 0 * b

    scheme = Scheme("random", workers, w, lambda s, b, d: 0 * s, "random", "strict", split)
    sizes = Sizes(stages, batches, workers)
    cost = {d: rng.integers(2, 9, stages).astype(float) for d in ("FIW" if split else "FB")}
    saved = rng.integers(4, 12, stages) * 1e6
    host = HostLink(float(rng.integers(2)) / 10, float(rng.choice([1e-7, 4e-7, 1e-6, 3e-6])), int(rng.integers(1, 3)))
    network = Network((Level("network", 0, 0.1, 1e-8),), host=host)
    machine = Machine(activation=1e6, saved=saved, weight=1e6, owned=2e6, workspace=5e5, half=1e5 * split).on(network)
    n = random_order(rng, stages, batches, 3 if split else 2)
    question = Question(scheme, sizes, cost, machine, ways=(Way.REDO, Way.AWAY))
    peak = judge(question, compile_order(question, n)).run.footprint.peak.max()
    return question._replace(
        limits=Limits(bytes=float(peak - rng.choice([0.8, 1, 1.3, 1.6, 2][: 3 + (batches > 4)]) * saved.max()))
    ), n


def random_order(rng, stages, batches, directions):
    """A number of every job, (D, S, B), of a random order that runs; forwards tend to come first."""
    n, done = np.full((directions, stages, batches), -1), itertools.count()
    nodes = [(0, s) for s in range(stages)] + [(1, s) for s in reversed(range(stages))]
    before = dict(itertools.pairwise(nodes))
    needs = {after: [first] for first, after in before.items()} | {(2, s): [(1, s)] for s in range(stages)}
    eager = rng.uniform(1, 8)
    left = {(d, s, b) for d in range(directions) for s in range(stages) for b in range(batches)}
    while left:
        ready = [job for job in sorted(left) if all(n[(*node, job[2])] >= 0 for node in needs.get(job[:2], []))]
        weights = np.array([eager if d == 0 else 1.0 for d, _, _ in ready])
        job = ready[rng.choice(len(ready), p=weights / weights.sum())]
        n[job] = next(done)
        left.remove(job)
    return n


def best_of_all(question, n):
    """The least time of all combinations of ways that fit; infinity if none does.

    They are tried in the order of the work of the worker that has most, less than which none takes, until the best
    found takes no more.
    """
    shape, least = n.shape[1:], np.inf
    every = np.array([*itertools.product(Way, repeat=n[0].size)], np.int8).reshape(-1, *shape)
    forward, times = np.array(question.cost["F"]), sum(map(np.array, question.cost.values()))
    by_stage = times * shape[1] + forward * (every == Way.REDO).sum(axis=2)
    of_stage = question.scheme.w(np.arange(shape[0]), 0, 0)[1]
    work = np.max([by_stage[:, of_stage == w].sum(axis=1) for w in set(of_stage.tolist())], axis=0)
    for k in np.argsort(work, kind="stable").tolist():
        if work[k] >= least:
            break
        with suppress(UsageError):
            judged = judge(question, compile_order(question, n, every[k]))
            least = min(least, judged.value if judged.fits else np.inf)
    return least


def decided(question, n):
    """The time that the search's decision gives this order, infinity if it finds none that fits; and its bound."""
    tries = _Tries(question, 0.0)
    best = tries.decided(n)
    free = question._replace(limits=Limits())
    bound = max(least_time(free), tries.least_with_ways(free))
    return (np.inf if best is None else tries.improved(n, best, 1000).judged.value), bound


@pytest.mark.parametrize("seed", [*range(0, 12), *further(*range(12, 200))])
def test_the_decision_is_within_two_percent_of_the_best_of_all(seed):
    with compiled_always():
        question, n = small_case(seed)
        best = best_of_all(question, n)
        value, bound = decided(question, n)
    assert bound <= best * (1 + 1e-9)
    assert value <= 1.02 * best
