"""Recomputation chosen by the search: as few forwards as the limit needs, and never a later end than without."""

import io
import itertools

import numpy as np
import pytest
from examples import further

from schedgen.checker import check
from schedgen.ir.file import write
from schedgen.ir.instructions import Op
from schedgen.planner.order_search.question import Limits, Question
from schedgen.planner.order_search.search_order import search_order
from schedgen.planner.order_search.search_ways import search_ways
from schedgen.planner.order_search.ways import Kept, choose, most_held, worker_orders
from schedgen.schemes import load
from schedgen.schemes.scheme import Sizes
from schedgen.simulator.machine import Machine
from schedgen.simulator.simulate import simulate
from schedgen.util.errors import UsageError

UNIT = {"F": 1, "I": 1, "W": 1}
BYTES = Machine(
    0.5, 1e-7, activation=1e6, saved=np.array([4e6, 6e6, 5e6, 8e6]), weight=2e6, owned=6e6, workspace=1e6
)  # fmt: skip
CHAIN = {"F": [10, 14, 9, 12], "B": [18, 30, 17, 25]}


def random_place(rng, directions, batches):
    """A random order of one stage's jobs on one worker: each microbatch's forward, then its backward or I and W."""
    left = {b: list(range(directions)) for b in range(batches)}
    place = np.zeros((directions, 1, batches), np.int64)
    for number in range(directions * batches):
        b = rng.choice(sorted(left))
        place[left[b].pop(0), 0, b] = number
        left = {b: jobs for b, jobs in left.items() if jobs}
    return place


@pytest.mark.parametrize("directions", [2, 3])
def test_no_fewer_forwards_make_an_order_fit(directions):
    """All subsets of up to 6 forwards that keep the same are tried."""
    rng, needed = np.random.default_rng(0), 0
    zero, one = np.zeros(1), np.ones(1)
    kept = Kept(zero, one, zero, zero, zero, one, one, np.ones((directions, 1)))
    for _ in range(75):
        batches = int(rng.integers(2, 7))
        worker = np.zeros((1, batches), np.int64)
        orders = worker_orders(random_place(rng, directions, batches), worker, kept.length, 1)
        for limit in (1.0, 2.0, 3.0):
            fitting = [
                sum(subset)
                for subset in itertools.product((0, 1), repeat=batches)
                if most_held(orders, kept, np.array([subset]))[0] <= limit
            ]
            ways = choose(orders, kept, np.array([limit]), 0 * worker)
            assert (ways is None) == (not fitting)
            if ways is not None:
                assert most_held(orders, kept, ways)[0] <= limit
                assert (ways > 0).sum() == min(fitting)
                needed += ways.any()
    assert needed > 50


CASES = {
    "zb-v, F dear": ("zb-v", Sizes(8, 8, 4), {"F": 10, "I": 12, "W": 8}, Machine(), {"saved": 4}),
    "a chain of unequal stages": ("1f1b", Sizes(4, 8, 4), CHAIN, Machine(alpha=1), {"saved": 2}),
    "redoing is free": ("zb-h1", Sizes(4, 8, 4), UNIT | {"R": 0}, Machine(), {"saved": 2}),
    "one at a time": ("gpipe", Sizes(4, 6, 4), {"F": 1, "B": 2}, Machine(), {"saved": 1}),
    "bytes": ("1f1b", Sizes(4, 8, 4), CHAIN, BYTES, {"bytes": 34e6}),
    "there is room": ("1f1b", Sizes(4, 8, 4), {"F": 1, "B": 2}, Machine(), {"saved": 4}),
}


OTHERS = ("zb-v, F dear", "a chain of unequal stages", "redoing is free", "one at a time")  # of the same kinds


@pytest.mark.parametrize("name", [*(name for name in CASES if name not in OTHERS), *further(*OTHERS)])
def test_what_is_redone_ends_sooner_within_the_limit(name):
    scheme, sizes, cost, machine, limit = CASES[name]
    plain = {key: time for key, time in cost.items() if key != "R"}
    question = Question(load(scheme, sizes), sizes, cost, machine, Limits(**limit))
    without = search_order(question._replace(cost=plain), 1)
    best = search_ways(question, 1)
    again = int((best.program.rows.op == Op.RECOMPUTE).sum())
    if name == "there is room":
        assert again == 0 and best.value == without.value
    else:
        assert best.bound <= best.value < 0.97 * without.value
        assert 0 < again < sizes.stages * sizes.microbatches  # not all: microbatches are decided one by one
    memory = check(best.program)
    if "saved" in limit:
        assert memory.saved.max() <= limit["saved"]
    else:
        assert simulate(best.program, cost, machine).footprint.peak.max() <= limit["bytes"]


def test_what_fits_only_with_recomputation_is_found():
    """A worker that holds one forward at a time cannot keep both of its stages', down and up, of one microbatch."""
    sizes = Sizes(8, 4, 4)
    question = Question(load("zb-v", sizes), sizes, UNIT, limits=Limits(saved=1))
    with pytest.raises(UsageError, match="no order within the memory limit"):
        search_order(question, 1)
    best = search_ways(question, 1)
    assert check(best.program).saved.max() == 1
    assert (best.program.rows.op == Op.RECOMPUTE).sum() >= 16


def test_orders_whose_late_halves_no_redone_forward_makes_fit_have_each_w_behind_its_i():
    """The best order of this tiny problem redoes forwards of stage 0 alone; with both stages redone it is 40."""
    sizes, cost = Sizes(2, 3, 2), {"F": [2, 2], "I": [6, 4], "W": [2, 4]}
    best = search_ways(Question(load("1f1b", sizes), sizes, cost, limits=Limits(saved=1)), 1)
    rows = best.program.rows
    assert best.value == 36 and set(rows.stage[rows.op == Op.RECOMPUTE].tolist()) == {0}
    assert check(best.program).saved.max() == 1 and best.work < 2


def test_a_limit_that_nothing_keeps_to_is_one_sentence():
    sizes = Sizes(4, 8, 4)
    with pytest.raises(UsageError, match="found no order within the memory limit, even with forwards redone"):
        search_ways(Question(load("gpipe", sizes), sizes, CHAIN, BYTES, Limits(bytes=9e6)), 1)


def moves_backwards(s, b, d):
    return 0 * s, (s + b) % 2


@pytest.mark.parametrize("scheme", ["pipedream", "pipedream-2bw", "fsdp", "fslpp", moves_backwards])
def test_what_the_search_cannot_order_is_refused_with_recomputation_too(scheme):
    sizes = Sizes(4, 4, 4, groups=2 if scheme == "fslpp" else None)
    loaded = load("gpipe", sizes)._replace(w=scheme) if callable(scheme) else load(scheme, sizes)
    with pytest.raises(UsageError, match=r"fixes its order|moves weights or backwards"):
        search_ways(Question(loaded, sizes, {"F": 1, "B": 2}, limits=Limits(saved=3)), 1)


def test_the_same_call_gives_the_same_file():
    """Also where a search with a choice of whole backwards came before."""
    sizes = Sizes(8, 8, 4)
    question = Question(load("zb-v", sizes), sizes, UNIT | {"B": 1.5}, limits=Limits(saved=4))
    files = [io.BytesIO(), io.BytesIO()]
    for file in files:
        write(search_ways(question, 1).program, file)
    assert files[0].getvalue() == files[1].getvalue()
