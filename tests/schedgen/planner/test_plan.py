"""plan: layers are joined into stages, and schedules are searched by simulation."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from compiled import compiled
from examples import ASKED, further

from schedgen.checker import check
from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.compiler.sum_trees import TWO_LEVEL
from schedgen.ir.instructions import Op
from schedgen.planner import plan as plan_module
from schedgen.planner.candidates import candidate_bound, candidates
from schedgen.planner.layer_profile import Layers
from schedgen.planner.plan import plan
from schedgen.planner.stage_costs import stage_costs
from schedgen.schemes import SCHEMES, load
from schedgen.schemes.scheme import Sizes
from schedgen.simulator.machine import Machine
from schedgen.simulator.network import HostLink, Network, topology
from schedgen.simulator.simulate import simulate
from schedgen.util.errors import UsageError
from schedgen.util.jit import compiled_always

VGG16 = Path(__file__).parents[2] / "data" / "vgg16.txt"
UNEVEN = topology(2, 2, (5e-6, 1e-5), (1 / 9e9, 1 / 1e9))._replace(speed=(1, 1, 0.6, 1), host=HostLink(1e-5, 1e-10))


def model(count=8, split=False):
    """A chain of layers that grow, in an optimizer with two moments."""
    growth = np.linspace(1, 2, count)
    backward = {"I": 1.2e-3 * growth, "W": 0.8e-3 * growth} if split else {"B": 2e-3 * growth}
    machine = Machine(
        alpha=1e-5, activation=1e6 * growth[::-1], weight=4e6 * growth, saved=3e6 * growth, half=1e6 * growth,
        workspace={"F": 1e6 * growth, "B": 2e6 * growth}, owned=12e6 * growth, step=1e-4 * growth,
    )  # fmt: skip
    chain = tuple(itertools.pairwise(range(count)))
    return Layers(tuple(map(str, range(count))), chain, {"F": 1e-3 * growth, **backward}, machine)


@pytest.fixture(scope="module")
def every():
    """All candidates of a search for 4 workers."""
    return list(candidates(model(), 4, 1e9, 8))


def test_every_scheme_is_tried_but_those_that_another_one_is(every):
    names = {candidate.name for candidate in every}
    assert names == {*SCHEMES} - {"depth-first", "pipedream", "pipedream-2bw"}
    sizes = Sizes(8, 8, 4)
    grouped = sizes._replace(groups=1)
    a, b = compiled("depth-first", sizes), compiled("lpp", grouped)
    assert all((x == y).all() for x, y in zip(a.rows, b.rows, strict=True))
    for name in ("1f1b", "zb-h1", "interleaved-1f1b", "lpp"):
        assert {2, 1 if name != "lpp" else 4} <= {c.replicas for c in every if c.name in (name, "ddp")}


@pytest.mark.parametrize("hosts", [None, UNEVEN])
def test_no_schedule_is_faster_or_smaller_than_the_bound_that_may_leave_it_out(every, hosts, monkeypatch):
    tight, layers = 0, model()
    every = every if hosts is None else candidates(layers._replace(machine=layers.machine.on(hosts)), 4, 1e9, 8)
    monkeypatch.setattr(plan_module, "_tried", tried := list(every))
    with compiled_always():
        for number, candidate in enumerate(tried):
            bound = candidate_bound(candidate)
            for row, _ in (found := plan_module._simulated(number)):
                assert bound.seconds <= row.step_time and bound.bytes <= row.peak_bytes, candidate
                tight += bound.seconds > 0.7 * row.step_time
            # Else it has caps, or no job between to be away for.
            assert found or candidate.way == 2 or candidate.name in ("zb-v", "v-half", "v-min")
    assert tight > 5  # else it would prune nothing


FEW = (*(name for name in SCHEMES if ASKED), "1f1b", "gpipe", "zb-v", "fsdp", "lpp")


@pytest.mark.parametrize(
    ("split", "limit", "sizes"),
    [
        (True, 1.2e8, {}),
        (False, np.inf, {"alpha": 1, "activation": np.zeros(8), "weight": np.zeros(8)}),
        *further((False, np.inf, {})),
    ],
)
def test_leaving_out_by_bounds_changes_nothing(split, limit, sizes, without_bounds):
    """Messages without bytes take no time, whatever alpha is."""
    layers = model(split=split)
    arguments = layers._replace(machine=layers.machine._replace(**sizes)), 4, 8, limit
    quick = plan(*arguments, bandwidth=1e9, schemes=FEW)
    with without_bounds():
        slow = plan(*arguments, bandwidth=1e9, schemes=FEW)
    assert quick.front == slow.front
    assert quick.simulated <= slow.simulated == slow.schedules
    assert all(row.peak_bytes <= limit for row in quick.front)
    for a, b in itertools.pairwise(quick.front):
        assert a.step_time < b.step_time and a.peak_bytes > b.peak_bytes


@pytest.mark.parametrize(("seed", "schemes"), [(3, ("ddp", "zb-v")), (5, ("ddp", "zb-v")), (3, ("1f1b", "v-min"))])
def test_with_a_limit_nothing_is_missed_that_is_found_without(seed, schemes):
    rng = np.random.default_rng(seed)
    times = {"F": rng.uniform(0.1, 5, 6), "B": rng.uniform(0.1, 9, 6)}
    activation, weight, saved = rng.integers(0, (9000, 30000, 9000), (6, 3)).T.astype(float)
    machine = Machine(activation=activation, weight=weight, saved=saved)
    layers = Layers(tuple("abcdef"), tuple(itertools.pairwise(range(6))), times, machine)
    for found in plan(layers, 2, 4, bandwidth=1e6, schemes=schemes).front:
        limited = plan(layers, 2, 4, found.peak_bytes, bandwidth=1e6, schemes=schemes).front
        assert limited[0].step_time <= found.step_time and limited[0].peak_bytes <= found.peak_bytes


@pytest.mark.parametrize("scheme", ["1f1b", "dualpipe-v", "gpipe"])
def test_a_plan_read_with_the_profile_it_was_made_from_takes_what_plan_says(run, tmp_path, scheme):
    """Stages join layers, one of them or several, and where a schedule splits backwards plan has halved those of B."""
    growth, path, profile = np.linspace(1, 2, 8), tmp_path / "plan.json", tmp_path / "profile.json"
    values = {
        "F": 1e-3 * growth, "B": 2e-3 * growth, "activation": 1e6 * growth[::-1], "weight": 4e6 * growth,
        "saved": 3e6 * growth, "step": 1e-4 * growth,
    }  # fmt: skip
    values = {name: amounts.tolist() for name, amounts in values.items()} | {"overhead": 1e-4, "beta": 1.1e-9}
    profile.write_text(json.dumps(values))
    options = ("--workers", 4, "--microbatches", 8, "--schemes", scheme, "--json", "-o", path)
    best = json.loads(run("plan", profile, *options).out)["schedules"][0]
    with_profile = (path, "--profile", profile)
    simulated = json.loads(run("simulate", *with_profile, "--json").out)
    assert (simulated["makespan"], simulated["peak_bytes"]) == (best["step_time"], best["peak_bytes"])
    assert json.loads(run("stats", *with_profile, "--json").out)["peak_bytes"] == best["peak_bytes"]
    assert run("simulate", *with_profile, "--trace", tmp_path / "chrome.json").code == 0
    events = json.loads((tmp_path / "chrome.json").read_text())["traceEvents"]
    assert max(e["ts"] + e["dur"] for e in events if "dur" in e) == pytest.approx(1e6 * best["step_time"])
    assert run("draw", *with_profile, "-o", tmp_path / "drawn.html").code == 0


def test_a_schedule_takes_what_its_row_says_though_it_was_ordered_by_other_cuts():
    """Other cuts have other ratios of F and B where layers have overhead, and so hanayo, which is greedy, does else."""
    times = {"F": np.array([1.3, 1.9, 1.9, 2, 1.2, 0.6]), "B": np.array([0.6, 2.4, 1.6, 3.6, 2, 4.7])}
    machine = Machine(
        alpha=0.01, beta=1e-9, activation=1e3 * np.array([2, 3, 8, 9, 9, 2]), saved=1e3 * np.array([5, 3, 8, 9, 3, 5]),
        weight=np.full(6, 1e3),
        overhead={"F": np.array([0.7, 1.2, 1.2, 0.9, 0.5, 0.2])},
    )  # fmt: skip
    layers = Layers(tuple("abcdef"), tuple(itertools.pairwise(range(6))), times, machine)
    best = plan(layers, 2, 4, 165e3, schemes=["hanayo"])
    first = best.front[0]
    costs = stage_costs(layers, np.cumsum(first.layers).tolist())
    run = simulate(best.program, costs.with_halves, costs.machine)
    assert (run.end.max(), run.footprint.peak.max()) == (first.step_time, first.peak_bytes)
    check(best.program)


def test_an_order_that_is_found_is_faster_and_keeps_to_the_memory(run, tmp_path):
    """A heavy end of the model, and memory for few saved forwards: no built-in order suits both."""
    growth = np.array([1.0, 1, 3, 3])
    values = {
        "F": 1e-3 * growth, "B": 2e-3 * growth, "alpha": 1e-5, "activation": np.full(4, 65536), "weight": 8e5 * growth,
        "saved": 1e6 * growth, "owned": 24e5 * growth,
    }  # fmt: skip
    profile, path = tmp_path / "profile.json", tmp_path / "found.json"
    profile.write_text(json.dumps({name: np.asarray(value).tolist() for name, value in values.items()}))
    options = ("plan", profile, "--workers", 2, "--bandwidth", 1e9, "--microbatches", 8, "--memory", 2.5e7)
    options += ("--schemes", "interleaved-1f1b")
    own = json.loads(run(*options, "--json").out)["schedules"][0]
    lines = run(*options, "--search", 1, "-o", path).out.splitlines()
    best = next(line for line in lines if line.startswith("interleaved-1f1b")).split()
    assert (own["order"], best[4]) == ("own", "search")
    assert float(best[5]) < 0.95 * own["step_time"] and float(best[6]) <= 25 and best[7] == "MB"
    assert run("check", path).code == 0
    header = json.loads(path.read_text())
    layers = "-".join(map(str, header["scheme"]["layers"]))
    assert f"the first have {layers} layers" in lines[-1] and header["order"]["n"] == "search latency"


@pytest.mark.parametrize("memory", [np.inf, 2.2e7])
def test_whether_backwards_are_split_and_what_is_redone_is_searched(memory):
    """Four equal layers on four workers: as in `test_whole_or_split`, and with memory for half of what 1F1B saves."""
    ones = np.ones(4)
    machine = Machine(activation=1.0, weight=1e6, saved=8e6 * ones, owned=4e6 * ones)
    times = {"F": 10 * ones, "B": 18 * ones, "I": 12 * ones, "W": 10 * ones}
    layers = Layers(("a", "b", "c", "d"), ((0, 1), (1, 2), (2, 3)), times, machine)
    own, best = (plan(layers, 4, 8, memory, bandwidth=1e9, schemes=["1f1b", "zb-h1"], budget=n) for n in (0, 1))
    first = best.front[0]
    assert first.order == "search" and first.step_time < own.front[0].step_time and first.peak_bytes <= memory
    count = {op: len(best.program.rows_of(op)) for op in (Op.BWD, Op.BWD_I, Op.RECOMPUTE)}
    assert first.recomputed == count[Op.RECOMPUTE]
    if np.isinf(memory):
        assert not (count[Op.BWD] and count[Op.BWD_I])
    else:
        assert 0 < count[Op.RECOMPUTE] < 32


def test_a_stage_costs_what_its_layers_cost():
    machine = Machine(
        activation=np.array([5.0, 7, 9, 1]), weight=np.array([1.0, 2, 3, 4]), saved=np.array([10.0, 20, 30, 40]),
        half=2, workspace={"F": [1, 2, 3, 4], "B": [4, 3, 2, 1]}, owned=[2, 4, 6, 8], step=np.array([1.0, 1, 1, 2]),
        overhead={"F": [0.5, 0.25, 1, 1], "B": 1},
    )  # fmt: skip
    times = {"F": np.array([1.0, 2, 3, 4]), "B": np.array([2.0, 4, 6, 8])}
    # Layer 3 reads layer 1, too: its output crosses the cut behind layer 2 as well.
    layers = Layers(("a", "b", "c", "d"), ((0, 1), (1, 2), (1, 3), (2, 3)), times, machine)
    cut = stage_costs(layers, (2, 3, 4))
    assert cut.layer_counts == (2, 1, 1)
    expected = {
        "activation": [7, 7 + 9, 1],
        "weight": [3, 3, 4],
        "saved": [10 + 20 + 5, 30, 40],  # and what layer 0 hands to layer 1
        "half": [4, 2, 2],
        "owned": [6, 6, 8],
        "step": [2, 1, 2],
    }
    assert {name: getattr(cut.machine, name).tolist() for name in expected} == expected
    assert {name: sizes.tolist() for name, sizes in cut.machine.workspace.items()} == {
        "F": [2, 3, 4],
        "B": [4 + 2 * 5, 2, 1],
        "I": [4 + 2 * 5, 2, 1],
        "W": [4, 2, 1],
    }
    assert {name: sums.tolist() for name, sums in cut.durations(False).items()} == {"F": [2.75, 3, 4], "B": [5, 6, 8]}
    assert {name: sums.tolist() for name, sums in cut.durations(True).items()} == {
        "F": [2.75, 3, 4], "I": [2.5, 3, 4], "W": [2.5, 3, 4],
    }  # fmt: skip


ON_TWO = ("--workers", 2, "--bandwidth", 1e9, "--microbatches", 4, "--json")


@pytest.fixture(scope="module")
def on_two(run, tmp_path_factory):
    """VGG-16 on two workers, planned among all schemes: the numbers and the file."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    return json.loads(run("plan", VGG16, *ON_TWO, "-o", path).out), path.read_text()


