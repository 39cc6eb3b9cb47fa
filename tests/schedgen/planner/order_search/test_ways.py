"""The way of every forward, keep, redo or away, against all combinations of ways on small random orders."""

import itertools
import json
from contextlib import suppress

import numpy as np
import pytest
from examples import further

from schedgen.ir.instructions import Op
from schedgen.planner.order_search.compiled_orders import compile_order, judge
from schedgen.planner.order_search.problem import least_time
from schedgen.planner.order_search.question import Limits, Question
from schedgen.planner.order_search.search_ways import _Tries
from schedgen.planner.order_search.ways import Way, most_held
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
    less = rng.choice([0.8, 1, 1.3, 1.6, 2][: 3 + (batches > 4)]) * saved.max()
    return question._replace(limits=Limits(bytes=float(peak - less))), n


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

    Left out are combinations that certainly do not fit: what saved forwards, inputs and halves take is too much beside
    what a worker owns (`test_no_ways_hold_less_than_is_said` proves that sum); and those that ask for what no program
    has, a forward away for too short. The rest is tried in the order of the work of the worker that has most, less than
    which none takes, until the best found takes no more.
    """
    tries, shape, least = _Tries(question, 0.0), n.shape[1:], np.inf
    orders = tries._worker_orders(n)
    room = tries._capacities(n, orders)[1]
    every = np.array([*itertools.product(Way, repeat=n[0].size)], np.int8).reshape(-1, *shape)
    every = [ways for ways in every if (most_held(orders, tries.kept, ways) <= room).all() and is_away(orders, ways)]
    work = [max(worker_work(question, order, ways) for order in orders) for ways in every]
    for k in np.argsort(work, kind="stable").tolist():
        if work[k] >= least:
            break
        judged = judge(question, compile_order(question, n, every[k]))
        least = min(least, judged.value if judged.fits else np.inf)
    return least


def is_away(orders, ways):
    """Whether each forward that is to be away is long enough from a user of it: a job runs while it is away."""
    for order in orders:
        redone = order.place[1, ways[order.forwards] == Way.REDO]
        rows = order.place + np.searchsorted(np.sort(redone), order.place, side="right")  # each has an R before it
        if (ways[order.forwards] == Way.AWAY)[np.diff(rows, axis=0).max(axis=0) < 4].any():
            return False
    return True


def worker_work(question, order, ways):
    cost, again = question.cost, order.stage[ways[order.forwards] == Way.REDO]
    return sum(time[order.stage].sum() for time in cost.values()) + cost["F"][again].sum()


def decided(question, n):
    """The time that the search's decision gives this order, infinity if it finds none that fits; and its bound."""
    tries = _Tries(question, 0.0)
    best = tries.improved(n, tries.decided(n), 1000).judged
    return (best.value if best.fits else np.inf), least_time(question._replace(limits=Limits()))


def test_no_ways_hold_less_than_is_said():
    """What `held` counts, and what workers own, is no more than the simulator's peak."""
    rng = np.random.default_rng(1)
    for seed in range(40):
        question, n = small_case(seed)
        tries, ways = _Tries(question, 0.0), rng.integers(0, 3, n.shape[1:]).astype(np.int8)
        orders = tries._worker_orders(n)
        with suppress(UsageError):
            program = compile_order(question, n, ways)
            footprint = judge(question, program).run.footprint
            assert (most_held(orders, tries.kept, ways) <= footprint.peak - footprint.owned).all()
            away = (program.job_rows(Op.OFFLOAD) >= 0) == (ways == Way.AWAY)
            assert away.all() == is_away(orders, ways)


@pytest.mark.parametrize("seed", [1, 4, 9, 10, 11, *further(*range(200))])
def test_the_decision_is_within_two_percent_of_the_best_of_all(seed):
    with compiled_always():
        question, n = small_case(seed)
        best = best_of_all(question, n)
        value, bound = decided(question, n)
    assert bound <= best * (1 + 1e-9)
    assert value <= 1.02 * best


@pytest.mark.parametrize(("beta", "goes"), [(0.03, True), *further((10, False))])
def test_what_the_link_carries_goes_away_and_the_rest_is_redone(beta, goes, run, tmp_path):
    """A fast link makes 1F1B fit at no cost, a slow one nothing; the found file is proved, and names who is away."""
    levels, found = [{"name": "network", "alpha": 0, "beta": 0}], tmp_path / "found.json"
    (tmp_path / "P").write_text(json.dumps({"F": 1, "B": 2, "saved": 16, "weight": 4, "owned": 4}))
    (tmp_path / "M").write_text(json.dumps({"levels": levels, "host": {"beta": beta}}))
    own = ("1f1b", "--stages", 6, "--microbatches", 8, "--profile", tmp_path / "P", "--machine", tmp_path / "M")
    done = run("search", *own, "--memory", 85, "--recompute", "--offload", "--budget", 1, "--json", "-o", found)
    numbers, alone = json.loads(done.out), (8 + 6 - 1) * (1 + 2)
    assert run("check", found).code == 0
    assert (numbers["offloaded"] > 0) == goes and (numbers["value"] == alone if goes else numbers["value"] >= alone)
