"""The search: published tables are reached, bounds hold, and the same call gives the same schedule."""

import itertools
import json

import numpy as np
import pytest
from compiled import compiled
from examples import further
from processes import ROOT

from schedgen.checker import check
from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.ir.instructions import B, F
from schedgen.planner.order_search import cp_sat
from schedgen.planner.order_search.compiled_orders import measured, numbers_of
from schedgen.planner.order_search.heuristic_orders import with_late_weights
from schedgen.planner.order_search.problem import class_nodes, fits, order_of, placed_jobs, problem_of
from schedgen.planner.order_search.question import Limits, Question
from schedgen.planner.order_search.run_order import new_run, run_order
from schedgen.planner.order_search.search_order import search_order
from schedgen.planner.order_search.steady_states import steady_orders
from schedgen.schemes import load
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.simulator.machine import Machine
from schedgen.simulator.simulate import simulate

MACHINE = Machine()
UNIT = {"F": 1, "I": 1, "W": 1}

PUBLISHED = json.loads((ROOT / "tests" / "data" / "published-orders.json").read_text())
TABLE_5, TABLE_8, WINDOWS = (PUBLISHED[name]["rows"] for name in ("table-5", "table-8", "windows"))
COLUMNS = {"table-5": ("1f1b", "zb-h1", "zb-h2"), "table-8": ("1f1b", "interleaved-1f1b", "zb-h1", "zb-h2")}


def found(name, sizes, cost, machine=MACHINE, budget=30, **limits):
    return search_order(Question(load(name, sizes), sizes, cost, machine, Limits(**limits)), budget)