def test_only_the_schemes_that_are_asked_for_are_searched(run, on_two):
    numbers = json.loads(run("plan", VGG16, *ON_TWO, "--schemes", "1f1b,gpipe").out)
    assert numbers["schedules"] and {schedule["scheme"] for schedule in numbers["schedules"]} <= {"1f1b", "gpipe"}
    assert 0 < numbers["searched"] < on_two[0]["searched"]


def test_a_schedule_keeps_the_cut_it_was_made_for(run, refused, on_two, tmp_path):
    path, text = tmp_path / "plan.json", on_two[1]
    counts = json.loads(text)["scheme"]["layers"]
    assert sum(counts) == 41
    path.write_text(text.replace(json.dumps(counts), json.dumps([0, *counts[1:]])))
    assert "a number for each stage" in refused(run("seal", path), 1)
    path.write_text(text.replace(json.dumps(counts), json.dumps(counts[1:])))
    assert "a number for each stage" in refused(run("check", path), 1)


def test_many_microbatches_take_no_more_memory_than_few(run, tmp_path):
    """Losses are numbers, not activations: 32 of these would exceed the limit. Plan and search agree with simulate."""
    profile, out = tmp_path / "profile.json", tmp_path / "out.json"
    costs = {"F": [1] * 4, "B": [2] * 4, "beta": 1e-12, "activation": 10**8, "saved": 3 * 10**8, "weight": 10**8}
    profile.write_text(json.dumps(costs))
    sizes = ("--microbatches", 32, "--memory", 2.1e9, "--json", "-o", out)
    for words in (
        ("plan", profile, "--workers", 4, "--schemes", "1f1b"),
        ("search", "1f1b", "--stages", 4, "--profile", profile, "--budget", 1),
    ):
        done = run(*words, *sizes)
        assert done.code == 0, done.err
        simulated = json.loads(run("simulate", out, "--profile", profile, "--json").out)
        assert simulated["peak_bytes"] == 20 * 10**8  # of rank 1, with 3 microbatches in flight
        assert simulated["workers"][3]["peak_bytes"] == 9 * 10**8 + 32 * 8
        assert all(row["peak_bytes"] <= 20 * 10**8 for row in json.loads(done.out).get("schedules", []))


