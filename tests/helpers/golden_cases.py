"""Which schedules the late device's tests train by, how messages go, and the model that each schedule is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from examples import ASKED
from processes import ROOT

EVERY = sorted(path.stem for path in (ROOT / "traces").glob("*.json"))
MODEL = dict.fromkeys(EVERY, "mpirun.examples.mlp:tiny") | {
    "1f1b-tied": "models_for_tests:gpt_tied",
    "1f1b-tensor": "models_for_tests:gpt_tensor",
}


# Options that make the schedules that are chosen, beside 4 workers.
SIZES: dict[str, dict[str, object]] = {
    "1f1b": {"stages": 4},
    "1f1b-tensor": {"stages": 2, "tensor": 2, "graph": {"stages": 8, "whole": [0]}},
    "ddp": {"stages": 4},
    "fsdp-sharded": {"stages": 2, "shards": 4},
    "pipedream": {"stages": 4},
    "zb-v": {"stages": 8},
}


def schedule(name: str, compiled: Callable[..., Path]) -> Path:
    """A golden schedule or, where SCHEDGEN_EXAMPLES asks for no more, one chosen with half of its microbatches."""
    if ASKED:
        return ROOT / "traces" / f"{name}.json"
    scheme = name.removesuffix("-tensor").removesuffix("-sharded")
    return compiled(scheme, microbatches=4, workers=4, **SIZES[name])


def cases(chosen: Mapping[str, str]) -> list[tuple[str, str]]:
    """(schedule, direct or staged): those chosen or, where SCHEDGEN_EXAMPLES asks for more, all of both."""
    return [(name, how) for name in EVERY for how in ("direct", "staged")] if ASKED else list(chosen.items())
