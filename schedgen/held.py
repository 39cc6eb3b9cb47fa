"""What every rank holds, instruction by instruction: the series whose peaks `check.lives` finds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedgen.check.lives import ADD_TO, DEFINE, DW, EVENTS, INPUTS, NAMED, PARTIAL, SAVED, USE, WEIGHT, G, kept
from schedgen.check.subject import Numbers, Subject
from schedgen.check.ties import spelled_out
from schedgen.places import Bytes
from schedgen.program import EXCHANGED, B, F, Kind, Op, Program


class Held(NamedTuple):
    """Bytes by row of the projected program and kind of `check.Memory`, shape (rows, 7), int64.

    What a stage's owner holds throughout, places that stand empty and workspaces are not in it.
    """

    taken: Numbers  # by the row, when it starts
    given: Numbers  # back by the row, when it ends

    @property
    def during(self) -> Numbers:
        """What a rank holds while it executes the row: all that is taken is given back by the rank's end."""
        level: Numbers = np.cumsum(self.taken, axis=0) - np.cumsum(self.given, axis=0) + self.given
        return level


def held(program: Program, bytes: Bytes) -> Held:
    """Follow a checked, projected program."""
    subject, origin = Subject(program, ""), np.arange(len(program))
    if program.header.tied:
        subject, origin = spelled_out(subject)
    header, table = program.header, subject.program.rows
    x, w, partial, saved, half = bytes[:5]
    sizes = np.stack([x, x, w, w, partial, saved, half])
    inputs = np.array([sum(int(x[producer]) for producer in ones) for ones in header.producers], np.int64)
    redone = header.compute[F] != header.compute[B]  # such a forward saves nothing, its RECOMPUTE does
    again = subject.having(Op.RECOMPUTE)
    redone[table.stage[again], table.mb[again]] = True
    taken, given = np.zeros((2, len(program), len(sizes)), np.int64)
    for op, steps in EVENTS.items():
        for what, thing, which in steps:
            rows = subject.having(op)
            if what in (USE, ADD_TO):
                continue
            if what == DEFINE and thing == SAVED and op == Op.FWD:
                rows = rows[~redone[table.stage[rows], table.mb[rows]]]
            stage, things = table.stage[rows], np.full(len(rows), thing)
            if which == NAMED:
                things = table.kind[rows].astype(np.int64) - 1
                things[(things == Kind.DW - 1) & (op == Op.RECV)] = PARTIAL
            amount = inputs[stage] if (thing, which) == (G, INPUTS) else sizes[things, stage]
            np.add.at(taken if what == DEFINE else given, (origin[rows], things), amount)
    # The first part of a sum, and the first behind a FREE of it, defines it.
    adding = [op for op, steps in EVENTS.items() if any(what == ADD_TO for what, _, _ in steps)]
    ends = subject.having(Op.FREE)
    ends = ends[table.kind[ends] == Kind.DW]
    rows = subject.having(*adding)
    rows = np.sort(np.concatenate([rows[~np.isin(table.kind[rows], EXCHANGED)], ends]))
    rows = rows[np.argsort(table.rank[rows].astype(np.int64) * header.stages + table.stage[rows], kind="stable")]
    rank, stage, free = table.rank[rows], table.stage[rows], table.op[rows] == Op.FREE
    begins = np.append(True, (rank[1:] != rank[:-1]) | (stage[1:] != stage[:-1]) | free[:-1]) & ~free
    np.add.at(taken[:, DW], origin[rows[begins]], w[stage[begins]])
    stashed = np.flatnonzero(kept(subject))
    np.add.at(taken[:, WEIGHT], origin[stashed], w[table.stage[stashed]])
    return Held(taken, given)
