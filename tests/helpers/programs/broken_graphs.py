"""Faults of job graphs, by name: each breaks something that capture or replay needs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any
from unittest import mock

from mpirun.engine.job_graphs import CaptureCheck, Job
from mpirun.model.rng import LayerRng

capture, replay, seed = Job._capture, Job._replay, LayerRng.seed
first_seeds: dict[tuple[LayerRng, int, str], int] = {}


def capture_without_holding_outputs(self: Job, *arguments: Any) -> Any:
    capture(self, *arguments)
    return self.outputs


def replay_without_inputs(self: Job, leaves: Sequence[Any]) -> Any:
    return replay(self, self.inputs)


def first_seed(self: LayerRng, name: str) -> int:
    return first_seeds.setdefault((self, self.at[2], name), seed(self, name))


BREAKS: dict[str, contextlib.AbstractContextManager[object]] = {
    "what a graph reads is taken to stay where it was": mock.patch.object(Job, "_place", lambda self, leaf: leaf),
    "what a graph reads is filled in deterministic mode": mock.patch(
        "mpirun.engine.job_graphs._without_values", contextlib.nullcontext
    ),
    "what a graph reads is not copied": mock.patch.object(Job, "_replay", replay_without_inputs),
    "layers draw in every step what they drew in the first": mock.patch.object(LayerRng, "seed", first_seed),
    "what a graph gives does not hold its memory": mock.patch.object(Job, "_capture", capture_without_holding_outputs),
    "nobody looks at operations": mock.patch.multiple(
        CaptureCheck, _why_not=lambda *_: None, operations=property(lambda _: b"")
    ),
}
