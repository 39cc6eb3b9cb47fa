"""Greedy wastes no time, strict keeps its order, a cap holds: each claim is derived anew from the jobs' start times."""

from __future__ import annotations

import filecmp
import heapq
import itertools
import json
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from compiled import compiled
from drawn_programs import cases
from examples import examples
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays

from schedgen.compiler.compile import compile
from schedgen.compiler.greedy_order import greedy
from schedgen.compiler.options import Options
from schedgen.compiler.order import strict
from schedgen.ir.instructions import B, F, Op
from schedgen.ir.job_graph import job_graph
from schedgen.ir.stage_graph import StageGraph, chain
from schedgen.schemes import load
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.simulator.stats import stats
from schedgen.util.errors import UsageError

COSTS = {2: (1, 2), 3: (1, 1, 2)}


def lengths(jobs):
    """The duration of every job of a graph."""
    return np.repeat(np.array(COSTS[jobs.directions], float), jobs.stages * jobs.microbatches)


def pred(job, stages, directions, edges):
    """What job (d, s, b) waits for, by the formulas of Rahimi 2025; W after I where the backward is split."""
    d, s, b = job
    if d == F:
        return [(F, p, b) for p, c in edges if c == s]
    if d == B:
        return [(F, s, b), *((B, c, b) for p, c in edges if p == s)]
    return [(B, s, b)]


class Jobs:
    """When every job of a case is ready, starts and ends; indexed by (d, s, b)."""

    def __init__(self, case, start):
        self.case, shape = case, case.compute.shape
        self.all = list(itertools.product(*map(range, shape)))
        self.start = start.reshape(shape)
        self.end = self.start + np.array(COSTS[shape[0]])[:, None, None]
        self.ready = np.zeros(shape)
        for job in self.all:
            self.ready[job] = max((self.end[p] for p in pred(job, shape[1], shape[0], case.edges)), default=0)

    def on(self, worker):
        """The jobs of one worker, first to start first."""
        return sorted((job for job in self.all if self.case.compute[job] == worker), key=lambda job: self.start[job])


def ordered(how, case, n, *caps):
    directions, S, batches = case.compute.shape
    jobs = job_graph(StageGraph(S, case.edges), batches, directions)
    return Jobs(case, how(jobs, case.compute.ravel(), n.ravel(), lengths(jobs), *caps))


def topological(draw, case):
    """A random n that increases along every edge of the job graph, all different."""
    directions, S, _ = case.compute.shape
    n = np.full(case.compute.shape, -1)
    jobs = list(np.ndindex(n.shape))
    before = {job: pred(job, S, directions, case.edges) for job in jobs}
    key = dict(zip(jobs, draw(st.permutations(range(len(jobs)))), strict=True))
    heap = [(key[job], job) for job in jobs if not before[job]]
    for position in range(len(jobs)):
        _, job = heapq.heappop(heap)
        n[job] = position
        for other in jobs:
            if job in before[other] and all(n[p] >= 0 for p in before[other]):
                heapq.heappush(heap, (key[other], other))
    return n


@given(st.data(), cases())
def test_jobs_wait_for_pred_and_a_worker_runs_one_at_a_time(data, case):
    for jobs in (ordered(greedy, case, case.n), ordered(strict, case, topological(data.draw, case))):
        assert (jobs.start >= jobs.ready).all()
        for worker in range(case.sizes.workers):
            assert all(jobs.end[a] <= jobs.start[b] for a, b in itertools.pairwise(jobs.on(worker)))


@given(st.data(), cases())
def test_greedy_is_work_conserving_and_takes_the_smallest_n(data, case):
    jobs = ordered(greedy, case, case.n)
    for worker in range(case.sizes.workers):
        on_worker = jobs.on(worker)
        for job in on_worker:
            ready, start = jobs.ready[job], jobs.start[job]
            busy = sum(max(0, min(jobs.end[o], start) - max(jobs.start[o], ready)) for o in on_worker if o != job)
            assert busy == start - ready, f"worker {worker} idles while {job} is ready"
            overtaken = [o for o in on_worker if jobs.ready[o] <= start < jobs.start[o] and case.n[o] < case.n[job]]
            assert not overtaken, f"worker {worker} takes {job} before {overtaken}"


