"""One walk through a list: when every instruction began, what it waited for and how long, simulated or measured.

A row a rank, one slice an instruction: what it worked, behind a gap as long as
it waited. Arrows go from a SEND to where its message was there: simulated, its
arrival; measured, where the first to use it starts its work.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedgen.analysis.lifetimes import lives
from schedgen.analysis.subject import Subject
from schedgen.checker.deadlock import waits
from schedgen.checker.messages import rule_3
from schedgen.ir.instructions import Small
from schedgen.ir.program import Program
from schedgen.simulator.simulate import Simulation, Times

SIMULATED, MEASURED = 0, 1  # pid: the process that a row belongs to


class Timeline(NamedTuple):
    """What happened in one walk through the list: microseconds, one entry a row of the projected program."""

    start: Times  # of the work
    length: Times  # of the work
    wait: Times  # before it
    cause: Small  # what it waited for, an index of CAUSES; -1: it did not wait
    arrival: Times  # of SEND rows: when the receiver has the message; -1: nobody needs an arrow


def simulated(program: Program, run: Simulation, unit: float = 1.0) -> Timeline:
    """A simulation as a timeline; `unit`: microseconds of a unit of its time."""
    arrival = np.where(run.arrival > run.start, unit * run.arrival, -1.0)
    return Timeline(unit * run.start, unit * (run.end - run.start), unit * waited(program, run), run.cause, arrival)


def waited(program: Program, run: Simulation) -> Times:
    """How long a rank stood still before each row."""
    before: Times = np.append(0.0, run.end[:-1])
    before[program.bounds[:-1][np.diff(program.bounds) > 0]] = 0.0  # ranks start at zero
    wait: Times = run.start - before
    return wait


def measured(program: Program, start: Times, length: Times, wait: Times, cause: Small) -> list[Timeline]:
    """The timelines of walks that were measured: arrays of shape (walks, rows), as in `Timeline`.

    A rank may come to an instruction, be kept from its core, and find there what was sent meanwhile: an arrow then
    stands upright, in the middle of the instruction.
    """
    subject = Subject(program, "")
    found = lives(subject)
    arrival, sends = np.full(start.shape, -1.0), waits(subject, found, rule_3(subject)).sends
    arrival[:, sends] = np.maximum(start[:, found.used], start[:, sends])
    return [Timeline(*columns) for columns in zip(start, length, wait, cause, arrival, strict=True)]
