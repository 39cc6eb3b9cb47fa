"""Every scheme trains as one process does: to rounding, and in canonical mode to the bit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from examples import further
from golden_cases import ALIKE
from run_results import AN_OWNER_WITHOUT_JOBS, DEPTH_FIRST, GPT, MLP, TWO_OWNERS, differences
from torch_schedules import dump

from schedgen.cli.main import main as schedgen

GOLDEN = (
    "1f1b", "1f1b-rr", "1f1b-tensor", "1f1b-tied", "breadth-first", "chimera", "ddp", "depth-first", "dualpipe-v",
    "fsdp", "fsdp-sharded", "fslpp", "gpipe", "hanayo", "interleaved-1f1b", "interleaved-zb", "lpp", "v-half", "v-min",
    "zb-h1", "zb-h2", "zb-v", "zb-v-replicas",
)  # fmt: skip
# Of these, one of each placement, of each way to send weights and of each way to add gradients. Tests of weight shards,
# tensor slices, parameter types and weight versions have others: split backwards, fsdp, gpipe and 1f1b-tensor.
CHOSEN = ("1f1b", "1f1b-rr", "1f1b-tied", "ddp", "fsdp-sharded", "fslpp", "zb-v")
TRIED = (*CHOSEN, *further(*(name for name in GOLDEN if name not in CHOSEN)))
# Schemes that add gradients in another order than one process, each in another way; test_parameter_types.py has the
# last two.
ROUNDED = ("1f1b", "fsdp-sharded", *further("1f1b-tied", "ddp", "fslpp"))
TIED, SMALL = "models_for_tests:gpt_tied", "models_for_graphs:mlp_of_four"
OTHERS = {"1f1b-tied": TIED, "1f1b-tensor": "models_for_tests:gpt_tensor"}  # models of golden schedules, if not GPT

JOINED = """
    edges = [(0, 2), (1, 2), (2, 3), (0, 3)]
    def w(s, b, d):
        return s % 4, s % 4
"""
FAN = """
    edges = [(0, 1), (0, 2), (0, 3), (1, 3), (2, 3)]
    def w(s, b, d):
        return s % 4, s % 4
"""
SEVERAL = """
    edges = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    per_consumer = [0, 1]
    def w(s, b, d):
        return s % 4, (s + d * (b % 2)) % 4
"""
TOWERS = """
    edges = [(0, 3), (1, 2), (2, 3)]
    mode = "strict"
    def w(s, b, d):
        return s % 4, s % 4
    def n(s, b, d, *, microbatches):
        return d * microbatches + b
"""
VEE = """
    def w(s, b, d, *, workers):
        return abs(s - workers + (s < workers)), abs(s - workers + (s < workers))
"""
AN_IDLE_WORKER = """
    def w(s, b, d):
        return b % 2, b % 3