@given(st.data(), cases())
def test_strict_runs_in_increasing_n_as_early_as_it_can(data, case):
    n = topological(data.draw, case)  # such an n never deadlocks
    jobs = ordered(strict, case, n)
    for worker in range(case.sizes.workers):
        on_worker = jobs.on(worker)
        assert on_worker == sorted(on_worker, key=lambda job: n[job])
        free = [0, *(jobs.end[job] for job in on_worker)]
        assert [jobs.start[job] for job in on_worker] == [
            max(jobs.ready[job], at) for job, at in zip(on_worker, free, strict=False)
        ]


def compute_order(program, rank):
    return [(Op(i.op).name[0], i.mb) for i in program.instructions(rank) if i.op in (Op.FWD, Op.BWD)]


def textbook(scheme, S, batches, s):
    """What worker s runs [PipeDream, figure 4, with a flush; GPipe, figure 2c]."""
    warm_up = batches if scheme == "gpipe" else min(batches, S - s)
    order = [("F", b) for b in range(warm_up)]
    for b in range(batches - warm_up):
        order += [("B", b), ("F", warm_up + b)]
    return order + [("B", b) for b in range(batches - warm_up, batches)]


@pytest.mark.parametrize("S", [*range(1, 9), 16])
@pytest.mark.parametrize("scheme", ["1f1b", "gpipe"])
def test_every_worker_runs_the_textbook_list(scheme, S):
    for batches in range(1, 17) if S < 16 else (7, 16, 33, 64):
        program = compiled(scheme, S, batches)
        for s in range(S):
            assert compute_order(program, s) == textbook(scheme, S, batches, s), f"B={batches}, worker {s}"


def slowly(graph, worker, n, length, caps, memory, redone):
    """`greedy`, one unit of time after another, every job tried; inf: never started."""
    start, forwards = np.full(len(worker), np.inf), graph.stages * graph.microbatches
    stage = np.arange(forwards) // graph.microbatches
    for time, v in itertools.product(range(int(length.sum()) + 1), range(worker.max() + 1)):
        if np.isfinite(start).all():
            break
        mine, ended = worker == v, start + length <= time
        if (mine & (start <= time) & ~ended).any():
            continue
        begun = (worker[:forwards] == v) & (start[:forwards] <= time)
        in_flight, saved = begun & ~ended[forwards : 2 * forwards], begun & ~ended[-forwards:]
        places = np.where(redone, 0, (saved & redone).any()) + (saved & ~redone).sum()
        allowed = np.ones(len(worker), bool)
        allowed[:forwards] = (places < memory) & (np.bincount(stage[in_flight], minlength=graph.stages) < caps)[stage]
        ready = [
            job
            for job in np.flatnonzero(mine & allowed & np.isinf(start))
            for node, b in [divmod(job, graph.microbatches)]
            if all(ended[p * graph.microbatches + b] for p in graph.pred[node])
        ]
        if ready:
            start[min(ready, key=lambda job: (n[job], job))] = time
    return start


@given(st.data(), cases())
@settings(max_examples=examples(50))
def test_with_limits_greedy_takes_the_smallest_n_that_they_let_through(data, case):
    directions, S, batches = case.compute.shape
    graph = job_graph(StageGraph(S, chain(S)), batches, directions)
    caps = np.array(data.draw(st.lists(st.integers(1, 3), min_size=S, max_size=S)))
    memory, may_redo = data.draw(st.integers(S, 4 * S)), directions == 2
    redone = data.draw(arrays(bool, S * batches)) & may_redo
    given = graph, case.compute.ravel(), case.n.ravel(), lengths(graph), caps, memory, redone
    expected = slowly(*given)
    if np.isinf(expected).any():
        with pytest.raises(UsageError, match="stops the schedule"):
            greedy(*given)
    else:
        assert (greedy(*given) == expected).all()


def refusal(mode, n, w=lambda s, b, d: (s, s), stages=2, **more):
    scheme = Scheme("mine", None, w, n, "mine", mode, **more)
    with pytest.raises(UsageError) as caught:
        compile(scheme, Sizes(stages, 2))
    return str(caught.value)


@given(arrays(np.int32, (2, 3, 2), elements=st.integers(0, 3)))
def test_strict_refuses_every_tie_within_a_worker_and_no_tie_between_workers(n):
    jobs = job_graph(StageGraph(3, chain(3)), 2, 2)
    alone = np.arange(n.size, dtype=np.int32)  # every job on a worker of its own
    strict(jobs, alone, n.ravel(), lengths(jobs))
    if len(np.unique(n)) < n.size:
        with pytest.raises(UsageError, match="must differ within a worker"):
            strict(jobs, alone * 0, n.ravel(), lengths(jobs))


