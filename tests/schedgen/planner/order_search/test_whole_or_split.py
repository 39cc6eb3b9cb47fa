"""Costs of whole backwards and of halves: the better of both, never below the bound."""

import numpy as np
import pytest
from examples import further

from schedgen.checker import check
from schedgen.ir.instructions import Op
from schedgen.planner.order_search.compiled_orders import measured
from schedgen.planner.order_search.question import Limits, Question
from schedgen.planner.order_search.search_order import search_order
from schedgen.planner.order_search.search_ways import search_ways
from schedgen.schemes import load
from schedgen.schemes.scheme import Sizes
from schedgen.simulator.machine import Machine
from schedgen.simulator.simulate import simulate
from schedgen.simulator.stats import stats
from schedgen.util.errors import UsageError

COST = {"F": 10, "B": 18, "I": 12, "W": 10}
UNEQUAL = {"F": [10, 14, 9, 12], "B": [19, 24, 20, 26], "I": [11, 15, 12, 13], "W": [12, 13, 11, 15]}
BYTES = Machine(0.5, 1e-7, activation=1e6, saved=4e6, half=1e6, weight=2e6, owned=6e6, workspace=1e6)
CASES = {  # scheme, sizes, costs, machine, limits
    "halves are better": ("1f1b", Sizes(4, 8, 4), COST, Machine(), Limits(saved=4)),
    "messages": ("1f1b", Sizes(4, 6, 4), UNEQUAL, Machine(alpha=1), Limits("window")),
    "bytes": ("1f1b", Sizes(4, 6, 4), UNEQUAL, BYTES, Limits(bytes=34e6)),
    "whole ones are better": ("ddp", Sizes(2, 4, 2), COST, Machine(), Limits()),
    "a built-in mix is better": ("dualpipe-v", Sizes(8, 8, 4), COST, Machine(), Limits()),
}
OTHERS = ("messages", "a built-in mix is better")


def both(scheme, sizes, cost, machine=Machine(), limits=Limits(), budget=10):  # noqa: B008  frozen
    return search_order(Question(load(scheme, sizes), sizes, cost, machine, limits), budget)


@pytest.mark.parametrize("name", [*(name for name in CASES if name not in OTHERS), *further(*OTHERS)])
def test_both_take_no_longer_than_either_alone(name):
    scheme, sizes, cost, machine, limits = CASES[name]
    best = both(scheme, sizes, cost, machine, limits, 2)
    run = simulate(best.program, cost, machine)
    only = [{direction: cost[direction] for direction in names} for names in ("FB", "FIW")]
    alone = [both(scheme, sizes, own, machine, limits, 1).value for own in only]
    assert best.bound <= best.value <= min(alone)
    assert check(best.program).saved.max() <= (limits.saved or 100)
    assert limits.bytes is None or run.footprint.peak.max() <= limits.bytes
    if limits.objective == "latency":
        assert best.value == run.end[np.isin(best.program.rows.op, (Op.FWD, Op.BWD, Op.BWD_I, Op.BWD_W))].max()
        bounds = stats(best.program, cost)["bounds"]
        assert machine.alpha or max(bounds.values()) <= run.end.max() * (1 + 1e-9)


def test_what_is_redone_may_be_beside_whole_and_split_backwards_that_were_tried_first():
    sizes = Sizes(4, 8, 4)
    question = Question(load("1f1b", sizes), sizes, COST, limits=Limits(saved=2))
    kept, redone = search_order(question, 1), search_ways(question, 1)
    assert redone.bound <= redone.value < kept.value
    assert check(redone.program).saved.max() <= 2


def test_a_built_in_whole_backward_counts_as_measured_not_as_its_halves():
    cost = {"F": 6, "B": 11, "I": 3, "W": 1}
    dear = {"F": 1, "B": 3, "I": 1, "W": 1}  # dualpipe-v's whole backwards take more than halves
    assert not len(both("dualpipe-v", Sizes(2, 2, 1), dear, budget=1).program.rows_of(Op.BWD))
    best = both("gpipe", Sizes(2, 2, 1), cost, budget=1)
    assert measured(simulate(best.program, cost), False) == best.value == best.bound == 4 * (6 + 3 + 1)


def test_costs_that_differ_too_much_together_are_refused():
    with pytest.raises(UsageError, match="a million times"):
        both("1f1b", Sizes(2, 2, 2), {"F": 1, "B": 2000, "I": 0.001, "W": 500}, budget=1)
