"""Whole backwards and halves in one order: no worse than either alone, and never below the bound."""

import itertools
import json

import numpy as np
import pytest
from examples import further

from schedgen.checker import check
from schedgen.ir.instructions import Op
from schedgen.planner.order_search.compiled_orders import measured
from schedgen.planner.order_search.placed_problem import placed_jobs, problem_of
from schedgen.planner.order_search.problem import fits
from schedgen.planner.order_search.question import Limits, Question
from schedgen.planner.order_search.recompute import search_with_recompute
from schedgen.planner.order_search.run_order import new_run, run_order
from schedgen.planner.order_search.search_order import search_order
from schedgen.planner.order_search.whole_or_split import search_whole_or_split
from schedgen.schemes import load
from schedgen.schemes.scheme import Sizes
from schedgen.simulator.machine import Machine
from schedgen.simulator.simulate import simulate
from schedgen.simulator.stats import stats
from schedgen.util.errors import UsageError

COST = {"F": 10, "B": 18, "I": 12, "W": 10}
UNEQUAL = {"F": [10, 14, 9, 12], "B": [19, 24, 20, 26], "I": [11, 15, 12, 13], "W": [12, 13, 11, 15]}
BYTES = Machine(0.5, 1e-7, activation=1e6, saved=4e6, half=1e6, weight=2e6, owned=6e6, workspace=1e6)
# scheme, sizes, costs, machine, limits, the latency that is found; None: it is proved elsewhere that none is below
CASES = {
    "chain": ("1f1b", Sizes(4, 8, 4), COST, Machine(), Limits(), 272),
    "1F1B's memory": ("1f1b", Sizes(4, 8, 4), COST, Machine(), Limits(saved=4), 272),
    "interleaved": ("interleaved-1f1b", Sizes(8, 8, 4), {**COST, "B": 16, "W": 12}, Machine(), Limits(), 478),
    "unequal, messages": ("1f1b", Sizes(4, 6, 4), UNEQUAL, Machine(alpha=1), Limits("window"), None),
    "halves cost nothing more": ("zb-v", Sizes(8, 4, 4), {**COST, "B": 22}, Machine(), Limits(saved=6), None),
    "bytes": ("1f1b", Sizes(4, 6, 4), UNEQUAL, BYTES, Limits(bytes=34e6), None),
    "replicas": ("ddp", Sizes(2, 4, 2), COST, Machine(), Limits(), 112),
}


def both(scheme, sizes, cost, machine=Machine(), limits=Limits(), budget=10):  # noqa: B008  frozen
    return search_whole_or_split(Question(load(scheme, sizes), sizes, cost, machine, limits), budget)


OTHERS = ("1F1B's memory", "interleaved")  # the limit of both "bytes" and "halves"; stages as in the chain


@pytest.mark.parametrize("name", [*(name for name in CASES if name not in OTHERS), *further(*OTHERS)])
def test_both_in_one_order_take_no_longer_than_either_alone(name):
    scheme, sizes, cost, machine, limits, value = CASES[name]
    best = both(scheme, sizes, cost, machine, limits, 30 if value else 2)
    run = simulate(best.program, cost, machine)
    alone = []
    for names in ("FB", "FIW"):
        only = {direction: cost[direction] for direction in names}
        alone.append(search_order(Question(load(scheme, sizes), sizes, only, machine, limits), 2).value)
    assert best.bound <= best.value <= min(alone)
    assert value is None or best.value == value < min(alone) or name == "replicas"
    assert check(best.program).saved.max() <= (limits.saved or 100)
    assert limits.bytes is None or run.footprint.peak.max() <= limits.bytes
    if limits.objective == "latency":
        assert best.value == run.end[np.isin(best.program.rows.op, (Op.FWD, Op.BWD, Op.BWD_I, Op.BWD_W))].max()
        bounds = stats(best.program, cost)["bounds"]
        assert machine.alpha or max(bounds.values()) <= run.end.max() * (1 + 1e-9)


@pytest.mark.parametrize("whole", [4, 6, *further(5)])
@pytest.mark.parametrize("limit", [1, 2])
def test_all_orders_and_choices_of_a_small_problem(whole, limit):
    """2 workers, 2 microbatches: 5 sequences a worker that jobs allow, and each of 4 backwards whole or split."""
    sizes, cost = Sizes(2, 2, 2), {"F": 2, "B": whole, "I": 3, "W": 3}
    best = both("1f1b", sizes, cost, limits=Limits(saved=limit), budget=1)
    halves = {name: cost[name] for name in "FIW"}
    question = Question(load("zb-h1", sizes), sizes, halves, limits=Limits(saved=limit))
    problem = problem_of(placed_jobs(question), question)
    direction = np.arange(12) // 4
    sequences = ["001122", "001212", "010122", "010212", "012012"]  # no I before its F, no W before its I
    run, least = new_run(problem), np.inf
    for flags in itertools.product((False, True), repeat=4):
        joined = np.where(direction == 1, whole, 0)
        length = np.where((direction > 0) & np.tile(flags, 3), joined, problem.length)
        own = problem._replace(length=length.astype(float))
        for pair in itertools.product(sequences, repeat=2):
            order = np.array([*map(int, pair[0]), *(3 + int(c) for c in pair[1])])
            if fits(problem, order):
                least = min(least, run_order.sized(10**6)(own, order, np.inf, run))
    assert best.bound <= best.value == least


def test_what_is_redone_may_be_beside_whole_and_split_backwards_that_were_tried_first():
    sizes = Sizes(4, 8, 4)
    question = Question(load("1f1b", sizes), sizes, COST, limits=Limits(saved=2))
    mixed, redone = search_whole_or_split(question, 1), search_with_recompute(question, 1)
    assert redone.bound <= redone.value < mixed.value
    assert check(redone.program).saved.max() <= 2


def test_the_command_finds_what_simulate_measures(run, tmp_path):
    path, cost = tmp_path / "found.json", "F=10,B=18,I=12,W=10"
    options = ("search", "1f1b", "--stages", 4, "--microbatches", 8, "--cost", cost, "--budget", 10)
    numbers = json.loads(run(*options, "--json", "-o", path).out)
    assert numbers["value"] == 272
    assert json.loads(run("simulate", path, "--cost", cost, "--json").out)["latency"] == 272
    ops = path.read_text()
    assert '"BWD"' in ops and '"BWD_I"' in ops


def test_a_built_in_whole_backward_counts_as_measured_not_as_its_halves():
    cost = {"F": 6, "B": 11, "I": 3, "W": 1}
    dear = {"F": 1, "B": 3, "I": 1, "W": 1}  # dualpipe-v's whole backwards take more than halves
    assert not len(both("dualpipe-v", Sizes(2, 2, 1), dear, budget=1).program.rows_of(Op.BWD))
    best = both("gpipe", Sizes(2, 2, 1), cost, budget=1)
    assert measured(simulate(best.program, cost), False) == best.value == best.bound == 4 * (6 + 3 + 1)


def test_costs_that_differ_too_much_together_are_refused():
    with pytest.raises(UsageError, match="a million times"):
        both("1f1b", Sizes(2, 2, 2), {"F": 1, "B": 2000, "I": 0.001, "W": 500}, budget=1)
