"""The settings of a run that its checkpoints record, and how those of another run differ."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from mpirun.engine.setup import Setup
from schedgen.ir.header import Header
from schedgen.util.errors import one_line


def run_settings(
    header: Header,
    setup: Setup,
    optimizer: tuple[str, dict[str, Any]],
    groups: Iterable[Mapping[str, Any]],
    schedule: str,
) -> dict[str, Any]:
    """The manifest's entries besides step and files; `options` are those that a resumed run should have, too.

    `optimizer`: its name and its settings; `groups`: the options of all parameter groups; `schedule`: its SHA-256.
    """
    name, settings = optimizer
    text = hashlib.sha256(setup.text.numpy().data).hexdigest()[:8] if setup.text is not None else None
    options = {
        "seed": setup.seed,
        "text": text,
        "microbatches": header.microbatches * setup.passes,
        **settings,
        **_set_in_groups(groups, settings),
        "autocast": "bf16" if setup.autocast_dtype else None,
        "weight versions": header.lowering.get("updates"),
        "threads": torch.get_num_threads() if setup.device.torch.type == "cpu" else None,  # bits of sums depend on it
    }
    return {
        "optimizer": name,
        "schedule": {"sha256": schedule, "scheme": dict(header.scheme)},
        "options": {option: value for option, value in options.items() if value is not None},
    }


def _set_in_groups(groups: Iterable[Mapping[str, Any]], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The options that parameter groups have otherwise than `settings`: the value, or a list if groups differ.

    It depends on no schedule, although the parameters of a group are divided among optimizers.
    """
    by_option: dict[str, dict[str, Any]] = {}
    for group in groups:
        for option, value in group.items():
            by_option.setdefault(option, {})[repr(value)] = value
    values = {option: [distinct[key] for key in sorted(distinct)] for option, distinct in by_option.items()}
    return {option: of if len(of) > 1 else of[0] for option, of in values.items() if of != [settings.get(option)]}


def differing_options(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """The options of a checkpoint that are not the current ones, each as text."""
    pairs = {name: (saved.get(name), current.get(name)) for name in {**saved, **current}}
    return [
        one_line(f"{_in_words(name, old)}, not {_in_words(name, new)}")
        for name, (old, new) in pairs.items()
        if old != new
    ]


def _in_words(name: str, value: object) -> str:
    return f"no {name}" if value is None else f"{name} {value}"
