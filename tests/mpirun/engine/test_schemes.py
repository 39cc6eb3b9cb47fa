"""Every scheme trains as one process does: to rounding, and in canonical mode to the bit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from examples import further
from golden_cases import EVERY
from run_results import AN_OWNER_WITHOUT_JOBS, DEPTH_FIRST, GPT, MLP, TWO_OWNERS, differences, metrics
from torch_schedules import dump

from schedgen.cli.main import main as schedgen

# Of the golden schedules, one of each placement, of each way to send weights and of each way to add gradients.
CHOSEN = ("1f1b", "1f1b-rr", "ddp", "fsdp-sharded", "fslpp", "zb-v")
LATE = ("pipedream", "pipedream-2bw")  # their updates; below
TRIED = (*CHOSEN, *further(*(name for name in EVERY if name not in (*CHOSEN, *LATE))))
ROUNDED = ("1f1b", "fsdp-sharded", *further("1f1b-tied", "ddp", "fslpp"))  # each adds gradients in another way
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
# Shards of stage 0 alternate between two workers, all shards of stage 1 are on one worker, those of the rest anywhere.
SHARDS_BY_HAND = """
    import numpy as np

    def w(s, b, d, k):
        return np.select([s == 0, s == 1], [k % 2, 3], (s + 2 * k) % 4), b % 4
"""
# The first stage of slice 0 is on the last rank, and ranks are in another order in each stage.
SLICES_ELSEWHERE = """
    def w(s, b, d, t):
        worker = (3 - 2 * s - t + 3 * s * t) % 4
        return worker, worker
"""
SLICED_DAG = """
    edges = [(0, 1), (0, 2), (1, 3), (2, 3)]

    def w(s, b, d):
        return s % 2, s % 2