def test_a_cap_that_deadlocks_names_the_jobs_that_wait_for_each_other():
    # Stages 1 and 2 both feed stage 3 and hold one microbatch each: stage 1 takes 0 first, stage 2 takes 1.
    message = refusal(
        "greedy",
        lambda s, b, d: b * (s == 2) * -2 + b,
        w=lambda s, b, d: (s, np.where(s == 0, b, s + 1) + 0 * d),
        stages=4,
        edges=((0, 1), (0, 2), (1, 3), (2, 3)),
        cap=lambda s: 1,
    )
    assert message.startswith("cap stops the schedule: ")
    for words in ("F(1, 1) on worker 2", "F(2, 0) on worker 3", "waits for"):
        assert words in message


def test_redoing_forwards_costs_what_r_says():
    """Backwards away from their forwards recompute these. With R = 0 that takes no time, as in Rahimi's simulator."""

    def elsewhere(s, b, d):  # a job's second worker is another one than its first
        return (s + 2 * b + 3 * d) % 4, (s + 2 * b + 3 * d) % 4

    def oldest(s, b, d):
        return 8 * b + np.where(d == F, s, 7 - s)

    scheme, sizes = Scheme("elsewhere", 4, elsewhere, oldest, "elsewhere", "greedy"), Sizes(4, 8, 4)
    s, b, d = np.ogrid[:4, :8, :2]
    grids = (elsewhere(s, b, d)[1], oldest(s, b, d))
    worker, n = (np.broadcast_to(grid, (4, 8, 2)).transpose(2, 0, 1).ravel() for grid in grids)
    length = np.repeat([1.0, 2.0], 4 * 8)
    start = greedy(job_graph(StageGraph(4, chain(4)), 8, 2), worker, n, length)

    def latency(cost):
        program = compile(scheme, sizes, Options(cost=cost))
        assert dict(program.header.cost) == cost
        return stats(program)["latency"]

    assert latency({"F": 1, "B": 2, "R": 0}) == (start + length).max()
    assert latency({"F": 1, "B": 2, "R": 1}) == latency({"F": 1, "B": 2})
    assert latency({"F": 1, "B": 2, "R": 3}) > latency({"F": 1, "B": 2})


@pytest.mark.parametrize("factor", [0.1, 0.3, 1 / 3, 7, 1e-9])
@pytest.mark.parametrize("name", ["hanayo", "depth-first", "fsdp", "fslpp", "zb-v", "pipedream"])
def test_costs_in_another_unit_give_the_same_schedule(name, factor):
    """Where two times are equal n decides, whatever the rounding."""
    sizes = Sizes(8, 8, 8 if name == "pipedream" else 4, groups=2 if name == "fslpp" else None)
    scheme = load(name, sizes)
    cost = {"F": 3, "I": 5, "W": 4} if scheme.split else {"F": 3, "B": 7, "R": 2}
    options = Options(cost=cost, tied=[(0, 7)] if name in ("hanayo", "zb-v") else ())
    first = compile(scheme, sizes, options)
    second = compile(scheme, sizes, replace(options, cost={key: factor * time for key, time in cost.items()}))
    assert all(np.array_equal(a, b) for a, b in zip(first.rows, second.rows, strict=True))


def test_greedy_orders_by_the_times_of_a_profile(run, tmp_path):
    """Times that all stages share give the file of --cost, in any unit; those of slow stages a better order."""
    profile, own, timed = (str(tmp_path / name) for name in ("profile.json", "own.json", "timed.json"))
    options = ("depth-first", "--stages", 8, "--workers", 4, "--microbatches", 8, "--output")
    run("compile", *options, own)
    for slow in (1, 4):
        times = np.array([1, slow] * 2 + [1] * 4) * 0.1
        Path(profile).write_text(json.dumps({"F": times.tolist(), "B": (2 * times).tolist()}))
        assert run("compile", *options, timed, "--profile", profile).code == 0
        assert filecmp.cmp(own, timed, shallow=False) == (slow == 1)
    took = [json.loads(run("simulate", each, "--profile", profile, "--json").out)["latency"] for each in (own, timed)]
    assert took[1] < took[0]