"""

# A scheme or a class of torch's, options, model, and a pattern that shows that the schedule is what the case is called.
# In test_rng.py: forwards apart from their backwards, evicted weights, split backwards that recompute.
COMPILED = {
    "buffers of then, computed again": (
        "1f1b", {"stages": 4, "recompute": "all"}, "models_for_tests:spectral", r'"op": "RECOMPUTE"'
    ),
    "ties and several owners": (
        "ddp", {"graph": {"stages": 4, "tied": [[0, 3]]}, "microbatches": 8}, TIED, r'"buf": "t\.0", "group": 0'
    ),
    "ties and weights that travel": (
        "fsdp", {"graph": {"stages": 8, "tied": [[0, 7]]}, "microbatches": 8}, TIED, r'"buf": "t\.0"'
    ),
    "a DAG with skips in its stages": (JOINED, {"stages": 4}, "models_for_tests:joined_with_skips", r'"g\.0\.0\.3"'),
    "outputs apart": (SEVERAL, {"stages": 4}, "models_for_tests:several", r'"x\.0\.0\.3"'),
    "two owners of four workers": (
        TWO_OWNERS, {"stages": 4, "microbatches": 8}, SMALL, r'"owners": \[\[0, 1\], \[0, 1\]'
    ),
    "an owner that computes nothing and is sent no sum": (
        AN_OWNER_WITHOUT_JOBS, {"stages": 4}, SMALL, r'"owners": \[\[0, 1, 2\], \[0, 1, 2\]'
    ),
    "gradients that are passed on": ("zb-v", {"stages": 8}, "models_for_tests:shifts", r'"BWD_W"'),
    "a loss of the whole minibatch": (TOWERS, {"stages": 4}, "models_for_tests:contrastive", None),
    "replicas of 1f1b": (
        "1f1b", {"stages": 2, "microbatches": 5, "replicas": 2, "recompute": "except-last"}, SMALL, '"replicas": 2'
    ),
    "torch's DualPipeV": ("ScheduleDualPipeV", {}, MLP, None),
    **dict(further(
        ("all but the last microbatch computed again", (
            "gpipe", {"stages": 4, "recompute": "except-last"}, "models_for_graphs:gpt_of_four",
            r'"recompute": \[\[0, 0\], .*\[3, 2\]\]',
        )),
        ("outputs apart, weights that travel", (
            SEVERAL.replace("s % 4, (s + d * (b % 2)) % 4", "s % 2, (s + b) % 4"),
            {"stages": 4, "weight_slots": 1}, "models_for_tests:several", r'"x\.0\.0\.3"',
        )),
        ("a worker without jobs", (AN_IDLE_WORKER, {"stages": 4}, SMALL, r'\[\n   {"op": "NORM", "group": 0}\n  \]')),
        ("replicas of interleaved-1f1b", (
            "interleaved-1f1b", {"stages": 4, "microbatches": 8, "replicas": 2, "interleave": True}, SMALL,
            r'"owners": \[\[0, 1\], \[2, 3\]',
        )),
        ("replicas of a file's scheme", (
            VEE, {"stages": 4, "microbatches": 6, "replicas": 2}, "models_for_graphs:gpt_of_four", '"replicas": 2'
        )),
        ("shards over replicas", ("zb-v", {"stages": 4, "replicas": 2, "shards": 2}, SMALL, r'"shards": 2')),
        ("kernels that depend on gradients, computed again", (
            "1f1b", {"stages": 4, "recompute": "all"}, "models_for_tests:lstm", r'"op": "RECOMPUTE"'
        )),
        ("lpp with 8 stages", ("lpp", {"stages": 8, "groups": 2}, GPT, r'"op": "ALLREDUCE"')),
        ("ties and a split backward", ("zb-v", {"graph": {"stages": 8, "tied": [[0, 7]]}}, TIED, r'"buf": "t\.0"')),
        ("three consumers", (FAN, {"stages": 4}, "models_for_tests:fan", r'"g\.0\.0\.1"')),
    )),
}  # fmt: skip
# Peculiar models, on schemes that send weights, add gradients and sum over owners.
CARE = [("fslpp", "peculiar"), ("lpp", "bf16")]
CARE += further(("fslpp", "strided"), ("lpp", "peculiar"), ("fslpp", "f64"))


def verify(schedule: Path, model: str, text: Path, *more: str) -> list[Any]:
    return [schedule, "--model", model, "--text", text, "--steps", 2, "--clip", 1, "--verify", *more]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where golden runs leave their metrics, and torch its schedule."""
    return tmp_path_factory.mktemp("metrics")


@pytest.fixture(scope="module")
def golden_runs(several, traces, text, folder) -> dict[tuple[str, str], tuple[int, str]]:
    """The results of golden schedules, by name and mode."""
    cases = {
        (name, mode): [
            *verify(traces / f"{name}.json", OTHERS.get(name, GPT), text, *mode.split()),
            *("--metrics", folder / f"{name}{mode}"),
        ]
        for name in TRIED
        for mode in ("", "--canonical")
        if mode or name in ROUNDED
    }
    return dict(zip(cases, several(4, list(cases.values())), strict=True))


@pytest.fixture(scope="module")
def schedules(compiled, folder) -> dict[str, Path]:
    made = {}
    for name, (scheme, options, _, _) in COMPILED.items():
        if scheme.startswith("Schedule"):
            made[name] = compiled(str(dump(scheme, 4, 8, folder)))
            continue
        own = scheme if "\n" not in scheme or "def n" in scheme else scheme + DEPTH_FIRST
        made[name] = compiled(own, **{"workers": 4, "microbatches": 4} | options)
    return made


@pytest.fixture(scope="module")
def canonical_runs(several, schedules, traces, text) -> dict[Any, tuple[int, str]]:
    """The result of every compiled schedule, and of every peculiar model."""
    cases: dict[Any, list[Any]] = {
        name: verify(schedules[name], model, text, "--canonical") for name, (_, _, model, _) in COMPILED.items()
    }
    for trace, model in CARE:
        cases[trace, model] = verify(traces / f"{trace}.json", f"models_for_tests:{model}", text, "--canonical")
    return dict(zip(cases, several(4, list(cases.values())), strict=True))


@pytest.fixture(scope="module")
def two_ranks(compiled) -> Path:
    return compiled("1f1b", stages=4, microbatches=4, workers=2)


def test_the_golden_schedules_are_those_in_traces(traces):
    elsewhere = (*ALIKE, "pipedream", "pipedream-2bw")  # see test_weight_versions
    assert sorted(path.stem for path in traces.glob("*.json")) == sorted((*GOLDEN, *elsewhere))


@pytest.mark.parametrize("name", ROUNDED)
def test_the_gradient_is_that_of_one_process(golden_runs, name):
    code, out = golden_runs[name, ""]
    assert code == 0, out
    assert differences(out)["gradients"] <= 1e-5  # float32 rounds at 6e-8; the default of --tolerance


def test_parameters_of_bf16_may_differ_by_what_their_type_rounds(several, traces, text):
    ((code, out),) = several(4, [verify(traces / "lpp.json", "models_for_tests:bf16", text)])
    assert code == 0 and "verify: passed: the limit is 0.05" in out, out
    assert 1e-5 < differences(out)["gradients"] <= 0.05