"""

FOUR_TYPES, SKEWED = "models_for_tests:four_types", "models_for_tests:peculiar"
BLOCK, PAIR = "models_for_tests:halves_of_a_block", "models_for_tests:pair"
DROPPING, SMALL_GPT = "models_for_tests:dropping", "models_for_graphs:gpt_of_four"
MOMENTUM = ("--optimizer", "sgd", "--momentum", 0.9)
SLICED = {"stages": 4, "replicated": [0]}  # a graph


class Case(NamedTuple):
    """A schedule of 4 workers, by default with 4 microbatches, and what is trained by it."""

    scheme: str  # of schedgen's or torch's, or the source of a file
    options: dict[str, Any]  # of schedgen compile
    model: str
    shows: str | None = None  # a pattern that shows that the schedule is what the case is called
    more: tuple[object, ...] = ()  # options of mpirun


CASES = {
    "buffers of then, computed again": Case(
        "1f1b", {"stages": 4, "recompute": "all"}, "models_for_tests:spectral", r'"op": "RECOMPUTE"'
    ),
    "ties and several owners": Case(
        "ddp", {"graph": {"stages": 4, "tied": [[0, 3]]}, "microbatches": 8}, TIED, r'"buf": "t\.0", "group": 0'
    ),
    "ties and weights that travel": Case(
        "fsdp", {"graph": {"stages": 8, "tied": [[0, 7]]}, "microbatches": 8}, TIED, r'"buf": "t\.0"'
    ),
    "a DAG with skips": Case(JOINED, {"stages": 4}, "models_for_tests:joined_with_skips", r'"g\.0\.0\.3"'),
    "outputs apart": Case(SEVERAL, {"stages": 4}, "models_for_tests:several", r'"x\.0\.0\.3"'),
    "an owner that computes nothing and is sent no sum": Case(
        AN_OWNER_WITHOUT_JOBS, {"stages": 4}, SMALL, r'"owners": \[\[0, 1, 2\], \[0, 1, 2\]'
    ),
    "gradients that are passed on": Case("zb-v", {"stages": 8}, "models_for_tests:shifts", r'"BWD_W"'),
    "a loss of the whole minibatch": Case(TOWERS, {"stages": 4}, "models_for_tests:contrastive"),
    "replicas of 1f1b": Case(
        "1f1b", {"stages": 2, "microbatches": 5, "replicas": 2, "recompute": "except-last"}, SMALL, '"replicas": 2'
    ),
    "torch's DualPipeV": Case("ScheduleDualPipeV", {}, MLP),
    "running statistics of several ranks": Case("ddp", {"stages": 4, "microbatches": 8}, "models_for_tests:normed"),
    # Parameters of four types in every stage
    "types whose gradients are passed on": Case(
        "fslpp", {"stages": 4, "groups": 2}, FOUR_TYPES, more=(*MOMENTUM, "--clip", 0.1)
    ),
    "types of tied stages": Case("1f1b", {"graph": {"stages": 4, "tied": [[0, 3]]}}, f"{FOUR_TYPES}_tied"),
    "types with versions": Case("pipedream", {"stages": 2, "replicas": "2,2", "microbatches": 8}, FOUR_TYPES),
    "types in shards": Case("fsdp", {"stages": 2, "shards": 4}, FOUR_TYPES, more=MOMENTUM),
    "types in shards that do not fit": Case("zb-h1", {"stages": 4, "shards": 3}, FOUR_TYPES),
    "types in shards of which some are empty": Case("fsdp", {"stages": 8, "shards": 40}, FOUR_TYPES),
    # Weight shards
    "shards of some stages": Case(
        "fsdp", {"stages": 4, "shards": "4,1,2,1", "recompute": "all", "microbatches": 8}, SKEWED
    ),
    "a w of k": Case(SHARDS_BY_HAND, {"stages": 4, "shards": 4}, SMALL),
    # Tensor slices
    "4 slices": Case("1f1b", {"stages": 1, "tensor": 4, "graph": SLICED}, BLOCK),
    "slices with a split backward": Case(
        "zb-v", {"stages": 4, "tensor": 2, "graph": {"stages": 8, "replicated": [0]}, "microbatches": 2},
        "models_for_tests:gpt_tensor",
    ),
    "slices whose weights travel": Case(
        "fslpp", {"groups": 2, "tensor": 2, "graph": SLICED, "recompute": "all"}, BLOCK
    ),
    "slices where w says": Case(SLICES_ELSEWHERE, {"stages": 2, "tensor": 2}, PAIR),
    "a sliced DAG with dropout": Case(SLICED_DAG, {"tensor": 2, "graph": SLICED}, "models_for_tests:slices_of_a_dag"),
    # Late updates, which the one process makes, too
    "late updates of three replicas and one": Case(
        "pipedream", {"stages": 2, "replicas": "3,1", "microbatches": 8}, SMALL_GPT, more=MOMENTUM
    ),
    "late updates, computed again": Case("pipedream", {"stages": 4, "microbatches": 8, "recompute": "all"}, DROPPING),
    "two buffers, split": Case(
        "zb-h1", {"stages": 4, "microbatches": 12, "updates": "2bw", "recompute": "1,2"}, DROPPING
    ),
    "two buffers of weights, one of a mean": Case(
        "pipedream-2bw", {"stages": 4, "microbatches": 18, "group": 5}, "models_for_tests:normed"
    ),
    **dict(further(
        ("all but the last microbatch computed again", Case(
            "gpipe", {"stages": 4, "recompute": "except-last"}, SMALL_GPT,
            r'"recompute": \[\[0, 0\], .*\[3, 2\]\]',
        )),
        ("outputs apart, weights that travel", Case(
            SEVERAL.replace("s % 4, (s + d * (b % 2)) % 4", "s % 2, (s + b) % 4"),
            {"stages": 4, "weight_slots": 1}, "models_for_tests:several", r'"x\.0\.0\.3"',
        )),
        ("an idle worker", Case(AN_IDLE_WORKER, {"stages": 4}, SMALL, r'\[\n   {"op": "NORM", "group": 0}\n  \]')),
        ("replicas of interleaved-1f1b", Case(
            "interleaved-1f1b", {"stages": 4, "microbatches": 8, "replicas": 2, "interleave": True}, SMALL,
            r'"owners": \[\[0, 1\], \[2, 3\]',
        )),
        ("replicas of a file's scheme", Case(
            VEE, {"stages": 4, "microbatches": 6, "replicas": 2}, SMALL_GPT, '"replicas": 2'
        )),
        ("shards over replicas", Case("zb-v", {"stages": 4, "replicas": 2, "shards": 2}, SMALL, r'"shards": 2')),
        ("kernels that depend on gradients, computed again", Case(
            "1f1b", {"stages": 4, "recompute": "all"}, "models_for_tests:lstm", r'"op": "RECOMPUTE"'
        )),
        ("lpp with 8 stages", Case("lpp", {"stages": 8, "groups": 2}, GPT, r'"op": "ALLREDUCE"')),
        ("ties and a split backward", Case("zb-v", {"graph": {"stages": 8, "tied": [[0, 7]]}}, TIED, r'"buf": "t\.0"')),
        ("two owners of four workers", Case(
            TWO_OWNERS, {"stages": 4, "microbatches": 8}, SMALL, r'"owners": \[\[0, 1\], \[0, 1\]'
        )),
        ("odd parameters", Case("fslpp", {"stages": 4, "groups": 2, "microbatches": 8}, SKEWED)),
        ("weights of bf16", Case("lpp", {"stages": 4, "groups": 2, "microbatches": 8}, "models_for_tests:bf16")),
        ("late updates, warm-up and cosine", Case(
            "pipedream", {"stages": 3, "replicas": "2,1,1", "microbatches": 8}, SMALL_GPT,
            more=("--warmup", 1, "--lr-schedule", "cosine", "--steps", 3),
        )),
        ("strides", Case("fslpp", {"stages": 4, "groups": 2}, "models_for_tests:strided")),
        ("weights of f64", Case("fslpp", {"stages": 4, "groups": 2}, "models_for_tests:f64")),
        ("types in a row", Case("1f1b", {"stages": 4}, FOUR_TYPES)),
        ("types that travel", Case("fsdp", {"stages": 4, "microbatches": 8}, FOUR_TYPES)),
        ("types whose owners compute alike", Case("ddp", {"stages": 4, "microbatches": 8}, FOUR_TYPES)),
        ("types in shards that are passed on", Case(
            "fslpp", {"stages": 4, "groups": 2, "shards": 3, "fan_out": 1, "weight_slots": 1, "microbatches": 8},
            FOUR_TYPES,
        )),
        ("2 slices and 2 pipeline stages", Case("1f1b", {"stages": 2, "tensor": 2, "graph": SLICED}, BLOCK)),
        ("2 slices and 2 replicas", Case("ddp", {"stages": 1, "tensor": 2, "graph": SLICED}, BLOCK)),
        ("slices with sums of bf16", Case(
            "1f1b", {"stages": 1, "tensor": 4, "graph": {"stages": 2}}, "models_for_tests:pair_bf16"
        )),
        ("late updates of which the last has one gradient", Case(
            "pipedream", {"stages": 2, "replicas": "2,2", "updates": "vertical", "microbatches": 7}, SMALL_GPT
        )),
        ("late updates of one and three replicas", Case(
            "pipedream", {"stages": 2, "replicas": "1,3", "updates": "vertical", "microbatches": 8}, SMALL_GPT
        )),
        ("two buffers, replicas", Case(
            "pipedream-2bw", {"stages": 2, "replicas": "2,2", "microbatches": 14}, DROPPING
        )),
        ("late updates of a backward that computes again", Case(
            "pipedream", {"stages": 4, "microbatches": 8}, "models_for_tests:checkpointed"
        )),
        ("three consumers", Case(FAN, {"stages": 4}, "models_for_tests:fan", r'"g\.0\.0\.1"')),
    )),
}  # fmt: skip
# These are compared without canonical mode, too, within the default of --tolerance, slices with the whole model. Sums
# of bf16 in another order differ by what it rounds.
LIMITS = {"types whose gradients are passed on": 0.05, "4 slices": 1e-5, "slices whose weights travel": 1e-5}
LIMITS |= further(("2 slices and 2 replicas", 1e-5), ("types whose owners compute alike", 0.05))


def verify(schedule: Path, model: str, text: Path, *more: object) -> list[Any]:
    return [schedule, "--model", model, "--text", text, "--steps", 2, "--verify", *more]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where golden runs leave their metrics, and torch its schedule."""
    return tmp_path_factory.mktemp("metrics")


