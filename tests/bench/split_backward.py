"""make bench-run: what a split backward costs, I + W over B, on one GPT block of each size, one thread.

Medians of pair-by-pair ratios in one run, with their range.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

from mpirun.comm.device import Device
from mpirun.engine.grad_buffers import StageGradBuffer
from mpirun.engine.stage import LocalStage, SavedForward
from mpirun.examples.gpt import Block
from mpirun.model.dataflow import TensorSpec
from mpirun.model.shapes import StageShape


def timed(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def ratio(width: int, length: int, sequences: int, runs: int) -> list[float]:
    x = torch.randn(sequences, length, width)
    gradient = torch.randn_like(x)
    stage = LocalStage(
        Block(width, 8), 0, StageShape((TensorSpec(tuple(x.shape), x.dtype),), ()), Device(), owns_all=True
    )
    gathered = StageGradBuffer(stage, [0], torch.zeros(stage.size, dtype=torch.uint8))
    gathered.attach(0, stage)

    def saved() -> SavedForward:
        return stage.forward([x], None, save=True)[1]

    def unsplit() -> float:
        kept = saved()
        return timed(lambda: stage.backward(kept, [gradient]))

    def halves() -> float:
        kept = saved()
        return timed(lambda: gathered.add(0, stage.backward_weight(stage.backward_input(kept, [gradient]))))

    unsplit(), halves()
    return [halves() / unsplit() for _ in range(runs)]


def main() -> None:
    torch.set_num_threads(1)
    quick = "--quick" in sys.argv
    for width, length, sequences in ((16, 4, 1),) if quick else ((256, 256, 4), (64, 64, 4)):
        ratios = ratio(width, length, sequences, 2 if quick else 30)
        print(
            f"GPT block d={width}, T={length}, {sequences} sequences: I + W takes {statistics.median(ratios):.3f} of B "
            f"({min(ratios):.3f} to {max(ratios):.3f})"
        )


if __name__ == "__main__":
    main()
