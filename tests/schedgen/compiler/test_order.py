"""Greedy wastes no time and keeps to its limits, strict keeps its order: start times beside those of slow Python."""

from __future__ import annotations

import filecmp
import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from compiled import compiled
from drawn_programs import cases
from examples import further
from hypothesis import given
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

COSTS = {2: np.array([[[1]], [[2]]]), 3: np.array([[[1]], [[1]], [[2]]])}  # by direction, (D, 1, 1)


def graph_and_lengths(shape, edges):
    """The job graph of (directions, stages, microbatches), and the duration of every job."""
    directions, stages, microbatches = shape
    length = np.broadcast_to(COSTS[directions].astype(float), shape)
    return job_graph(StageGraph(stages, edges), microbatches, directions), length.ravel()


def pred(job, edges):
    """What job (d, s, b) waits for, by the formulas of Rahimi 2025; W after I where the backward is split."""
    d, s, b = job
    if d == F:
        return [(F, p, b) for p, c in edges if c == s]
    if d == B:
        return [(F, s, b), *((B, c, b) for p, c in edges if p == s)]
    return [(B, s, b)]


def slowly(case, caps, memory, redone):
    """When greedy starts the jobs of a case: one unit of time after another, every job tried; inf: never.

    A worker that is free takes the ready job of the smallest n that the limits let through.
    """
    shape, start = case.compute.shape, np.full(case.compute.shape, np.inf)
    length = np.broadcast_to(COSTS[shape[0]], shape)
    for time, v in itertools.product(range(int(length.sum()) + 1), range(case.compute.max() + 1)):
        if np.isfinite(start).all():
            break
        mine, ended = case.compute == v, start + length <= time
        if (mine & (start <= time) & ~ended).any():
            continue
        begun = mine[F] & (start[F] <= time)
        in_flight, saved = begun & ~ended[B], begun & ~ended[-1]
        places = np.where(redone, 0, (saved & redone).any()) + (saved & ~redone).sum()
        allowed = np.ones(shape, bool)
        allowed[F] = (places < memory) & (in_flight.sum(axis=1) < caps)[:, None]
        jobs = zip(*np.nonzero(mine & allowed & np.isinf(start)), strict=True)
        if ready := [job for job in jobs if all(ended[p] for p in pred(job, case.edges))]:
            start[min(ready, key=lambda job: (case.n[job], job))] = time
    return start.ravel()


@pytest.mark.parametrize("limited", [False, True])
@given(st.data(), cases())
def test_greedy_takes_the_smallest_n_that_is_ready_and_that_its_limits_let_through(limited, data, case):
    directions, stages, _ = shape = case.compute.shape
    graph, length = graph_and_lengths(shape, case.edges)
    caps = np.array(data.draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages)))
    redone = data.draw(arrays(bool, shape[1:])) & (directions == 2)
    limits = (caps, data.draw(st.integers(stages, 4 * stages)), redone)
    expected = slowly(case, *(limits if limited else (100, 100, np.zeros(shape[1:], bool))))
    given = graph, case.compute.ravel(), case.n.ravel(), length, *((*limits[:2], redone.ravel()) if limited else ())
    if np.isinf(expected).any():
        with pytest.raises(UsageError, match="stops the schedule"):
            greedy(*given)
    else:
        assert (greedy(*given) == expected).all()


@given(st.data(), cases())
def test_strict_runs_in_increasing_n_as_early_as_it_can(data, case):
    shape, cost = case.compute.shape, COSTS[case.compute.shape[0]].ravel()
    distance, apart = {}, data.draw(arrays(np.int32, shape, elements=st.integers(1, 9)))
    for job in sorted(np.ndindex(shape), key=lambda job: (job[0], job[1] if job[0] == F else -job[1])):
        distance[job] = apart[job] + max((distance[p] for p in pred(job, case.edges)), default=0)
    n, start, free = np.empty(shape, int), np.empty(shape), Counter()
    for number, job in enumerate(sorted(distance, key=lambda job: (distance[job], job))):  # such an n never deadlocks
        ends = [start[p] + cost[p[0]] for p in pred(job, case.edges)]
        n[job], start[job] = number, max([free[case.compute[job]], *ends])
        free[case.compute[job]] = start[job] + cost[job[0]]
    graph, length = graph_and_lengths(shape, case.edges)
    assert (strict(graph, case.compute.ravel(), n.ravel(), length) == start.ravel()).all()


def compute_order(program, rank):
    return [(Op(i.op).name[0], i.mb) for i in program.instructions(rank) if i.op in (Op.FWD, Op.BWD)]


def textbook(scheme, S, batches, s):
    """What worker s runs [PipeDream, figure 4, with a flush; GPipe, figure 2c]."""
    warm_up = batches if scheme == "gpipe" else min(batches, S - s)
    order = [("F", b) for b in range(warm_up)]
    for b in range(batches - warm_up):
        order += [("B", b), ("F", warm_up + b)]
    return order + [("B", b) for b in range(batches - warm_up, batches)]


@pytest.mark.parametrize("S", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("scheme", ["1f1b", "gpipe"])
def test_every_worker_runs_the_textbook_list(scheme, S):
    for batches in range(1, 17) if S < 16 else (7, 16, 33, 64):
        program = compiled(scheme, S, batches)
        for s in range(S):
            assert compute_order(program, s) == textbook(scheme, S, batches, s), f"B={batches}, worker {s}"


@given(arrays(np.int32, (2, 3, 2), elements=st.integers(0, 3)))
def test_strict_refuses_every_tie_within_a_worker_and_no_tie_between_workers(n):
    graph, length = graph_and_lengths(n.shape, chain(3))
    alone = np.arange(n.size, dtype=np.int32)  # every job on a worker of its own
    strict(graph, alone, n.ravel(), length)
    if len(np.unique(n)) < n.size:
        with pytest.raises(UsageError, match="must differ within a worker"):
            strict(graph, alone * 0, n.ravel(), length)


def test_redoing_forwards_costs_what_r_says():
    """Backwards away from their forwards recompute these. With R = 0 that takes no time, as in Rahimi's simulator."""

    s, b, d = (grid.transpose(2, 0, 1) for grid in np.mgrid[:4, :8, :2])
    worker, n = (s + 2 * b + 3 * d).astype(np.int32) % 4, 8 * b + np.where(d == F, s, 7 - s)
    scheme = Scheme("elsewhere", 4, lambda s, b, d: (worker[d, s, b],) * 2, lambda s, b, d: n[d, s, b], "n", "greedy")
    graph, length = graph_and_lengths(worker.shape, chain(4))
    start = greedy(graph, worker.ravel(), n.ravel(), length)

    def latency(cost):
        program = compile(scheme, Sizes(4, 8, 4), Options(cost=cost))
        assert dict(program.header.cost) == cost
        return stats(program)["latency"]

    assert latency({"F": 1, "B": 2, "R": 0}) == (start + length).max()
    assert latency({"F": 1, "B": 2, "R": 1}) == latency({"F": 1, "B": 2})
    assert latency({"F": 1, "B": 2, "R": 3}) > latency({"F": 1, "B": 2})


@pytest.mark.parametrize("factor", [0.1, 1 / 3, *further(0.3, 7, 1e-9)])
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
