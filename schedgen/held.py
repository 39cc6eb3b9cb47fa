"""What every rank holds, instruction by instruction: the series whose peaks `check.lives` finds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedgen.check.lives import (
    ADD_TO,
    DEFINE,
    DW,
    EVENTS,
    INPUTS,
    NAMED,
    PARTIAL,
    PARTS,
    SAVED,
    USE,
    WEIGHT,
    G,
    X,
    kept,
)
from schedgen.check.subject import Numbers, Subject
from schedgen.check.ties import spelled_out
from schedgen.places import Bytes
from schedgen.program import B, F, Kind, Op, Program


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
    sizes = bytes.by_kind(header)
    outputs, ends = sizes[0], np.array(header.edges, np.int64).reshape(-1, 2)
    inputs, parts = np.zeros((2, header.stages), np.int64)
    np.add.at(inputs, ends[:, 1], outputs[header.stages :])
    np.add.at(parts, ends[:, 0], outputs[header.stages :])
    parts = np.where(header.is_apart, parts, outputs[: header.stages])
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
            column = stage.astype(np.int64)
            if which == NAMED:
                travels = things <= G
                column[travels] = header.columns(table.stage[rows][travels], table.via[rows][travels])
            whole = {(G, INPUTS): inputs, (X, PARTS): parts}.get((thing, which))
            amount = sizes[things, column] if whole is None else whole[stage]
            np.add.at(taken if what == DEFINE else given, (origin[rows], things), amount)
    # The first part of a sum, and the first behind a FREE of it, defines it.
    adding = [op for op, steps in EVENTS.items() if any(what == ADD_TO for what, _, _ in steps)]
    ends = subject.having(Op.FREE)
    ends = ends[table.kind[ends] == Kind.DW]
    rows = np.sort(np.concatenate([subject.having(*adding), ends]))
    rows = rows[np.argsort(table.rank[rows].astype(np.int64) * header.stages + table.stage[rows], kind="stable")]
    rank, stage, free = table.rank[rows], table.stage[rows], table.op[rows] == Op.FREE
    begins = np.append(True, (rank[1:] != rank[:-1]) | (stage[1:] != stage[:-1]) | free[:-1]) & ~free
    np.add.at(taken[:, DW], origin[rows[begins]], bytes.weight[stage[begins]])
    stashed = np.flatnonzero(kept(subject))
    np.add.at(taken[:, WEIGHT], origin[stashed], bytes.weight[table.stage[stashed]])
    return Held(taken, given)
