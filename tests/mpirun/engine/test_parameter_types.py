"""Stages with parameters of several types train as one process does, to the bit, and resume under another schedule."""

from __future__ import annotations

import pytest
import torch
from examples import further
from run_results import differences, same, weights

MODEL, TIED = "models_for_tests:four_types", "models_for_tests:four_types_tied"
# Scheme, options, model, options of mpirun. Where every rank owns all, or fetches all, each has two microbatches.
CASES = {
    "stages in a row": ("1f1b", {"stages": 4}, MODEL, []),
    "forwards first": ("gpipe", {"stages": 4}, MODEL, []),
    "weights that travel": ("fsdp", {"stages": 4, "microbatches": 8}, MODEL, []),
    "gradients that are passed on": (
        "fslpp",
        {"stages": 4, "groups": 2},
        MODEL,
        ["--optimizer", "sgd", "--momentum", 0.9],
    ),
    "owners that compute alike": ("ddp", {"stages": 4, "microbatches": 8}, MODEL, []),
    "tied stages": ("1f1b", {"graph": {"stages": 4, "tied": [[0, 3]]}}, TIED, []),
    "versions": ("pipedream", {"stages": 2, "replicas": "2,2", "microbatches": 8}, MODEL, []),
    "shards of weights": ("fsdp", {"stages": 2, "shards": 4}, MODEL, []),
    "shards that do not fit": ("zb-h1", {"stages": 4, "shards": 3}, MODEL, []),
    "shards passed on": (
        "fslpp",
        {"stages": 4, "groups": 2, "shards": 3, "fan_out": 1, "weight_slots": 1, "microbatches": 8},
        MODEL,
        [],
    ),
    "some shards are empty": ("fsdp", {"stages": 8, "shards": 40}, MODEL, []),
}
LATER = ("weights that travel", "owners that compute alike", "shards passed on")
TRIED = (*(name for name in CASES if name not in LATER), *further(*LATER))
ROUNDED = ("gradients that are passed on", *further("owners that compute alike", "shards passed on"))
STEPS = 2


@pytest.fixture(scope="module")
def schedules(compiled):
    return {
        name: compiled(scheme, **{"workers": 4, "microbatches": 4} | options)
        for name, (scheme, options, *_) in CASES.items()
    }


@pytest.fixture(scope="module")
def verified(several, schedules, text):
    """The result of every case in canonical mode, and of some without it."""
    runs = {}
    for name in TRIED:
        scheme, _, model, more = CASES[name]
        clip = [] if scheme == "pipedream" else ["--clip", 0.1]
        run = [schedules[name], "--model", model, "--text", text, "--steps", 2, "--verify", *clip, *more]
        runs[name, "canonical"] = [*run, "--canonical"]
        if name in ROUNDED:
            runs[name, "rounded"] = run
    return dict(zip(runs, several(4, list(runs.values())), strict=True))


@pytest.mark.parametrize("name", TRIED)
def test_every_bit_is_that_of_one_process(verified, name):
    code, out = verified[name, "canonical"]
    assert differences(out) == {"losses": 0, "gradients": 0, "parameters": 0}
    assert code == 0 and "verify: passed: every bit of " in out, out


@pytest.mark.parametrize("name", ROUNDED)
def test_sums_in_another_order_differ_by_what_bf16_rounds(verified, name):
    code, out = verified[name, "rounded"]
    assert code == 0 and "verify: passed: the limit is 0.05" in out, out
    assert 1e-5 < differences(out)["gradients"] <= 0.05


def test_a_run_goes_on_with_the_same_bits_under_any_schedule(several, compiled, text, tmp_path):
    others = ("stages in a row", "some shards are empty")
    cases = {name: CASES[name] for name in (*others, "shards of weights")}
    sizes = {"workers": 4, "microbatches": 4}
    schedules = {name: compiled(scheme, **options | sizes) for name, (scheme, options, *_) in cases.items()}

    def run(name: str, steps: int, *more: object) -> list[object]:
        options = ["--lr-schedule", "constant", "--canonical", "--clip", 0.1]
        return [schedules[name], "--model", MODEL, "--text", text, "--steps", steps, *options, *more]

    runs = [run("stages in a row", STEPS, "--save", tmp_path / "whole")]
    runs.append(run("shards of weights", STEPS // 2, "--save", tmp_path / "half"))
    runs += [run(name, STEPS, "--resume", tmp_path / "half", "--save", tmp_path / name) for name in others]
    assert [code for code, _ in several(4, runs)] == [0] * len(runs)

    def last(name: str) -> dict[str, torch.Tensor]:
        """All entries but those of parameters without elements, which are in no weight shard."""
        found = weights(tmp_path / name / f"step-{STEPS:08d}")
        return {entry: value for entry, value in found.items() if ".nothing." not in entry}

    whole = last("whole")
    assert {value.dtype for value in whole.values()} == {torch.float32, torch.bfloat16, torch.float64, torch.complex64}
    for name in others:
        assert same(last(name), whole), name
