"""search free: the placement is searched, too; bounds hold for any placement, and none of a family is better."""

import itertools
import json
import re

import numpy as np
import pytest
from examples import further

from schedgen.checker import check
from schedgen.ir.file import parse
from schedgen.planner.order_search.question import Limits, NoOrder, Question
from schedgen.planner.order_search.search_order import search_order
from schedgen.planner.placement_search import stage_sets as placement_bounds
from schedgen.planner.placement_search.families import families, free_scheme, placed_on
from schedgen.planner.placement_search.search_placement import (
    FINALISTS,
    NEAR_SHARE,
    _Search,
    search_placement,
    stage_sets,
)
from schedgen.schemes.scheme import Sizes
from schedgen.simulator.machine import Machine
from schedgen.simulator.simulate import simulate

HALVES, WHOLE, BOTH = ("F", "I", "W"), ("F", "B"), ("F", "B", "I", "W")


def costs(names, *times):
    """The same time by stage for every direction, twice as much for B, or somewhat less where there are halves, too."""
    whole = 1.6 if names == BOTH else 2
    return {name: np.array(times, float) * (whole if name == "B" else 1) for name in names}


def placements(stages, workers):
    """All placements, up to a renaming of workers."""
    named = itertools.product(range(workers), repeat=stages)
    return sorted({tuple(list(dict.fromkeys(each)).index(worker) for worker in each) for each in named})


CASES = [
    (HALVES, (3, 1, 1, 4), Limits(), Machine()),
    (HALVES, (1, 5, 1, 2), Limits("window"), Machine(alpha=0.5)),
    (WHOLE, (1, 1, 6, 2), Limits(bytes=20), Machine(alpha=0.25)),
    (HALVES, (1, 1, 1, 1), Limits("window", saved=4), Machine()),
    (BOTH, (3, 1, 1, 4), Limits(), Machine(alpha=0.25)),
    *further(
        (WHOLE, (4, 1, 2, 2), Limits(saved=4), Machine(alpha=0.25)),
        (BOTH, (1, 4, 2, 2), Limits(saved=4), Machine()),
    ),
]


@pytest.mark.parametrize(("names", "times", "limits", "machine"), CASES)
def test_all_placements_of_four_stages_on_two_workers(names, times, limits, machine):
    """The best order of each of the 8 is found with the same work; none is below the bound."""
    sizes, cost = Sizes(4, 4, 2), costs(names, *times)
    question = Question(free_scheme(sizes), sizes, cost, machine, limits)
    best = search_placement(question, 1)
    values = {}
    for placement in placements(4, 2):
        try:
            placed = question._replace(scheme=placed_on(question.scheme, placement))
            values[placement] = search_order(placed, 0.1).value
        except NoOrder:
            continue
    assert len(placements(4, 2)) == 8 and len(values) >= 3
    assert best.bound <= best.value <= min(values.values()) * (1 + 1e-9)
    assert best.optimal == (best.value <= best.bound * (1 + 1e-9))
    run = simulate(best.program, cost, machine)
    assert limits.bytes is None or run.footprint.peak.max() <= limits.bytes
    assert limits.saved is None or check(best.program).saved.max() <= limits.saved


def test_heavy_ends_have_workers_of_their_own():
    """The last stage alone takes 8 (5 + 5 + 4), after the 10 that the first forward takes to reach it."""
    sizes, heavy = Sizes(8, 8, 4), (4, 1, 1, 1, 1, 1, 1, 5)
    cost = {"F": np.array(heavy), "I": np.array(heavy), "W": np.array((3, 1, 1, 1, 1, 1, 1, 4))}
    question = Question(free_scheme(sizes), sizes, cost)
    best = search_placement(question, 10)
    assert best.value == best.bound == 8 * 14 + 10 and best.optimal
    assert check(best.program).saved.max() <= 2 * 8
    schemes = [family.scheme for family in families(question.scheme, sizes)]
    own = [search_order(question._replace(scheme=scheme), 10) for scheme in schemes]
    assert len(own) == 2 and min(found.bound for found in own) > 1.15 * best.value