@pytest.fixture(scope="module")
def golden_runs(several, traces, text, folder) -> dict[tuple[str, str], tuple[int, str]]:
    """The results of golden schedules, by name and mode."""
    cases = {
        (name, mode): [
            *verify(traces / f"{name}.json", OTHERS.get(name, GPT), text, "--clip", 1, *mode.split()),
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
    for name, (scheme, options, *_) in CASES.items():
        if scheme.startswith("Schedule"):
            made[name] = compiled(str(dump(scheme, 4, 8, folder)))
            continue
        own = scheme if "\n" not in scheme or "def n" in scheme else scheme + DEPTH_FIRST
        made[name] = compiled(own, **{"workers": 4, "microbatches": 4} | options)
    return made


@pytest.fixture(scope="module")
def runs(several, schedules, text) -> dict[tuple[str, str], tuple[int, str]]:
    """The result of every case, by name and mode."""
    arguments = {}
    for name, (scheme, options, model, _, more) in CASES.items():
        clip = [] if "updates" in options or scheme.startswith("pipedream") else ["--clip", 1]
        run = verify(schedules[name], model, text, *clip, *more)
        arguments |= {(name, "canonical"): [*run, "--canonical"]} | ({(name, ""): run} if name in LIMITS else {})
    return dict(zip(arguments, several(4, list(arguments.values())), strict=True))


@pytest.mark.parametrize("name", ROUNDED)
def test_the_gradient_is_that_of_one_process(golden_runs, name):
    code, out = golden_runs[name, ""]
    assert code == 0, out
    assert differences(out)["gradients"] <= 1e-5  # float32 rounds at 6e-8; the default of --tolerance


@pytest.mark.parametrize("name", TRIED)
def test_in_canonical_mode_every_bit_is_that_of_one_process(golden_runs, name):
    code, out = golden_runs[name, "--canonical"]
    assert differences(out) == {"losses": 0, "gradients": 0, "parameters": 0}
    assert code == 0, out


@pytest.mark.parametrize("name", [name for name in TRIED if name not in OTHERS])
def test_losses_and_norms_are_the_same_under_every_scheme(golden_runs, folder, name):
    """In canonical mode to the bit, with four stages and with eight; else to rounding."""

    def numbers(file: str) -> list[tuple[float, ...]]:
        return metrics(folder / file, "loss", "grad_norm")

    assert golden_runs[name, "--canonical"][0] == 0
    assert numbers(f"{name}--canonical") == numbers("1f1b--canonical")
    for here, reference in zip(numbers(name) if name in ROUNDED else (), numbers("1f1b--canonical"), strict=False):
        assert here == pytest.approx(reference, rel=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_every_case_gives_the_bits_of_one_process(runs, name):
    code, out = runs[name, "canonical"]
    assert set(differences(out).values()) == {0}
    assert code == 0 and "verify: passed: every bit of " in out, out
    assert ("buffers" in differences(out)) == (CASES[name].model.partition(":")[2] in ("normed", "spectral"))


@pytest.mark.parametrize("name", LIMITS)
def test_without_canonical_mode_a_case_differs_by_what_is_rounded(runs, name):
    code, out = runs[name, ""]
    assert code == 0 and f"verify: passed: the limit is {LIMITS[name]}" in out, out
    assert LIMITS[name] < 0.05 or 1e-5 < differences(out)["gradients"] <= 0.05


def test_loss_and_norm_do_not_depend_on_the_number_of_slices(runs):
    sliced = [name for name in LIMITS if "slices" in name]
    printed = {name: re.findall(r"loss (\S+)  grad (\S+)", runs[name, ""][1]) for name in sliced}
    assert len({str(steps) for steps in printed.values()}) == 1 and len(printed["4 slices"]) == 2, printed


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.shows])
def test_a_case_is_what_it_is_called(schedules, name):
    assert re.search(CASES[name].shows, schedules[name].read_text())


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
    for code, out in several(4, [verify(file, GPT, text, "--clip", 1, "--canonical") for file in files]):
        assert code == 0 and differences(out) == {"losses": 0, "gradients": 0, "parameters": 0}, out


def test_an_order_found_for_tied_stages_gives_the_bits_of_one_process(several, text, tmp_path):
    graph, file = tmp_path / "tied.graph", tmp_path / "found.json"
    graph.write_text('{"stages": 8, "tied": [[0, 7]]}')
    command = ["search", "zb-v", "--graph", str(graph), "--microbatches", "8", "--cost", "F=10,I=12,W=8"]
    assert schedgen([*command, "--memory-limit", "5", "--budget", "1", "-o", str(file)]) == 0
    assert '"n": "search latency"' in file.read_text() and '"buf": "t.0"' in file.read_text()
    ((code, out),) = several(4, [verify(file, TIED, text, "--clip", 1, "--canonical")])
    assert code == 0 and differences(out) == {"losses": 0, "gradients": 0, "parameters": 0}, out


@pytest.fixture(scope="module")
def two_ranks(compiled) -> Path:
    return compiled("1f1b", stages=4, microbatches=4, workers=2)


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
