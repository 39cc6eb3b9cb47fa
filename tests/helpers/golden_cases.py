"""Which golden schedules the late device's tests train by, how messages go, and the model that each schedule is for."""

from __future__ import annotations

from collections.abc import Mapping

from examples import ASKED
from processes import ROOT

EVERY = sorted(path.stem for path in (ROOT / "traces").glob("*.json"))
MODEL = dict.fromkeys(EVERY, "mpirun.examples.mlp:tiny") | {
    "1f1b-tied": "models_for_tests:gpt_tied",
    "1f1b-tensor": "models_for_tests:gpt_tensor",
}


def cases(chosen: Mapping[str, str]) -> list[tuple[str, str]]:
    """(schedule, direct or staged): those chosen or, where SCHEDGEN_EXAMPLES asks for more, all of both."""
    return [(name, how) for name in EVERY for how in ("direct", "staged")] if ASKED else list(chosen.items())
