"""What `schedgen stats` and `schedgen simulate` print: their numbers as readable text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schedgen.ir.instructions import KIND_NAME, KIND_WORDS, Kind
from schedgen.util.text_table import aligned


def stats_table(numbers: Mapping[str, Any]) -> str:
    """The numbers of `stats`: a line for each, and a table with a row for each worker."""
    scalars = [(key, value) for key, value in numbers.items() if not isinstance(value, (dict, list))]
    lines = [f"{key.replace('_', ' '):22}{_short(value)}" for key, value in scalars]
    name, limit = max(numbers["bounds"].items(), key=lambda bound: bound[1])
    by_stage = [key for key in ("versions", "staleness") if key in numbers]
    lines += [f"{key:22}{', '.join(map(str, numbers[key]))} (by stage)" for key in by_stage]
    lines.append(f"{'bound':22}{_short(limit)} ({name.replace('_', ' ')}); latency is {numbers['gap']:.1%} above")
    rows = [_columns(worker) for worker in numbers["workers"]]
    cells = [list(rows[0]), *([_short(value) for value in row.values()] for row in rows)]
    return "\n".join([*lines, "", *aligned(cells)])


def _columns(worker: Mapping[str, Any]) -> dict[str, Any]:
    """A worker's row, by column title; what it received by kind, with kinds named as in a file."""
    received = {
        f"{'received ' if kind == Kind.X else ''}{KIND_NAME[kind]}": worker["receives"][words]
        for kind, words in KIND_WORDS.items()
    }
    return {
        "worker": worker["worker"],
        "busy": worker["busy"],
        "peak activations": worker["peak_activations"],
        "weights owned": worker["weight_storage"],
        "used elsewhere": worker["weight_uses_away_from_home"],
        **received,
        **({"exchanges": worker["exchanges"]} if "exchanges" in worker else {}),
        **({"peak bytes": worker["peak_bytes"]} if "peak_bytes" in worker else {}),
    }


def named_numbers(numbers: Mapping[str, Any]) -> str:
    """The numbers of a simulation or a measured run, a line for each, and for each group of named numbers."""
    lines = []
    for key, value in numbers.items():
        if isinstance(value, dict):
            parts = (
                (name.replace("_", " ") if name.islower() else name, max(n) if isinstance(n, list) else n)
                for name, n in value.items()
            )
            value = ", ".join(f"{name} {_short(n)}" for name, n in parts if n) or 0
        if not isinstance(value, list):
            lines.append(f"{key.replace('_', ' '):22}{_short(value)}")
    return "\n".join(lines)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
