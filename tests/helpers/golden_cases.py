"""The golden schedules that tests train by, the path of their messages (direct or staged), and the model of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from examples import ASKED
from processes import ROOT

# Golden schedules whose programs are those of another one.
ALIKE = {"lpp-g4": "ddp", "fslpp-g4": "fsdp"}
EVERY = sorted({path.stem for path in (ROOT / "traces").glob("*.json")} - ALIKE.keys())
MODEL = dict.fromkeys(EVERY, "mpirun.examples.mlp:tiny") | {
    "1f1b-tied": "models_for_tests:gpt_tied",
    "1f1b-tensor": "models_for_tests:gpt_tensor",
}
# The models that tests train by what `schedule` returns: small ones, unless all cases are asked for.
TRAINED = dict(MODEL)
if not ASKED:
    TRAINED |= dict.fromkeys(("ddp", "fsdp-sharded", "pipedream"), "models_for_graphs:mlp_of_four")
    TRAINED["1f1b-tensor"] = "models_for_tests:halves_of_a_block"


# Options of the schedules that tests choose, besides workers.
SIZES: dict[str, dict[str, object]] = {
    "1f1b": {"stages": 4},
    "1f1b-tensor": {"stages": 2, "tensor": 2, "graph": {"stages": 4, "replicated": [0]}},
    "1f1b-tied": {"graph": {"stages": 4, "tied": [[0, 3]]}},
    "chimera": {"stages": 4},
    "ddp": {"stages": 4},
    "fsdp": {"stages": 4},
    "fsdp-sharded": {"stages": 2, "shards": 4},
    "fslpp": {"stages": 4, "groups": 2},
    "lpp": {"stages": 4, "groups": 2},
    "pipedream": {"stages": 4},
    "zb-v": {"stages": 4},
}


def ranks(name: str) -> int:
    """The number of ranks that execute what `schedule` returns."""
    return 2 if name == "zb-v" and not ASKED else 4


def schedule(name: str, compiled: Callable[..., Path], microbatches: int = 4) -> Path:
    """The golden schedule with SCHEDGEN_EXAMPLES; else one that is compiled for so many microbatches."""
    if ASKED:
        return ROOT / "traces" / f"{name}.json"
    scheme = name.removesuffix("-tensor").removesuffix("-tied").removesuffix("-sharded")
    return compiled(scheme, microbatches=microbatches, workers=ranks(name), **SIZES[name])


def cases(chosen: Mapping[str, str]) -> list[tuple[str, str]]:
    """Pairs (schedule, direct or staged): with SCHEDGEN_EXAMPLES every combination, else those chosen."""
    return [(name, how) for name in EVERY for how in ("direct", "staged")] if ASKED else list(chosen.items())
