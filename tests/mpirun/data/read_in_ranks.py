"""Reads a dataset in ranks that send messages meanwhile, and writes what each rank got as JSON to the file in argv[1].

Without that argument the rank is killed while its workers read.
"""

import atexit
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from mpirun.data.dataset_loaders import MapLoader
from mpirun.data.loader import Batch
from mpirun.data.microbatches import input_and_target

WORLD = MPI.COMM_WORLD


class Noisy:
    """Pairs of an index and random numbers."""

    def __len__(self) -> int:
        """Samples."""
        return 21

    def __getitem__(self, index: int) -> tuple[int, float]:
        """The index, and the sum of a draw from each global generator."""
        return index, float(torch.rand(()).double()) + random.random() + np.random.random()


def pair(collated: Any) -> tuple[list[Any], Any]:
    """The leaves and the target of a collated microbatch."""
    data, target = input_and_target(collated)
    return [data], target


def numbers(batch: Batch) -> dict[int, Any]:
    """By microbatch, its leaf and target."""
    return {number: [x.leaves[0].tolist(), x.target.tolist()] for number, x in batch.microbatches.items()}


def main() -> None:
    """Three epochs, of which the second is left after a step and then finished."""
    atexit.register(print, "at exit", flush=True)
    reads = [[0, 3, 2], [3, 1]][WORLD.rank]
    loader = MapLoader(Noisy(), 2, 4, reads, pair, shuffle=True, workers=2)
    steps = []
    for batch in loader:
        steps.append(numbers(batch))
        if len(sys.argv) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        sent, received = np.full(100_000, WORLD.rank), np.empty(100_000, int)
        WORLD.Sendrecv(sent, 1 - WORLD.rank, recvbuf=received, source=1 - WORLD.rank)
        assert (received == 1 - WORLD.rank).all()
    for batch in loader:
        steps.append(numbers(batch))
        loader.trained(batch)
        loader.restore(loader.state())  # as after a restart
        break
    steps += [numbers(batch) for batch in loader]
    steps += [numbers(batch) for batch in loader]
    by_rank = WORLD.gather(steps)
    if WORLD.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(by_rank))


if __name__ == "__main__":
    main()
