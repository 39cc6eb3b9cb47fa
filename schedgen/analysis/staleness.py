"""How old weights are where they change without a flush: versions that owners hold, updates that gradients miss."""

from __future__ import annotations

import numpy as np

from schedgen.analysis.lifetimes import Lifetimes
from schedgen.ir.effects import Buffer
from schedgen.ir.instructions import Op
from schedgen.ir.program import Program


def versions_held(program: Program, lifetimes: Lifetimes) -> list[int]:
    """By stage: the most versions of its weights that an owner holds at once."""
    begins, ends = (
        np.flatnonzero((lifetimes.buffer == Buffer.W) & (at >= 0)) for at in (lifetimes.begin, lifetimes.end)
    )
    lives = np.append(begins, ends)
    # What begins at a row is there together with what ends at it. Besides, one version is there from the start.
    time = np.append(2 * lifetimes.begin[begins], 2 * lifetimes.end[ends] + 1)
    order = np.lexsort((time, lifetimes.size_column[lives], lifetimes.rank[lives]))
    more = np.cumsum(np.append(np.ones(len(begins), np.int64), np.full(len(ends), -1))[order])
    held = np.ones(program.header.stages, np.int64)
    np.maximum.at(held, lifetimes.size_column[lives[order]], 1 + more)
    return held.tolist()


def staleness(program: Program) -> list[int]:
    """By stage: the most updates between the weights that a gradient was computed with and those that it changes."""
    table, header = program.rows, program.header
    forwards = np.flatnonzero(table.op == Op.FWD)
    stage = table.stage[forwards]
    late = table.mb[forwards] // np.array(header.weight_versions.rounds)[stage] - table.version[forwards]
    most = np.zeros(header.stages, np.int64)
    np.maximum.at(most, stage, late)
    return most.tolist()