@pytest.mark.parametrize(
    ("stages", "workers", "several"),
    [
        (8, 4, [False, False]),
        (4, 4, [False, True]),
        (6, 4, [False]),
        (3, 5, []),
        *further((16, 4, [False, False])),
    ],
)
def test_no_family_is_better_with_as_much_work(stages, workers, several):
    """Of 8 stages on 4 workers: round the workers, and a V; of 4 a chain and Chimera's; of 16 rounds and waves."""
    sizes, machine = Sizes(stages, 4, workers), Machine(alpha=0.1)
    scheme, cost = free_scheme(sizes), costs(HALVES, *range(stages + 1, 1, -1))
    own = families(scheme, sizes)
    assert [family.placement is None for family in own] == several
    best = search_placement(Question(scheme, sizes, cost, machine), 1)
    share = (1 - NEAR_SHARE) / (len(own) + FINALISTS)
    found = [search_order(Question(family.scheme, sizes, cost, machine), share) for family in own]
    assert best.value <= min((each.value for each in found), default=np.inf)
    assert best.bound <= min([best.value, *(each.bound for each in found)])
    check(best.program)


@pytest.mark.parametrize("limits", [Limits(), Limits("window", saved=4), *further(Limits("window"), Limits(saved=5))])
def test_the_bound_of_many_stages_holds_for_those_of_few(limits, monkeypatch):
    """It is no more than that of all partitions, and there are two workers that reach the bound of all partitions."""
    sizes, cost = Sizes(6, 6, 3), costs(WHOLE, 3, 1, 4, 1, 2, 2)
    question = Question(free_scheme(sizes), sizes, cost, limits=limits)
    few = search_placement(question, 1)
    monkeypatch.setattr(placement_bounds, "MOST_STAGES", 5)
    many = search_placement(question, 1)
    assert 0.75 * few.bound < many.bound <= few.bound <= few.value


def test_a_placement_whose_weights_exceed_the_limit_is_not_tried():
    sizes, machine = Sizes(4, 2, 2), Machine(weight=100, saved=10)
    search = _Search(Question(free_scheme(sizes), sizes, costs(HALVES, 3, 1, 1, 4), machine, Limits(bytes=500)))
    bound = search.sets.of((0, 0, 0, 1))
    trial = search.estimate((0, 0, 0, 1), bound, np.arange(24.0))
    assert (bound, trial.value, trial.work, len(trial.start)) == (np.inf, np.inf, 0, 0)


def test_the_bound_leaves_room_for_losses_that_are_numbers():
    sizes, machine = Sizes(2, 50, 2), Machine(activation=100, weight=10, owned=30)
    sets = stage_sets(Question(free_scheme(sizes), sizes, {"F": 1, "B": 2}, machine, Limits(bytes=5000)))
    assert [sets.room(1), sets.room(2)] == [5000 - 40, 5000 - 40 - 50 * 8]


def test_a_workspace_of_no_job_takes_nothing():
    sizes, found = Sizes(4, 4, 2), []
    for workspace in (0, {}):
        machine = Machine(workspace=workspace)
        question = Question(free_scheme(sizes), sizes, {"F": 1, "B": 2}, machine, Limits(bytes=40))
        found.append(search_placement(question, 1))
    assert found[0].value == found[1].value


def test_a_bound_by_hand_of_many_stages(monkeypatch):
    """Three equal stages on two workers. Work is 27; the second worker to begin waits for 1, and goes on 2 later."""
    monkeypatch.setattr(placement_bounds, "MOST_STAGES", 2)
    sizes = Sizes(3, 3, 2)
    best = search_placement(Question(free_scheme(sizes), sizes, {"F": 1, "B": 2}), 1)
    assert best.bound == (3 * 3 * 3 + 0 + 1 + 0 + 2) / 2 and not best.optimal


@pytest.mark.parametrize("objective", ["latency", "window"])
@pytest.mark.parametrize("most", [1, 12])
def test_no_message_is_counted_where_all_may_be_on_one_worker(objective, most, monkeypatch):
    monkeypatch.setattr(placement_bounds, "MOST_STAGES", most)
    sizes, cost = Sizes(3, 2, 2), {"F": 1, "B": 2}
    sets = stage_sets(Question(free_scheme(sizes), sizes, cost, Machine(alpha=50), Limits(objective)))
    assert sets.least(1, np.inf)[0] == sets.of((0, 0, 0)) == 3 * 2 * 3
    assert sets.of((0, 1, 1)) >= 9 + 2 * 50 > sets.least(2, np.inf)[0]


