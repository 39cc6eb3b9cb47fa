"""A timeline: when every instruction of one pass through a list began, what it waited for and how long.

It comes from a simulation or a measured run, and is used for time breakdowns, pictures and trace files.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedgen.analysis import analyse
from schedgen.ir.instructions import KIND_WORDS
from schedgen.ir.program import Program
from schedgen.util.arrays import Small, Times

# Why a rank is idle: it waits for a message of a kind, for one of its own to leave, for other ranks, for a copy to or
# from the memory of the host.
CAUSES = (*KIND_WORDS.values(), "send", "reduction", "offload")
SEND_CAUSE, REDUCTION, OFFLOAD_CAUSE = map(CAUSES.index, CAUSES[-3:])  # the causes before are Kind - 1


class Timeline(NamedTuple):
    """Times in microseconds, or in units of the costs; one entry a row of the projected program."""

    start: Times  # of the work
    length: Times  # of the work
    wait: Times  # before it
    cause: Small  # what it waited for, an index of CAUSES; -1: it did not wait
    arrival: Times  # of SEND rows: when the receiver has the message; -1: other rows, and messages that no row uses


def measured_timelines(program: Program, start: Times, length: Times, wait: Times, cause: Small) -> list[Timeline]:
    """The timelines of measured passes: arrays of shape (passes, rows), as in `Timeline`.

    A message arrives when the first row that uses it starts its work. A rank may reach an instruction, lose its core
    for a while, and then find what was sent meanwhile: that message arrives when it is sent.
    """
    analysis, arrival = analyse(program), np.full(start.shape, -1.0)
    arrival[:, analysis.waits.sends] = np.maximum(start[:, analysis.lifetimes.users], start[:, analysis.waits.sends])
    return [Timeline(*columns) for columns in zip(start, length, wait, cause, arrival, strict=True)]