@pytest.mark.parametrize(("table", "row"), [(table, row) for table in COLUMNS for row in PUBLISHED[table]["rows"]])
def test_hand_made_columns_come_out_of_the_simulator(table, row):
    (p, m), (*times, alpha), halves = row["sizes"], row["times"], 2 if table == "table-8" else 1
    for name, rate in zip(COLUMNS[table], row["rates"], strict=False):
        chunks = 2 if name == "interleaved-1f1b" else 1
        program = compiled(name, chunks * p, m, p)
        cost = {d: halves // chunks * time for d, time in zip("FIW", times, strict=True)}
        time = measured(simulate(program, cost, Machine(alpha=alpha)), name == "zb-h2")
        assert 1 - halves * m * sum(times) / time == pytest.approx(rate, abs=6e-5), name


@pytest.mark.parametrize("row", further(TABLE_5[3], TABLE_5[1]))
def test_the_search_is_at_most_the_found_column_of_table_5(row):
    """Memory as in the paper, section 4.1: 34 h + 5 a s of a forward, of which 32 h stay from I to W; s = 1024.

    Messages have one byte, for which the limit leaves room: without bytes they would take no time.
    """
    (p, m), (f, i, w, c), rate = row["sizes"], row["times"], row["rates"][-1]
    saved, half = 34 * row["hidden"] + 5 * row["heads"] * 1024, 32 * row["hidden"]
    machine = Machine(c, activation=1, weight=0, saved=saved, half=half - saved)
    best = found("zb-h1", Sizes(p, m, p), {"F": f, "I": i, "W": w}, machine, 20, objective="window",
                 bytes=2 * p * saved + 10_000)  # fmt: skip
    assert 1 - m * (f + i + w) / best.value <= rate
    check(best.program)


@pytest.mark.parametrize(("limit", "value"), [(4, 59), (6, 53), (8, 48)])
def test_equal_costs_under_a_limit(limit, value, monkeypatch):
    """As the published search finds them, sail-sg/zero-bubble's v_auto_schedule.py; proved without CP-SAT."""
    monkeypatch.setattr(cp_sat, "MOST_JOBS", 0)
    best = found("zb-v", Sizes(8, 8, 4), UNIT, budget=200, objective="window", saved=limit)
    assert best.value == value
    assert check(best.program).saved.max() <= limit
    assert best.optimal and best.bound == value


@pytest.mark.parametrize(("limit", "value"), [*WINDOWS[::4], *further(*(w for k, w in enumerate(WINDOWS) if k % 4))])
def test_steady_states_with_two_speeds_are_as_good_as_the_published_search(limit, value):
    """8 workers, 24 microbatches."""
    sizes = Sizes(16, 24, 8)
    question = Question(load("zb-v", sizes), sizes, UNIT, limits=Limits("window", limit))
    placed = placed_jobs(question)
    problem = problem_of(placed, question)
    run, orders = new_run(problem), steady_orders(problem, placed, limit, 10**8)
    assert all(fits(problem, order) for order in orders)
    assert min(run_order.sized(10**6)(problem, order, np.inf, run) for order in orders) == value


GAPS = [*zip(TABLE_8, (1e-4, 1e-4, 4e-3, 4e-3, 4e-3), strict=True)]


@pytest.mark.parametrize(("row", "gap"), [GAPS[0], GAPS[2], *further(*GAPS[1::2], GAPS[4])])
def test_the_search_is_at_most_zb_v_of_table_8(row, gap):
    """No order of a V with 1F1B's memory is better by more than the gap, by the bound."""
    (p, m), (f, i, w, c), rate = row["sizes"], row["times"], row["rates"][-1]
    cost = {"F": f, "I": i, "W": w}
    best = found("zb-v", Sizes(2 * p, m, p), cost, Machine(c), 1, objective="window", saved=2 * p)
    assert 1 - 2 * m * (f + i + w) / best.value <= rate + 5e-5
    assert best.value <= (1 + gap) * best.bound and check(best.program).saved.max() <= 2 * p


@pytest.mark.parametrize("own_window", [False, True])
@pytest.mark.parametrize(
    ("name", "chunks", "limit"), [("zb-h1", 1, 4), ("zb-h2", 1, 7), ("v-half", 2, 6), ("zb-v", 2, 8)]
)
def test_only_w_are_placed_anew_and_within_memory(name, chunks, limit, own_window):
    """Every worker keeps the order of its forwards and backwards; W wait after their I."""
    sizes = Sizes(4 * chunks, 9, 4)
    scheme = load(name, sizes)
    limits = Limits("window" if own_window else "latency", limit)
    question = Question(scheme, sizes, {"F": 10, "I": 12, "W": 7}, Machine(2), limits)
    problem = problem_of(placed_jobs(question), question)
    order, run = order_of(problem, numbers_of(compile(scheme, sizes), 3).ravel()), new_run(problem)
    value = run_order(problem, order, np.inf, run)
    is_weight = class_nodes(problem) >= 2 * sizes.stages
    orders = with_late_weights(problem, order, 0.5 * value, value)
    assert len({late.tobytes() for late in orders}) > 1
    for late in orders:
        assert sorted(late.tolist()) == sorted(order.tolist()) and fits(problem, late)
        assert (late[~is_weight[late]] == order[~is_weight[order]]).all()
        assert run_order(problem, late, np.inf, run) < np.inf


def test_whole_backwards_leave_no_w_to_place():
    sizes = Sizes(4, 8, 4)
    question = Question(load("1f1b", sizes), sizes, {"F": 1, "B": 2})
    problem = problem_of(placed_jobs(question), question)
    order = order_of(problem, np.arange(len(problem.worker)))
    assert with_late_weights(problem, order, 0.0, 100.0) == []


def test_cp_sat_proves_the_best_of_a_small_problem():
    """2 workers, 3 microbatches, memory for 1: worker 0 has one at a time, for two F, two I and its W."""
    pytest.importorskip("ortools")
    best = found("zb-h1", Sizes(2, 3, 2), UNIT, budget=10, objective="latency", saved=1)
    assert best.optimal and best.bound == best.value == 15


@pytest.mark.parametrize("message", [1e6 + 0.5, 1e16])
def test_cp_sat_takes_messages_however_long(message):
    """One microbatch behind the other, each there and back; beyond 2**53 units nothing is proved."""
    pytest.importorskip("ortools")
    sizes = Sizes(2, 2, 2)
    question = Question(load("1f1b", sizes), sizes, UNIT, Machine(alpha=message), Limits(saved=1))
    problem = problem_of(placed_jobs(question), question)
    everything = 4 * message + 12
    solution = cp_sat.solve(problem, np.full(len(problem.worker), everything), everything, 0.0, 1.0)
    assert solution.optimal == (message < 1e16)
    assert solution.bound == (pytest.approx(4 * message + 10) if solution.optimal else 0)


def test_a_worker_without_stages_is_no_trouble_for_cp_sat():
    pytest.importorskip("ortools")
    scheme = Scheme("by hand", 3, lambda s, b, d: (s, s), lambda s, b, d: b, "b", "greedy", split=True)
    best = search_order(Question(scheme, Sizes(2, 3, 3), UNIT, limits=Limits(saved=1)), 10)
    assert best.optimal and best.value == 15


def test_whole_backwards_give_back_what_their_own_forward_took():
    """Two at a time go down 6 stages and up, 18 long each: three times that, and the second one's last two jobs."""
    pytest.importorskip("ortools")
    best = found("1f1b", Sizes(6, 6, 6), {"F": 1, "B": 2}, budget=10, objective="latency", saved=2)
    assert best.optimal and best.bound == best.value == 3 * 18 + 3
    assert check(best.program).saved.max() == 2


@pytest.mark.parametrize(("half", "limit"), [(-1, 3), (1, 5), *further((0, 3), (1, 4))])
def test_memory_between_the_halves_of_a_backward_is_proved_as_it_is_searched(half, limit):
    """2 workers, 2 microbatches: all orders are tried. F takes 2, I takes `half` more, and W gives all back.

    Where `half` is above 0, GPipe's whole backwards need less memory and may be faster than any of them.
    """
    pytest.importorskip("ortools")
    sizes, machine = Sizes(2, 2, 2), Machine(activation=0, weight=0, saved=2, half=half)
    cost = {"F": 2, "I": 3, "W": 1}
    best = found("zb-h1", sizes, cost, machine, 1, objective="latency", bytes=limit)
    question = Question(load("zb-h1", sizes), sizes, cost, machine, Limits(bytes=limit))
    problem = problem_of(placed_jobs(question), question)._replace(capacity=np.full(2, float(limit)))
    run, values = new_run(problem), []
    for sequences in itertools.product(sorted({*itertools.permutations([0, 0, 1, 1, 2, 2])}), repeat=2):
        order = np.concatenate([np.array(sequences[0]), 3 + np.array(sequences[1])])
        if fits(problem, order):
            values.append(run_order.sized(10**6)(problem, order, np.inf, run))
    assert best.bound <= best.value <= min(values)
    assert half > 0 or (best.optimal and best.value == min(values))
    assert simulate(best.program, cost, machine).footprint.peak.max() <= limit


def least(place, cost, limit):
    """The least latency of F and B by microbatch and stage on the workers in `place`: all orders are tried."""
    batches, stages, best = len(place), len(place[0]), np.inf

    def go_on(done, ready, free, held, latest):
        nonlocal best
        if min(done) == 2 * stages:
            best = min(best, latest)
        for b in range(batches):
            if done[b] == 2 * stages or latest >= best:
                continue
            d, s = (F, done[b]) if done[b] < stages else (B, 2 * stages - 1 - done[b])
            worker = place[b][s]
            if d == F and held[worker] == limit:
                continue
            end = max(ready[b], free[worker]) + cost["FB"[d]][s]

            def changed(values, index, value):
                return (*values[:index], value, *values[index + 1 :])

            go_on(changed(done, b, done[b] + 1), changed(ready, b, end), changed(free, worker, end),
                  changed(held, worker, held[worker] + (1 if d == F else -1)), max(latest, end))  # fmt: skip

    go_on((0,) * batches, (0,) * batches, (0, 0), (0, 0), 0)
    return best


@pytest.mark.parametrize("seed", [*range(3), *further(*range(3, 20))])
def test_microbatches_that_take_other_ways_may_overtake_one_another(seed):
    """A worker need not do the microbatches of a stage in their order: some are on their way longer than others."""
    pytest.importorskip("ortools")
    rng = np.random.default_rng(seed)
    place = rng.permutation([0, 0, 0, 1, 1, 1]).reshape(3, 2)
    cost, limit = {"F": rng.integers(1, 7, 2).tolist(), "B": rng.integers(1, 9, 2).tolist()}, int(rng.integers(2, 5))
    scheme = Scheme("by hand", 2, lambda s, b, d: (place[b, s], place[b, s]), lambda s, b, d: b, "b", "greedy")
    best = search_order(Question(scheme, Sizes(2, 3, 2), cost, limits=Limits(saved=limit)), 1)
    latency = least(place.tolist(), cost, limit)
    assert best.bound <= latency <= best.value
    assert best.value == latency or not best.optimal
    assert check(best.program).saved.max() <= limit


def test_one_microbatch_after_another_fits_where_it_must():
    """With room for one microbatch each, rules that place jobs one by one end where two routes cross."""
    sizes, machine = Sizes(4, 4, 4), Machine(saved=100, activation=10, weight=50)
    best = found("chimera", sizes, UNIT, budget=0.1, saved=1)
    assert check(best.program).saved.max() == 1 and best.value <= 4 * 4 * 3
    peak = float(simulate(best.program, UNIT, machine).footprint.peak.max())
    assert found("chimera", sizes, UNIT, machine, budget=0.1, bytes=peak).value <= 4 * 4 * 3


def test_the_file_has_the_limit_where_a_built_in_order_is_the_best():
    best = found("1f1b", Sizes(4, 4, 4), {"F": 1, "B": 2}, budget=0.1, saved=4)
    assert best.source == "1f1b" and best.program.header.memory_limit == 4


def test_a_limit_that_built_in_schemes_leave_no_room_under():
    """The leanest of them takes 59 bytes besides saved forwards, the serial order, which ends at 215.49, takes 49."""
    sizes, edges = Sizes(6, 3, 3), ((0, 1), (0, 2), (0, 4), (1, 2), (1, 4), (2, 3), (2, 4), (3, 4), (3, 5), (4, 5))
    machine = Machine(
        activation=[3, 1, 2, 0, 2, 1], weight=[3, 4, 2, 3, 2, 0], saved=[9, 1, 7, 9, 1, 7], owned=[9, 0, 8, 15, 12, 3],
        workspace={"I": [3, 3, 3, 3, 2, 3], "W": [9, 9, 0, 0, 8, 0]},
    )  # fmt: skip
    cost = {"F": [8, 8, 1, 5, 9, 4], "B": [8.39, 6.1, 7.64, 1.46, 4.57, 8.67]}
    scheme = load("gpipe", sizes)._replace(edges=edges, per_consumer=(2,))
    best = search_order(Question(scheme, sizes, cost, machine, Limits(bytes=76)), 3)
    assert best.value < 183


@pytest.mark.parametrize("limit", [22, *further(26, 36)])
def test_bytes_of_a_worker_are_what_the_simulator_counts(limit):
    """Weights, what is received, and workspaces count, too; activations of 1, saved forwards of 2."""
    sizes, machine = Sizes(8, 8, 4), Machine(alpha=0.1, saved=2, half=1, workspace=1)
    best = found("zb-v", sizes, {"F": 1, "I": 1.2, "W": 0.6}, machine, 3, bytes=limit)
    run = simulate(best.program, {"F": 1, "I": 1.2, "W": 0.6}, machine)
    assert run.footprint.peak.max() <= limit and best.bound <= best.value


@pytest.mark.parametrize("activation", [0, 1])
def test_messages_take_the_time_that_they_take_in_the_simulator(activation):
    """Without bytes they take none, in the bound, too: p stages there and back, and a W."""
    machine = Machine(alpha=2, activation=activation)
    best = found("zb-h1", Sizes(4, 1, 4), UNIT, machine, 1)
    assert best.value == best.bound == 9 + 6 * 2 * activation and best.optimal


@pytest.mark.parametrize("name", ["1f1b", "dualpipe-v", *further("interleaved-1f1b", "chimera")])
def test_nothing_is_worse_than_the_built_in_scheme_nor_below_the_bound(name):
    sizes = Sizes(4 if name in ("1f1b", "chimera") else 8, 8, 4)
    scheme = load(name, sizes)
    cost = UNIT if scheme.split else {"F": 1, "B": 2}
    program = compile(scheme, sizes, Options(cost=cost))
    for own_window, objective in enumerate(("latency", "window")):
        best = found(name, sizes, cost, Machine(alpha=0.1), 3, objective=objective)
        assert best.bound <= best.value <= measured(simulate(program, cost, Machine(alpha=0.1)), bool(own_window))
        check(best.program)


def test_the_command_takes_schemes_with_groups(run):
    words = ("search", "lpp", "--stages", 4, "--microbatches", 4, "--workers", 4, "--budget", 1, "--json")
    assert "needs --workers W and --groups G" in run(*words).err
    numbers = json.loads(run(*words, "--groups", 2).out)
    assert numbers["value"] >= numbers["bound"] > 0


def test_the_command_says_value_and_bound(run, tmp_path):
    out = tmp_path / "found.json"
    done = run("search", "zb-v", "--stages", 8, "--microbatches", 8, "--objective", "window", "--budget", 2, "--json",
               "-o", out)  # fmt: skip
    numbers = json.loads(done.out)
    assert (numbers["value"], numbers["bound"], numbers["optimal"]) == (48, 48, True)
    assert run("check", out).code == 0


@pytest.mark.parametrize(
    ("profile", "kept"),
    [({"F": 3, "B": 6.00001}, {"F": 3, "B": 6.00001}), ({"F": [1, 5], "B": [4, 8]}, {"F": 1, "B": 2})],
)
def test_the_file_keeps_the_costs_unless_they_are_by_stage(profile, kept, run, tmp_path):
    (tmp_path / "profile").write_text(json.dumps(profile))
    words = ("search", "1f1b", "--stages", 2, "--microbatches", 2, "--budget", 1, "-o", "-")
    found = run(*words, "--profile", tmp_path / "profile").out
    assert json.loads(found)["order"]["cost"] == kept
    if kept == profile:
        given = ",".join(f"{name}={time}" for name, time in profile.items())
        assert run(*words, "--cost", given).out == found
