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
    rank: int,
) -> dict[str, Any]:
    """The manifest's entries besides step and files. The text is hashed on rank 0 only.

    `optimizer`: its name and its settings; `groups`: the options of all parameter groups; `schedule`: its SHA-256.
    """
    name, settings = optimizer
    versions = header.lowering.get("updates")
    options = {**settings, "autocast": "bf16" if setup.autocast_dtype else None, "weight versions": versions}
    return {
        "seed": setup.seed,
        "optimizer": name,
        "schedule": {"sha256": schedule, "scheme": dict(header.scheme)},
        "data": {
            "text": hashlib.sha256(setup.text.numpy().data).hexdigest() if rank == 0 and setup.text is not None else "",
            "microbatches": header.microbatches * setup.passes,
        },
        "options": {option: value for option, value in options.items() if value is not None},
        "groups": _set_in_groups(groups, settings),
        "threads": [torch.get_num_threads()] if setup.device.torch.type == "cpu" else [],  # by run, this one last
        "sums": [_sums(header, setup)],
        "changed": [],  # settings that changed across resumes, as text
    }


def _sums(header: Header, setup: Setup) -> str:
    """In which order gradients are summed, as far as the bits of a sum depend on it."""
    graph, tensor = header.model_graph, header.tensor_parallel.degree
    tied = sum(map(len, header.model_ties))
    parts = [
        f"{'' if setup.canonical else 'no '}canonical",
        f"{tensor} tensor slices" * (tensor > 1),
        f"{setup.passes} passes of {header.microbatches} microbatches" * (setup.passes > 1),
        f"{tied} tied stages" * (tied > 0),  # a parameter's gradients add up in a stage, then over stages
        f"{graph.stages} stages" * any(len(readers) > 1 for readers in graph.consumers),  # so do those of a value
    ]
    return " and ".join(filter(None, parts))


def _set_in_groups(groups: Iterable[Mapping[str, Any]], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The options that parameter groups have otherwise than `settings`: the value, or a list if groups differ.

    It depends on no schedule, although the parameters of a group are divided among optimizers.
    """
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        for option, value in group.items():
            found.setdefault(option, {})[repr(value)] = value
    values = {option: [of[key] for key in sorted(of)] for option, of in found.items()}
    return {option: of if len(of) > 1 else of[0] for option, of in values.items() if of != [settings.get(option)]}


def both_options(saved: Mapping[str, Any], current: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of a checkpoint and the current ones; those of groups only if the checkpoint has recorded them."""
    old, new = ({**of["options"], **(of["groups"] if "groups" in saved else {})} for of in (saved, current))
    return old, new


def differing_settings(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """The settings of a checkpoint that are not the current ones, each as text. Correct on rank 0 only."""
    before, now = saved["data"], current["data"]
    counts = f"{before['microbatches']} microbatches a step, not {now['microbatches']}"
    differs = {
        f"seed {saved['seed']}, not {current['seed']}": saved["seed"] != current["seed"],
        "another text": before["text"] != now["text"],
        counts: before["microbatches"] != now["microbatches"],
    }
    old, new = both_options(saved, current)
    differs |= {
        f"{_in_words(name, old.get(name))}, not {_in_words(name, new.get(name))}": old.get(name) != new.get(name)
        for name in {**old, **new}
    }
    return [one_line(words) for words, differ in differs.items() if differ]


def other_sums(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """The latest earlier order of gradient sums that differs from the current one, as text; empty: none."""
    now = current["sums"][-1]
    return [f"{then}, not {now}" for then in saved["sums"] if then != now][-1:]


def other_threads(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """The latest earlier number of torch threads per rank that differs, which changes bits of sums; empty: none."""
    now = current["threads"][-1:]  # none on a GPU
    others = [threads for threads in saved["threads"] if now and threads != now[0]]
    return [f"{others[-1]} thread{'s' * (others[-1] > 1)} a rank, not {now[0]}"] if others else []


def _in_words(name: str, value: object) -> str:
    return f"no {name}" if value is None else f"{name} {value}"
