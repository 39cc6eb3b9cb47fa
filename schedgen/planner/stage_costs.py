"""Layers made into stages: what a stage costs, for the simulator, and the cuts that balance so many stages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from schedgen.ir.cost import Amount, by_stage
from schedgen.planner.layer_downsets import Cuts
from schedgen.planner.layer_profile import Layers, Numbers
from schedgen.planner.partition import Partition, straight
from schedgen.simulator.cost import Machine

SHORTEST = 1e-5  # of the longest job: a stage of layers that take no time takes that


class Staged(NamedTuple):
    """A model cut into S stages, in the order of its layers."""

    layers: tuple[int, ...]  # how many each stage has
    times: Mapping[str, Numbers]  # seconds by direction and stage: F and B, or F, I and W
    machine: Machine  # bytes by stage

    def durations(self, split: bool) -> dict[str, Numbers]:
        """Of the directions a schedule has; where nobody measured the halves of a backward, each takes half of it."""
        if split and "B" in self.times:
            return {"F": self.times["F"], "I": self.times["B"] / 2, "W": self.times["B"] / 2}
        return dict(self.times)


def balanced(layers: Layers, cuts: Cuts, bandwidth: float, most: int) -> list[list[Staged]]:
    """By number of stages, from 1 to `most`: the cuts whose slowest stage, and whose slowest stage or transfer, is
    fastest. `cuts`: those of the layers' order."""
    every = zip(straight(cuts, math.inf, most), straight(cuts, bandwidth, most), strict=True)
    return [[staged(layers, cuts, one, bandwidth) for one in dict.fromkeys(_ends(p) for p in both)] for both in every]


def _ends(found: Partition) -> tuple[int, ...]:
    return tuple(stage.end for stage in found.stages)


def staged(layers: Layers, cuts: Cuts, ends: Sequence[int], bandwidth: float) -> Staged:
    """Stages that end at these cuts, with links of one bandwidth.

    Inside a stage, what layers hand on is saved between forward and backward,
    and the gradient of it is alive while the backward runs.
    """
    begins = [0, *ends[:-1]]
    count = len(layers.names)
    machine = layers.machine
    half, step, saved = (by_stage(amount, count) for amount in (machine.half, machine.step, machine.saved))
    owned = layers.weight if machine.owned is None else by_stage(machine.owned, count)
    inner = np.array([layers.activation[i:j].sum() for i, j in zip(begins, ends, strict=True)])
    x = cuts.crossing[list(ends)].copy()
    x[-1] = layers.activation[-1]
    # Of what crosses the cut behind a stage, what comes from its own layers.
    own = np.array([_own(layers, i, j) for i, j in zip(begins, ends, strict=True)])
    widest = np.array([layers.activation[i : j - 1].max(initial=0) for i, j in zip(begins, ends, strict=True)])

    def total(amount: Numbers) -> Numbers:
        sums: Numbers = np.add.reduceat(amount, begins)
        return sums

    given = machine.workspace if isinstance(machine.workspace, Mapping) else dict.fromkeys("FBIW", machine.workspace)
    workspace: dict[str, Amount] = {}
    for direction, amount in given.items():
        largest = np.maximum.reduceat(by_stage(amount, count), begins)
        workspace[direction] = np.rint(largest + (2 * widest if direction in "BI" else 0))
    times = {direction: total(seconds) for direction, seconds in layers.times.items()}
    longest = max(float(seconds.max()) for seconds in times.values())
    return Staged(
        tuple(j - i for i, j in zip(begins, ends, strict=True)),
        {direction: np.maximum(seconds, SHORTEST * longest) for direction, seconds in times.items()},
        Machine(
            alpha=machine.alpha,
            beta=1 / bandwidth,
            activation=np.rint(x),  # bytes are whole
            weight=np.rint(total(layers.weight)),
            saved=np.rint(total(saved) + np.maximum(inner - own, 0)),
            half=np.rint(total(half)),
            workspace=workspace,
            owned=np.rint(total(owned)),
            step=total(step),
        ),
    )


def _own(layers: Layers, begin: int, end: int) -> float:
    """Bytes of the outputs of layers begin to end - 1 that layers behind read; of the last layer, its output."""
    read = {a for a, b in layers.edges if begin <= a < end <= b}
    if end == len(layers.names):
        read.add(end - 1)
    return float(layers.activation[sorted(read)].sum())
