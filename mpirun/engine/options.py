"""The options of a run, declared once: for an Engine, for the command line, and for the set-up of both.

It does not import torch, which is slow: --help does without it.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, fields
from typing import Any

from schedgen.util.option_fields import READ, Number, amount, count, natural, option, switch

SECONDS = Number("a number of at least 0", float, 0, float("inf"))


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """How a rank uses its host."""

    device: str = option(
        "--device", "default: a GPU where every rank has one", default="auto", choices=("auto", "cpu", "cuda")
    )
    gpu_messages: str = option(
        "--gpu-messages", "direct: MPI gets GPU memory; host: messages go through host memory; default: direct if MPI "
        "can and a trial shows that it does", default="auto", choices=("auto", "direct", "host"),
    )  # fmt: skip
    stream_words: bool = switch(
        "--stream-words", "order a GPU's kernels and messages by words in memory, instead of events"
    )
    threads: int | None = option("--threads N", "torch's threads on each rank; default: cores / ranks", count)


@dataclass(frozen=True, kw_only=True)
class SetupOptions(HostOptions):
    """What a run and a profile share."""

    seed: int = option("--seed N", "of weights, of what is drawn in steps, and of the order of data", natural, 0)
    text: str | None = option(
        "--text FILE", "what a model makes microbatches from; default: modules of Python's standard library", file=READ
    )
    clip: float | None = option("--clip X", "largest norm of the whole gradient; default: no limit", amount)
    autocast: str | None = option(
        "--autocast", "forwards in mixed precision; weights stay as they are", choices=("bf16",)
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions(SetupOptions):
    """What a run has besides."""

    canonical: bool = switch(
        "--canonical", "add gradients in microbatch order: under every schedule the bits of one process"
    )
    graphs: bool = switch("--graphs", "on a GPU, capture the kernels of each job once, and replay them")
    verify: bool = switch("--verify", "repeat the steps in one process and compare")
    timeout: float = option(
        "--timeout S",
        "seconds without progress after which ranks are ended, in the set-up at least 300; 0: never; default: 600",
        SECONDS,
        600.0,
    )
    traceback: bool = switch("--traceback", "if a rank fails, show the whole traceback")


def values_of(options: object, kind: type[Any]) -> dict[str, Any]:
    """The options that a dataclass declares, by name, from a dataclass that has them, too."""
    return {each.name: getattr(options, each.name) for each in fields(kind)}


def in_words(kind: type[Any]) -> str:
    """The options of a dataclass as lines of a class's docstring."""
    lines = [f"{each.name:<14}{each.metadata['how']['help']}" for each in fields(kind)]
    return "\n".join(textwrap.fill(f"    {line}", 116, subsequent_indent=18 * " ") for line in lines)
