"""What a checkpoint says of the run that made it, and how another run differs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from mpirun.engine.setup import Training
from schedgen.ir.header import Header
from schedgen.util.errors import one_line


def facts(header: Header, of: Training, schedule: str, rank: int) -> dict[str, Any]:
    """For the manifest, on the rank that writes it: 0. `schedule`: its hash."""
    return {
        "seed": of.seed,
        "optimizer": of.recipe.name,
        "schedule": {"sha256": schedule, "scheme": dict(header.scheme)},
        "data": {
            "text": hashlib.sha256(of.text.numpy().data).hexdigest() if rank == 0 else "",
            "microbatches": header.microbatches * of.walks,
        },
        "options": _options(of),
        "changed": [],  # what was another on the way, in words
    }


def _options(of: Training) -> dict[str, Any]:
    """What a step depends on besides, by option; what is not given is not there."""
    recipe = of.recipe
    given = {"--lr": recipe.lr, "--weight-decay": recipe.weight_decay, "--lr-schedule": recipe.schedule}
    given |= {"--clip": recipe.clip, "--autocast": "bf16" if of.mixed else None}
    given |= {"--momentum": recipe.momentum or None, "--warmup": recipe.warmup or None}
    if recipe.schedule != "constant":
        given["--steps"] = recipe.steps
    return {name: value for name, value in given.items() if value is not None}


def others(found: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What a checkpoint was made with that is another here, in words. On rank 0."""
    before, now = found["data"], here["data"]
    counts = f"{before['microbatches']} microbatches a step, not {now['microbatches']}"
    differs = {
        f"seed {found['seed']}, not {here['seed']}": found["seed"] != here["seed"],
        "another text": before["text"] != now["text"],
        counts: before["microbatches"] != now["microbatches"],
    }
    given, wanted = found["options"], here["options"]
    differs |= {
        f"{_said(name, given.get(name))}, not {_said(name, wanted.get(name))}": given.get(name) != wanted.get(name)
        for name in ({**given, **wanted} if given else ())  # a manifest may know of none
    }
    return [one_line(words) for words, wrong in differs.items() if wrong]


def _said(name: str, value: object) -> str:
    return f"no {name}" if value is None else f"{name} {value}"