def test_the_same_call_gives_the_same_order():
    sizes, cost = Sizes(8, 4, 4), costs(HALVES, 2, 1, 5, 1, 1, 3, 1, 2)
    question = Question(free_scheme(sizes), sizes, cost, Machine(alpha=0.1))
    first, second = (search_placement(question, 1) for _ in range(2))
    assert (first.program.rows.stage == second.program.rows.stage).all() and first.work == second.work
    assert 0 < first.work < 2


def test_a_worker_without_stages_is_no_trouble_for_cp_sat():
    pytest.importorskip("ortools")
    sizes = Sizes(2, 3, 3)
    scheme = placed_on(free_scheme(sizes), (0, 1))
    found = search_order(Question(scheme, sizes, {"F": 1, "I": 1, "W": 1}, limits=Limits(saved=1)), 10)
    assert found.optimal and found.value == 15


def test_the_command_places_stages_of_a_graph(run, tmp_path):
    graph, out, profile = tmp_path / "graph.json", tmp_path / "found.json", tmp_path / "costs.json"
    graph.write_text('{"stages": 4, "edges": [[0, 1], [0, 3], [1, 2], [2, 3]], "tied": [[0, 3]]}')
    profile.write_text(json.dumps({"F": [3, 1, 1, 1], "B": [6, 2, 2, 2]}))
    words = ("search", "free", "--graph", graph, "--microbatches", 4, "--workers", 2, "--budget", 1)
    done = run(*words, "--profile", profile, "--json", "-o", out)
    numbers, header = json.loads(done.out), parse(out.read_text(), "-").header
    assert numbers["workers"] == header.compute[0, :, 0].tolist() == [0, 1, 1, 1]
    assert (header.scheme["name"], header.tied, header.graph.edges) == (
        "free",
        ((0, 3),),
        ((0, 1), (0, 3), (1, 2), (2, 3)),
    )
    assert run("check", out).code == 0
    assert re.search("; stages on workers 0 1.*(optimal|no order) with each stage on one worker", run(*words).out)


def test_what_is_proved_of_stages_on_several_workers_is_said(run, tmp_path):
    """Both ways 2 equal stages take 12 for 2 microbatches; with each on one worker they take 18."""
    profile = tmp_path / "costs.json"
    profile.write_text('{"F": [2, 2], "B": [4, 4]}')
    sizes = ("--stages", 2, "--microbatches", 2, "--profile", profile, "--budget", 1)
    assert "latency 18 by 1f1b; optimal. " in run("search", "1f1b", *sizes).out
    both = run("search", "free", "--workers", 2, *sizes).out
    assert "stages on workers [0, 1] [1, 0]; optimal with each stage on one worker or both ways. " in both


def test_a_limit_in_bytes_goes_with_outputs_apart(run, tmp_path):
    graph, profile = tmp_path / "graph.json", tmp_path / "costs.json"
    graph.write_text('{"stages": 3, "edges": [[0, 1], [0, 2], [1, 2]], "apart": [0]}')
    profile.write_text('{"F": [1, 2, 3], "B": [2, 3, 4], "activation": 5, "saved": 9, "apart": [1, 2, 3]}')
    words = ("search", "free", "--graph", graph, "--microbatches", 2, "--workers", 2, "--budget", 1, "--json")
    limited, free = (run(*words, "--profile", profile, *limit) for limit in (("--memory", 1000), ()))
    assert json.loads(limited.out)["value"] == json.loads(free.out)["value"]


def test_a_schedule_may_be_called_free(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        words = ("--stages", 2, "--microbatches", 2, "--workers", 2, "--budget", 1, "-o", "free")
        assert run("search", "free", *words).code == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "free needs --workers W"),
        (("--workers", 2, "--chunks", 2), "free takes no --chunks"),
        (("--workers", 2, "--groups", 2), "free takes no --groups"),
        (("--workers", 2, "--recompute", "--memory-limit", 2), "leave --recompute out"),
        (("--workers", 2, "--memory", 3), "no placement was found with an order within the memory limit"),
    ],
)
def test_what_free_does_not_take_is_said(words, sentence, run):
    done = run("search", "free", "--stages", 4, "--microbatches", 4, "--budget", 1, *words)
    assert done.code == 2 and sentence in done.err and "Traceback" not in done.err