def test_between_hosts_gradients_are_summed_inside_them_first():
    layers = model(4)
    layers = layers._replace(machine=layers.machine._replace(weight=20e6 * np.ones(4)))
    network = topology(2, 4, (5e-6, 1e-4), (1 / 9e9, 1 / 1e9))
    first = plan(layers, 8, 8, network=network, schemes=["ddp"])
    assert first.front[0].sums == TWO_LEVEL
    whole = compile(load("ddp", sizes := Sizes(first.front[0].stages, 8, 8)), sizes, Options())
    costs = stage_costs(layers, tuple(itertools.accumulate(first.front[0].layers)))
    slower = simulate(whole, costs.with_halves, costs.machine.on(network)).end.max()
    assert first.front[0].step_time < 0.8 * slower


def test_a_slow_device_has_fewer_layers():
    layers = model()._replace(times={"F": np.full(8, 1e-3), "B": np.full(8, 2e-3)})
    network = Network(Machine(beta=1e-9).network.levels, (1.0, 0.5))
    first = plan(layers, 2, 8, network=network, schemes=["1f1b"]).front[0]
    assert first.layers in ((5, 3), (6, 2)) and first.step_time < 0.85 * 8 * 4 * 3e-3 / 0.5  # of equal stages


def test_processes_find_the_same_plan(monkeypatch):
    few = {"network": topology(2, 2, (5e-6, 1e-4), (1 / 9e9, 1 / 1e9)), "schemes": ["1f1b", "fsdp"]}
    alone = plan(model(), 4, 8, **few)
    monkeypatch.setattr(plan_module, "SMALL", 0)
    assert plan(model(), 4, 8, **few, processes=2)._replace(program=alone.program) == alone


def test_where_nothing_fits_it_says_the_least_memory_that_would():
    layers = model(4)
    with pytest.raises(UsageError, match="no schedule fits 2 workers and 1e\\+07 bytes") as refusal:
        plan(layers, 2, 4, 1e7, bandwidth=1e9)
    words = re.search(r"the least that would is (\d+) bytes, by (\S+) with (\d+) stages", str(refusal.value))
    least, scheme, stages = int(words[1]), words[2], int(words[3])
    found = plan(layers, 2, 4, least, bandwidth=1e9)
    assert [(each.peak_bytes, each.scheme, each.stages) for each in found.front] == [(least, scheme, stages)]
    assert ("all forwards redone" in str(refusal.value)) == (found.front[0].recomputed > 0)
    with pytest.raises(UsageError, match=f"the least that would is {least} bytes"):
        plan(layers, 2, 4, least - 1, bandwidth=1e9)
    everything = plan(layers, 2, 4, bandwidth=1e9)
    assert least <= min(each.peak_bytes for each in everything.front)
