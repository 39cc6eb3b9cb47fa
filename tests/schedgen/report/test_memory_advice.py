"""stats --memory: every byte of a rank's peak has a name, and each change is what its command compiles."""

import json
import shlex

import numpy as np
import pytest
from compiled import compiled
from examples import further
from golden_cases import EVERY
from processes import ROOT

from schedgen.checker import checked
from schedgen.compiler.compile import compile
from schedgen.report.memory_advice import memory_advice, peak_parts
from schedgen.schemes import load
from schedgen.schemes.scheme import Sizes
from schedgen.simulator.machine import Machine
from schedgen.simulator.network import HostLink, Network
from schedgen.simulator.simulate import simulate

SIZES = Sizes(4, 8, 4)
HOST = {"levels": [{"name": "network", "alpha": 0.001, "beta": 1e-9}], "host": {"alpha": 0.001, "beta": 1e-7}}
COSTS = {
    "F": 1.0, "B": 2.0, "I": 1.1, "W": 0.9, "activation": 1e6, "weight": 4e6, "saved": 6e6, "half": 1e5,
    "owned": 12e6, "workspace": {"F": 5e5, "B": 1e6}, "step": 0.1,
}  # fmt: skip


@pytest.fixture
def files(tmp_path):
    """A profile and a machine file."""
    (tmp_path / "profile.json").write_text(json.dumps(COSTS))
    (tmp_path / "machine.json").write_text(json.dumps(HOST))
    return ["--profile", tmp_path / "profile.json", "--machine", tmp_path / "machine.json"]


def test_the_parts_of_a_small_schedule():
    """1F1B's first rank: weights in the optimizer, 4 saved forwards at the peak, what it receives."""
    program = compiled("1f1b", SIZES)
    machine = Machine(activation=10, weight=100, saved=1000, owned=300, workspace=7)
    sizes = simulate(program, None, machine).sizes
    parts = peak_parts(program, sizes)
    assert parts[0] == [
        ("throughout", "weights and optimizer state", (0,), 1, 300),
        ("throughout", "gradients", (0,), 1, 100),
        ("in places", "received x and g", (0,), 2, 20),
        ("at the peak", "workspace of FWD", (0,), 1, 7),
        ("at the peak", "saved forwards", (0,), 4, 4000),
        ("at the peak", "computed x", (0,), 3, 30),
    ]
    assert [part for part in parts[3] if part.kind == "losses"] == [("throughout", "losses", (3,), 8, 64)]


def random_machine(stages, seed):
    rng = np.random.default_rng(seed)
    names = ("activation", "weight", "saved", "half", "owned", "workspace")
    return Machine(**{name: rng.integers(1, 10**6, stages).astype(float) for name in names})


@pytest.mark.parametrize("name", [*EVERY[::4], *further(*EVERY)])
def test_the_parts_of_every_rank_add_up_to_its_peak(name):
    program = checked(str(ROOT / "traces" / f"{name}.json"))
    run = simulate(program, None, random_machine(program.header.stages, 3))
    parts = peak_parts(program, run.sizes)
    assert [sum(part.bytes for part in each) for each in parts] == run.footprint.peak.tolist()


OWN = {
    "1f1b": ("1f1b", "--stages", 4, "--microbatches", 8, "--recompute", "1.2", "--offload", 0),
    "zb-v": ("zb-v", "--stages", 4, "--microbatches", 8, "--workers", 4, "--replicas", 2, "--interleave"),
    "fsdp": ("fsdp", "--stages", 4, "--microbatches", 8, "--workers", 4, "--weight-slots", 3),
    "sums": ("ddp", "--stages", 4, "--microbatches", 8, "--workers", 4, "--sums", "ring"),
    "greedy": ("lpp", "--stages", 4, "--microbatches", 8, "--groups", 2, "--workers", 4, "--n", "1f1b"),
    "profiled": ("1f1b", "--stages", 4, "--microbatches", 8, "--profile", "PROFILE"),
}


@pytest.mark.parametrize("name", ["1f1b", "sums", "profiled", *further("fsdp", "zb-v", "greedy")])
def test_every_change_is_what_its_command_compiles(run, files, tmp_path, name):
    """Peak and makespan are the simulator's for the file that the command writes; at most a dozen are compiled."""
    own, other = tmp_path / "own.json", tmp_path / "FILE"
    by_stage = json.dumps({**COSTS, "F": [1.0, 1.3, 0.8, 1.1]} if name == "profiled" else COSTS)
    files[1].write_text(by_stage)
    assert run("compile", *(files[1] if word == "PROFILE" else word for word in OWN[name]), "-o", own).code == 0
    result = run("stats", "--memory", own, *files, "--json")
    assert (result.code, result.err) == (0, "")
    advice = json.loads(result.out)
    simulated = json.loads(run("simulate", own, *files, "--json").out)
    assert (advice["peak_bytes"], advice["makespan"]) == (simulated["peak_bytes"], simulated["makespan"])
    assert 4 <= len(advice["changes"]) < 12
    for change in advice["changes"]:
        words = shlex.split(change["command"].replace("PROFILE", str(files[1])).replace("FILE", str(other)))
        assert run(*words[1:])[::2] == (0, ""), change
        simulated = json.loads(run("simulate", other, *files, "--json").out)
        assert (change["peak_bytes"], change["makespan"]) == (simulated["peak_bytes"], simulated["makespan"]), change
    peaks = [change["peak_bytes"] for change in advice["changes"]]
    assert peaks == sorted(peaks) and peaks[0] < advice["peak_bytes"]


def kinds(changes):
    return {change.split()[0] for change in changes}


def test_each_kind_of_change_is_tried_or_said_not_to_be():
    network = Network(Machine().network.levels, host=HostLink(0.0, 1e-7))
    machine = Machine(activation=1e6, weight=4e6, saved=6e6, owned=12e6)
    program = compiled("fsdp", SIZES)
    advice = memory_advice(program, {"F": 1, "B": 2}, machine.on(network))
    tried = {"--recompute", "--offload", "--evict", "--offload-optimizer", "--weight-slots", "--memory-limit"}
    every = kinds(change.change for change in advice.changes) | kinds(advice.not_tried)
    assert every == tried | {"--shards", "1f1b", "v-min", "v-half", "zb-h1"}
    assert "split" in advice.not_tried["zb-h1"]
    slots = next(change for change in advice.changes if change.change == "--weight-slots 1")
    again = simulate(compiled("fsdp", SIZES, weight_slots=1), {"F": 1, "B": 2}, machine)
    assert slots.peak_bytes == again.footprint.peak.max() < advice.peak_bytes
    alone = memory_advice(program, {"F": 1, "B": 2}, machine)
    assert "no machine file" in alone.not_tried["--offload"]


@pytest.mark.parametrize(("source", "why"), [("file", "no built-in scheme"), ("edited", "searched for, edited")])
def test_what_cannot_be_compiled_again_is_said_and_other_schemes_are_tried(source, why):
    scheme = load("1f1b", SIZES)
    scheme = scheme._replace(name="mine") if source == "file" else scheme._replace(n=load("gpipe", SIZES).n)
    advice = memory_advice(compile(scheme, SIZES), {"F": 1, "I": 1, "W": 1}, Machine(saved=5))
    ((named, reason),) = [(key, words) for key, words in advice.not_tried.items() if key.startswith("--")]
    assert why in reason and "--recompute" in named and "--offload" in named
    assert {"zb-h1", "fsdp"} <= {change.change for change in advice.changes}
