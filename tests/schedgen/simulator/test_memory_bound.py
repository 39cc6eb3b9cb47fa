"""The lower bound under a memory limit: never above the proved optimum, and exact for ZB-H1."""

import numpy as np
import pytest
from compiled import compiled
from examples import ASKED

from schedgen.planner.order_search import cp_sat
from schedgen.planner.order_search.compiled_orders import measured
from schedgen.planner.order_search.problem import least_time, lower_bound, placed_jobs, problem_of
from schedgen.planner.order_search.question import Limits, Question
from schedgen.schemes import load
from schedgen.schemes.scheme import Sizes
from schedgen.simulator.lower_bounds import lower_bounds
from schedgen.simulator.machine import Machine
from schedgen.simulator.memory_bound import WorkerJobs, memory_bound
from schedgen.simulator.simulate import simulate

# Stages a worker: chain, V, loop, both directions.
PLACEMENTS = {"zb-h1": 1, "zb-v": 2, "breadth-first": 2, "chimera": 1}
PROBLEMS = 50 if ASKED else 10  # of each placement


def random_problem(name, draw):
    """A few jobs with lengths by stage, messages, and memory from too little to enough."""
    p = 2 if PLACEMENTS[name] == 2 or name == "chimera" else int(draw.integers(2, 4))
    m = 2 * int(draw.integers(1, 3)) if name == "chimera" else int(draw.integers(2, 4))
    sizes = Sizes(PLACEMENTS[name] * p, m, p)
    cost = {key: draw.integers(1, 6, sizes.stages) for key in "FIW"}
    machine = Machine(alpha=int(draw.integers(0, 3)), activation=0)
    objective, least = str(draw.choice(["window", "latency"])), PLACEMENTS[name]
    if draw.random() < 0.5:
        limits = Limits(objective, int(draw.integers(least, 2 * m)))
    else:  # in bytes: forwards of stages differ, and I takes some more or gives some back
        saved = draw.integers(2, 5, sizes.stages)
        machine = machine._replace(weight=0, saved=saved, half=draw.integers(-1, 2, sizes.stages))
        limits = Limits(objective, bytes=int(draw.integers(5 * least, 5 * m * least)))
    question = Question(load(name, sizes), sizes, cost, machine, limits)
    placed = placed_jobs(question)
    return problem_of(placed, question), placed


@pytest.mark.parametrize(("forwards", "least"), [(2, 8), (1, 10), (3, 6)])
def test_the_example_with_numbers(forwards, least):
    """Worker 0 of 1F1B on two stages, F = B = 1, three microbatches; 6 is the work."""
    worker = WorkerJobs(
        stage=np.array([0, 0]), head=np.array([0.0, 3.0]), tail=np.array([3.0, 0.0]), length=np.ones(2),
        jobs=np.array([3, 3]), takes=np.array([1.0, -1.0]), needs=np.array([[False, False], [True, False]]),
    )  # fmt: skip
    assert memory_bound(worker, forwards) == least


@pytest.mark.parametrize("name", PLACEMENTS)
def test_no_order_is_below_the_bound(name):
    """CP-SAT proves the best of random small problems; the bound reaches it in a fifth of them, or more."""
    pytest.importorskip("ortools")
    draw = np.random.default_rng(20)
    proved = reached = 0
    for _ in range(PROBLEMS):
        problem, placed = random_problem(name, draw)
        everything = float(problem.length.sum() + problem.microbatches * problem.hop.sum())
        never = np.full(len(problem.worker), everything)
        proof = cp_sat.solve(problem, never, everything, 0.0, 0.2)
        if proof.optimal:
            bound = lower_bound(problem, placed)
            assert bound <= proof.bound * (1 + 1e-9), problem
            proved += 1
            reached += bound >= proof.bound * (1 - 1e-9)
    assert proved > PROBLEMS // 2 and reached >= proved // 5


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 24), (16, 32)])
@pytest.mark.parametrize("cost", [(1, 1, 1), (10, 12, 8), (18522, 18086, 9337)])
def test_a_chain_with_memory_for_p_forwards_has_at_least_the_bubble_of_zb_h1(p, m, cost):
    """(p - 1) (F + I - W), Qi et al. 2023, section 2.1; so ZB-H1 is optimal there, and stats says so."""
    sizes, costs = Sizes(p, m, p), dict(zip("FIW", cost, strict=True))
    bound = least_time(Question(load("zb-h1", sizes), sizes, costs, limits=Limits("window", p)))
    f, i, w = cost
    assert bound == m * (f + i + w) + (p - 1) * (f + i - w)
    program = compiled("zb-h1", sizes, cost=costs)
    assert measured(simulate(program, costs), True) == bound
    assert lower_bounds(program.header, costs, np.full(p, p))["ends"] == measured(simulate(program, costs), False)


@pytest.mark.parametrize(
    ("p", "m", "limit", "window"),
    [(4, 8, 4, 59), (4, 8, 5, 56), (4, 8, 6, 53), *((8, 24, limit, 191 - 3 * limit) for limit in range(8, 15))],
)
def test_windows_of_a_v_that_published_searches_find_are_optimal(p, m, limit, window):
    """At equal costs, by saved forwards: what sail-sg/zero-bubble's v_auto_schedule.py finds."""
    sizes = Sizes(2 * p, m, p)
    question = Question(load("zb-v", sizes), sizes, {"F": 1, "I": 1, "W": 1}, limits=Limits("window", limit))
    assert least_time(question) == window
