"""Lowering: jobs in time order become the program of every rank.

`PIPELINE` is the whole of it. Each pass takes a program in global (time)
order and returns one; a SEND and its RECV are inserted together, so running
the global order one instruction after another always works, even if every
SEND blocks until it is matched. Projecting that per rank is the last step.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schedgen.order import Times
from schedgen.passes.compute import compute
from schedgen.passes.free import free
from schedgen.passes.reduce import reduce
from schedgen.passes.step import step
from schedgen.passes.transfers import transfers
from schedgen.passes.weights import weights
from schedgen.program import Header, Program

PIPELINE = (weights, transfers, reduce, step, free)


def lower(header: Header, start: Times, whole: NDArray[np.bool_]) -> Program:
    """The projected program for jobs that start at `start` (flat, indexed by job).

    `whole`, (S, B): microbatches whose split backward is one instruction after all.
    """
    program = compute(header, start, whole)
    for one in PIPELINE:
        program = one(program)
    return program.project()