@pytest.mark.parametrize("name", TRIED)
def test_in_canonical_mode_every_bit_is_that_of_one_process(golden_runs, name):
    code, out = golden_runs[name, "--canonical"]
    assert differences(out) == {"losses": 0, "gradients": 0, "parameters": 0}
    assert code == 0, out


@pytest.mark.parametrize("name", [name for name in TRIED if name not in OTHERS])
def test_losses_and_norms_are_the_same_under_every_scheme(golden_runs, folder, name):
    """In canonical mode to the bit, with four stages and with eight; else to rounding."""

    def numbers(file: str) -> list[list[float]]:
        rows = [json.loads(line) for line in (folder / file).read_text().splitlines()]
        return [[row[what] for row in rows] for what in ("loss", "grad_norm")]

    assert golden_runs[name, "--canonical"][0] == 0
    assert numbers(f"{name}--canonical") == numbers("1f1b--canonical")
    if name in ROUNDED:
        for numbers_here, reference in zip(numbers(name), numbers("1f1b--canonical"), strict=True):
            assert len(numbers_here) == 2 and numbers_here == pytest.approx(reference, rel=1e-5)


@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_schedule_gives_the_bits_of_one_process(canonical_runs, name):
    code, out = canonical_runs[name]
    assert set(differences(out).values()) == {0}
    assert code == 0, out


@pytest.mark.parametrize(("trace", "model"), CARE)
def test_a_peculiar_model_gets_the_bits_of_one_process(canonical_runs, trace, model):
    code, out = canonical_runs[trace, model]
    assert differences(out) == {"losses": 0, "gradients": 0, "parameters": 0}
    assert code == 0, out


@pytest.mark.parametrize("name", [name for name, case in COMPILED.items() if case[3]])
def test_a_case_is_what_it_is_called(schedules, name):
    assert re.search(COMPILED[name][3], schedules[name].read_text())


def test_with_one_slot_fsdp_fetches_a_stage_again_for_its_backward(compiled):
    schedule = compiled("fsdp", stages=8, microbatches=4, workers=4, weight_slots=1)
    programs = json.loads(schedule.read_text())["programs"]
    fetched = [i["stage"] for i in programs[1] if i["op"] == "FETCH_W"]
    assert len(fetched) > len(set(fetched))


def test_found_orders_of_unequal_costs_give_the_bits_of_one_process(several, text, tmp_path):
    """One recomputes some forwards of some stages, within less memory."""
    costs = tmp_path / "costs.json"
    redone, *_ = files = [tmp_path / f"{name}.json" for name in ("redone", *further("kept"))]
    times = {"F": [2, 1, 1, 3, 1, 1, 2, 1], "I": [2, 1, 1, 3, 1, 1, 2, 1], "W": [1, 1, 1, 2, 1, 1, 1, 1], "alpha": 0.2}
    costs.write_text(json.dumps(times))
    sizes = ["--stages", "8", "--microbatches", "8", "--profile", str(costs), "--budget", "1"]
    limits = (["zb-v", "--recompute"], "3"), *further((["zb-v"], "7"))
    for file, (scheme, limit) in zip(files, limits, strict=True):
        assert schedgen(["search", *scheme, *sizes, "--memory-limit", limit, "-o", str(file)]) == 0
        assert json.loads(file.read_text())["order"]["n"] == "search latency"  # no built-in scheme was as good
    assert 0 < redone.read_text().count('"RECOMPUTE"') < 8 * 8
    for code, out in several(4, [verify(file, GPT, text, "--canonical") for file in files]):
        assert code == 0 and differences(out) == {"losses": 0, "gradients": 0, "parameters": 0}, out


def test_an_order_found_for_tied_stages_gives_the_bits_of_one_process(several, text, tmp_path):
    graph, file = tmp_path / "tied.graph", tmp_path / "found.json"
    graph.write_text('{"stages": 8, "tied": [[0, 7]]}')
    command = ["search", "zb-v", "--graph", str(graph), "--microbatches", "8", "--cost", "F=10,I=12,W=8"]
    assert schedgen([*command, "--memory-limit", "5", "--budget", "1", "-o", str(file)]) == 0
    assert '"n": "search latency"' in file.read_text() and '"buf": "t.0"' in file.read_text()
    ((code, out),) = several(4, [verify(file, TIED, text, "--canonical")])
    assert code == 0 and differences(out) == {"losses": 0, "gradients": 0, "parameters": 0}, out


def test_the_command_itself_verifies(launch, two_ranks, text):
    result = launch(2, *verify(two_ranks, MLP, text, "--canonical"))
    assert result.code == 0, result.err
    assert differences(result.out) == {"losses": 0, "gradients": 0, "parameters": 0}
    assert result.err == ""


def test_verification_can_fail(mistakes, two_ranks, text):
    (result,) = mistakes(2, [verify(two_ranks, "models_for_tests:noisy", text)])
    assert result.code == 1, result.out
    assert "verify: failed" in result.out
    assert max(differences(result.out).values()) > 1e-5
