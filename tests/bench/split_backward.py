"""make bench-run: what a split backward costs, I + W over B, by our halves and by those of torch's pipelines.

    python tests/bench/split_backward.py [--runs 30] [--quick]

A stage is some GPT blocks, on one thread. A backward, our halves and torch's take turns. Prints the medians and
quartiles of the ratios of neighbouring runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from mpirun.comm.device import Device
from mpirun.engine.core.stage import LocalStage, SavedForward
from mpirun.examples.gpt import Block
from mpirun.model.dataflow import TensorSpec
from mpirun.model.stage_shape import StageShape

SIZES = ((256, 256, 4, 1), (128, 128, 1, 4), (32, 16, 1, 1), (32, 16, 1, 16))  # width, length, sequences, blocks
QUICK = ((16, 4, 1, 2),)


def timed(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def seconds(width: int, length: int, sequences: int, blocks: int, runs: int) -> list[tuple[float, float, float]]:
    """By run, the seconds of B, of our I and W, and of torch's."""
    x = torch.randn(sequences, length, width)
    gradient = torch.randn_like(x)
    module = nn.Sequential(*(Block(width, 4) for _ in range(blocks)))
    stage = LocalStage(module, 0, StageShape((TensorSpec(tuple(x.shape), x.dtype),), ()), Device(), owned_parts=(-1,))
    for parameter in stage.parameters:
        parameter.grad = torch.zeros_like(parameter)

    def saved() -> SavedForward:
        kept = stage.forward([x], None, save=True)[1]
        assert kept is not None
        return kept

    def unsplit() -> float:
        kept = saved()
        return timed(lambda: stage.backward(kept, [gradient]))

    def ours() -> float:
        kept = saved()
        return timed(lambda: stage.backward_weight(stage.backward_input(kept, [gradient])))

    def torchs() -> float:
        leaf = x.detach().requires_grad_()
        output = module(leaf)

        def halves() -> None:
            _, groups = stage_backward_input([output], [gradient], [leaf], iter(stage.parameters))
            stage_backward_weight(iter(stage.parameters), groups)

        return timed(halves)

    return [(unsplit(), ours(), torchs()) for _ in range(runs + 1)][1:]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="few runs of one small stage: whether it runs at all")
    options = parser.parse_args()
    if options.quick:
        options.runs = 2
    torch.set_num_threads(1)
    print("I + W over B                              ours                     torch.distributed.pipelining")
    for width, length, sequences, blocks in QUICK if options.quick else SIZES:
        laps = seconds(width, length, sequences, blocks, options.runs)
        columns = []
        for split in (1, 2):
            low, middle, high = statistics.quantiles([lap[split] / lap[0] for lap in laps], n=4, method="inclusive")
            columns.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
        print(f"{blocks:3} blocks d={width}, T={length}, {sequences} sequences".ljust(42) + "   ".join(columns))


if __name__ == "__main__":
    main()
