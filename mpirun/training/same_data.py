"""Compares the data of steps 1, 2, 4, 8, ... of a run: ranks that read the same microbatch must have the same data."""

from __future__ import annotations

from mpi4py import MPI

from mpirun.comm.fail_together import Stop, first_difference
from mpirun.engine.microbatch_reader import MicrobatchReader


def is_compared(number: int) -> bool:
    """Whether the data of a step are compared; `number`: that of the step in this run, from 0."""
    return number & (number + 1) == 0


def check_same_data(comm: MPI.Intracomm, microbatches: MicrobatchReader, step: int) -> None:
    """Stop if ranks have different hashes of a microbatch, which were recorded in step `step`, from 0. Collective."""
    if (difference := first_difference(comm, microbatches.take_digests())) is not None:
        number, one, other = difference
        raise Stop(
            f"ranks {one} and {other} have got different data for microbatch {number} of step {step + 1}: it should "
            "depend on the step and the microbatch alone, and be drawn with the generator that is given",
            1,
        )
