"""The options of a training do what torch's own optimizers, schedulers and clipping do.

Each run records every gradient; the tests repeat the steps with the recorded gradients.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import further
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from mpirun.cli.optimizer import rate_of
from mpirun.cli.options import TrainOptions
from mpirun.examples import mlp
from mpirun.model.build_stage import build_stage
from mpirun.verify.record import Record

MLP, DROPPING = "mpirun.examples.mlp:tiny", "models_for_tests:dropping"
LR, STEPS, WARMUP = 0.01, 4, 2
CLIP = 0.1  # less than the norm of any step
FOUR, FSDP, DDP = "4 microbatches", "fsdp", "ddp"
PLAIN_SGD = ["--optimizer", "sgd", "--weight-decay", 0]
RUNS = {  # schedule, options
    "plain": (FOUR, ["--steps", 3]),
    "clipped fsdp, canonical": (FSDP, ["--steps", 2, "--clip", CLIP, "--canonical"]),
    "clipped": (FOUR, [*PLAIN_SGD, "--steps", 3, "--clip", CLIP, "--lr", 1]),
    "cosine": (FOUR, [*PLAIN_SGD, "--steps", STEPS, "--lr-schedule", "cosine", "--lr", LR]),
    "bf16, fsdp": (FSDP, ["--steps", 3, "--autocast", "bf16", "--canonical"]),
    "bf16, ddp": (DDP, ["--steps", 3, "--autocast", "bf16", "--canonical"]),
}
RUNS |= dict(
    further(
        ("clipped ddp, canonical", (DDP, ["--steps", 3, "--clip", CLIP, "--canonical"])),
        ("bf16", (FOUR, ["--steps", 3, "--autocast", "bf16", "--canonical"])),
    )
)
CANONICAL = [name for name, (_, options) in RUNS.items() if "--canonical" in options]


@pytest.fixture(scope="module")
def schedules(compiled) -> dict[str, Path]:
    return {
        FOUR: compiled("1f1b", stages=4, microbatches=4, workers=2),
        FSDP: compiled("fsdp", stages=4, microbatches=4, workers=2),
        DDP: compiled("ddp", stages=4, microbatches=4, workers=2),
    }


@pytest.fixture(scope="module")
def runs(inside, schedules, text, tmp_path_factory):
    """Every run by name, and the folder of records and metrics; all in one launch."""
    folder = tmp_path_factory.mktemp("records")

    def run(name: str, schedule: str, options: list[Any]) -> dict[str, Any]:
        common = ["--model", MLP, "--text", text, "--verify", "--threads", 1, "--metrics", folder / f"{name}.jsonl"]
        return {"arguments": [schedules[schedule], *common, *options], "record": str(folder / f"{name}.pt")}

    seen = inside(2, [run(name, *one) for name, one in RUNS.items()])
    return dict(zip(RUNS, seen, strict=True)), folder


@pytest.fixture(scope="module")
def records(runs) -> dict[str, Record]:
    seen, folder = runs
    assert all(one.code == 0 for one in seen.values())
    return {name: Record(**torch.load(folder / f"{name}.pt")) for name in RUNS}


def metrics(runs, name: str, what: str) -> list[float]:
    return [json.loads(line)[what] for line in (runs[1] / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_that_of_one_process(runs, name):
    seen = runs[0][name]
    assert seen.code == 0, seen.out
    if name in CANONICAL:
        assert seen.differences == {"losses": 0, "gradients": 0, "parameters": 0}


def test_tokens_of_all_microbatches_count(runs):
    """A microbatch of mlp has 64 samples."""
    assert metrics(runs, "plain", "tokens") == [4 * 64] * 3


# The learning rate

FLAT: Callable[[Optimizer], LRScheduler] = lambda optimizer: ConstantLR(optimizer, factor=1)  # noqa: E731


def warm(optimizer: Optimizer, then: Callable[[Optimizer], LRScheduler]) -> LRScheduler:
    rising = LinearLR(optimizer, start_factor=1 / WARMUP, total_iters=WARMUP - 1)
    return SequentialLR(optimizer, [rising, then(optimizer)], milestones=[WARMUP])


TORCHS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "plain": FLAT,
    "linear": lambda optimizer: LinearLR(optimizer, start_factor=1, end_factor=0, total_iters=STEPS),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, STEPS),
    "warm-up": lambda optimizer: warm(optimizer, FLAT),
    "warm-up and cosine": lambda optimizer: warm(optimizer, lambda one: CosineAnnealingLR(one, STEPS - WARMUP)),
}


def apart(ours: dict[Any, Tensor], theirs: dict[Any, Tensor]) -> float:
    """The largest difference of an element between two sets of parameters."""
    assert set(ours) == set(theirs)
    return max(float((ours[key] - theirs[key]).abs().max()) for key in ours)


def rate_by(schedule: str, warmup: int, steps: int) -> Callable[[int], float]:
    options = TrainOptions(model="", file="", lr=LR, lr_schedule=schedule, warmup=warmup, steps=steps)
    return partial(rate_of, options=options)


@pytest.mark.parametrize(
    ("schedule", "warmup", "name"),
    [
        ("constant", 0, "plain"),
        ("linear", 0, "linear"),
        ("cosine", 0, "cosine"),
        ("constant", WARMUP, "warm-up"),
        ("cosine", WARMUP, "warm-up and cosine"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
def test_the_rate_is_that_of_torchs_scheduler(schedule, warmup, name):
    rate = rate_by(schedule, warmup, STEPS)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], LR)
    scheduler = TORCHS[name](optimizer)
    for step in range(STEPS):
        assert rate(step) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        scheduler.step()


# Clipping


def test_clipping_and_rates_are_torchs(runs, records):
    """SGD without momentum takes the rate times the clipped gradient off the parameters."""
    rates = [rate_by("cosine", 0, STEPS)(step) for step in range(STEPS)]  # torch's: see above
    for name, clip, lrs in (("clipped", CLIP, [1.0] * 3), ("cosine", math.inf, rates)):
        model, norms = mlp.tiny(4), []
        parameters = {(s, name): p for s in range(4) for name, p in build_stage(model, s, 0).named_parameters()}
        for lr, gradients in zip(lrs, records[name].gradients, strict=True):
            for key, parameter in parameters.items():
                parameter.grad = gradients[key].clone()
            norms.append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), clip)))
            with torch.no_grad():
                for parameter in parameters.values():
                    parameter -= lr * parameter.grad
        assert min(norms) > 2 * CLIP
        assert metrics(runs, name, "grad_norm") == pytest.approx(norms, rel=1e-6)
        assert apart(records[name].parameters, {key: p.detach() for key, p in parameters.items()}) < 1e-6


# Mixed precision


@pytest.mark.parametrize("name", [*further("bf16"), "bf16, fsdp", "bf16, ddp"])
def test_mixed_precision_changes_losses_a_little(runs, records, name):
    plain, mixed = metrics(runs, "plain", "loss"), metrics(runs, name, "loss")
    assert all(a != b and abs(a - b) < 0.02 * a for a, b in zip(plain, mixed, strict=True))
    assert {value.dtype for value in records[name].parameters.values()} == {torch.float32}


def test_mixed_precision_is_the_same_under_every_scheme(runs):
    names = ("bf16, ddp", *further("bf16"))
    assert all(metrics(runs, "bf16, fsdp", "loss") == metrics(runs, name, "loss") for name in names)
