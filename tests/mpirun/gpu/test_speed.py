"""How close a step on GPUs comes to the time of its kernels, and the delays in between: figures go into the table."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest

DELAYS = ("programs/gpu_delays.py",)
STAGES, MICROBATCHES = 2, 8
Note = Callable[[str, object], None]


def delays(out: str) -> dict[str, list[float]]:
    """What all ranks have measured, in microseconds, ascending."""
    by_rank = [json.loads(line) for line in re.findall(r"^delays: (.*)$", out, re.M)]
    assert len(by_rank) == STAGES, out
    return {what: sorted(delay for rank in by_rank for delay in rank[what]) for what in by_rank[0]}


def at(share: float, ascending: list[float]) -> float:
    """The value that a fraction `share` of the numbers is below."""
    return ascending[int(share * len(ascending))]


@pytest.mark.parametrize("ms", [2, 10, 40])
@pytest.mark.parametrize("order", [(), ("--stream-words",)], ids=["events", "words"])
def test_a_step_of_jobs_of_some_ms_is_its_kernels(
    passes: Any, two_ranks: Any, side_by_side: Any, tmp_path: Any, order: Any, ms: int, record_property: Note
) -> None:
    """1F1B on 2 ranks takes (microbatches + 1) forwards and backwards: 95 % of a step of long jobs."""
    model = ["--model", "models_for_gpus:sleeping", "--device", "cuda", *order]
    passes(
        *model, "--steps", 12, "--metrics", tmp_path / "steps",
        schedule=two_ranks, ranks=STAGES, env={**side_by_side, "JOB_MS": str(ms)},
    )  # fmt: skip
    steps = [json.loads(line)["seconds"] for line in (tmp_path / "steps").read_text().splitlines()]
    share = 2e-3 * ms * (MICROBATCHES + STAGES - 1) / median(steps[4:])
    record_property("share", f"{share:.3f}")
    assert share >= 0.95 or ms < 40


def test_transfers_begin_when_kernels_end_and_kernels_when_messages_come(
    passes: Any, two_ranks: Any, side_by_side: Any, record_property: Note
) -> None:
    """Less than 100 us from an event to its transfer, and less than 50 us from a message to the first kernel."""
    model = ["--model", "models_for_gpus:sleeping", "--device", "cuda"]
    env = {**side_by_side, "JOB_MS": "10"}
    found = delays(passes(*model, "--steps", 12, schedule=two_ranks, ranks=STAGES, env=env, program=DELAYS))
    for what, limit in {"ready": 100, "begin": 50}.items():
        record_property(f"{what}, us", f"{median(found[what]):.0f} (95 %: {at(0.95, found[what]):.0f})")
        assert median(found[what]) < limit


def test_a_stage_of_one_compiled_module_sends_during_its_jobs(
    passes: Any, two_ranks: Any, side_by_side: Any, record_property: Note
) -> None:
    """No hook of a layer is called in it: sends begin within 1 ms all the same."""
    model = ["--model", "models_for_gpus:compiled", "--device", "cuda", "--verify"]
    model += ["--lr", "1e-6"]  # it is wide: with more its losses explode, and differences with them
    found = delays(
        passes(*model, "--steps", 6, schedule=two_ranks, ranks=STAGES, env=side_by_side, program=DELAYS, limit=600)
    )
    record_property("ready, us", f"95 %: {at(0.95, found['ready']):.0f}")
    assert at(0.95, found["ready"]) < 1000


def test_graphs_make_steps_of_small_kernels_faster(
    passes: Any, two_ranks: Any, side_by_side: Any, tmp_path: Any, record_property: Note
) -> None:
    """The median of replayed steps is less than that of steps of launched kernels."""
    model = ["--model", "mpirun.examples.gpt:tiny", "--device", "cuda", "--steps", 16]
    seconds = {}
    for how in ((), ("--graphs",)):
        file = tmp_path / f"steps{len(how)}"
        passes(*model, *how, "--metrics", file, schedule=two_ranks, ranks=STAGES, env=side_by_side)
        steps = [json.loads(line)["seconds"] for line in file.read_text().splitlines()]
        seconds[bool(how)] = median(steps[4:])
    record_property("launched, replayed, ms", f"{1e3 * seconds[False]:.1f}, {1e3 * seconds[True]:.1f}")
    assert seconds[True] < seconds[False]
