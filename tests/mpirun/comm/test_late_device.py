"""Trainings on a device whose kernels run late, which gives not a number where something is read too early.

`helpers/late_device.py` is that device. In all of these trainings only NORM makes the host wait for it.
"""

from __future__ import annotations

import json

import pytest
from examples import ASKED
from processes import ROOT

EVERY = sorted(path.stem for path in (ROOT / "traces").glob("*.json"))
# One of each way to send, to split, to add up and to update.
CHOSEN = {
    "1f1b": "staged",
    "1f1b-tensor": "direct",
    "1f1b-tied": "staged",
    "ddp": "direct",
    "fsdp-sharded": "staged",
    "fslpp": "direct",
    "pipedream": "staged",
    "zb-v": "direct",
}
MODEL = dict.fromkeys(EVERY, "mpirun.examples.mlp:tiny") | {
    "1f1b-tied": "models_for_tests:gpt_tied",
    "1f1b-tensor": "models_for_tests:gpt_tensor",
}
CASES = [(name, how) for name in EVERY for how in ("direct", "staged")] if ASKED else list(CHOSEN.items())


@pytest.fixture(scope="module")
def trained(inside, text, traces):
    """Two steps by a schedule, on the CPU and on a late device; all in one launch."""

    def arguments(name: str) -> list[object]:
        return [traces / f"{name}.json", "--model", MODEL[name], "--text", text, "--steps", 2, "--canonical"]

    cases = [(name, how) for name in {name for name, _ in CASES} for how in (None, "direct", "staged")]
    cases = [(name, how) for name, how in cases if how is None or (name, how) in CASES]
    runs = [{"arguments": arguments(name)} | ({"late": how} if how else {}) for name, how in cases]
    return dict(zip(cases, inside(4, runs), strict=True))


@pytest.mark.parametrize(("name", "how"), CASES)
def test_a_late_device_changes_no_bit(trained, name, how):
    assert trained[name, None].code == trained[name, how].code == 0
    assert trained[name, how].weights == trained[name, None].weights


def test_a_run_on_a_late_device_is_verified_saved_traced_and_goes_on(inside, compiled, text, tmp_path):
    """With dropout, and forwards that are done again."""
    schedule = compiled("1f1b", stages=4, microbatches=4, recompute="all")
    arguments = [schedule, "--model", "models_for_tests:dropping", "--text", text, "--canonical"]
    verify = ["--verify", "--trace", tmp_path / "trace.json", "--save", tmp_path / "saved"]
    resume = ["--resume", tmp_path / "saved", "--steps", 2]
    plain, first, again = inside(
        4,
        [
            {"arguments": [*arguments, "--steps", 2]},
            {"arguments": [*arguments, "--steps", 1, *verify], "late": "direct"},
            {"arguments": [*arguments, *resume], "late": "staged"},
        ],
    )
    assert first.differences == {"losses": 0, "gradients": 0, "parameters": 0}
    assert again.code == 0 and again.weights == plain.weights
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any("STEP" in event["name"] for event in events)
