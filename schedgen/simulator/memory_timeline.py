"""What every rank holds, instruction by instruction: the series whose peaks `check.lives` finds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedgen.analysis.lifetimes import (
    ADD_TO,
    DEFINE,
    DW,
    EVENTS,
    INPUTS,
    NAMED,
    OUTPUTS,
    PARTIAL,
    SAVED,
    USE,
    WEIGHT,
    G,
    X,
    kept,
)
from schedgen.analysis.subject import Numbers, Subject
from schedgen.analysis.ties import spelled_out
from schedgen.ir.instructions import EXCHANGED, B, F, Kind, Op
from schedgen.ir.program import Program
from schedgen.simulator.buffer_sizes import BufferSizes


class MemoryTimeline(NamedTuple):
    """Bytes by row of the projected program and kind of `check.Memory`, shape (rows, 7), int64.

    What a stage's owner holds throughout, places that stand empty and workspaces are not in it.
    """

    taken: Numbers  # by the row, when it starts
    freed: Numbers  # by the row, when it ends

    @property
    def during(self) -> Numbers:
        """What a rank holds while it executes the row: all that is taken is freed by the rank's end."""
        level: Numbers = np.cumsum(self.taken, axis=0) - np.cumsum(self.freed, axis=0) + self.freed
        return level


def memory_timeline(program: Program, sizes: BufferSizes) -> MemoryTimeline:
    """Follow a checked, projected program."""
    subject, origin = Subject(program, ""), np.arange(len(program))
    if program.header.tied:
        subject, origin = spelled_out(subject)
    header, table = program.header, subject.program.rows
    by_kind, (w, _) = sizes.by_kind(header), sizes.by_unit(header)
    outputs, ends = sizes.outputs(header), np.array(header.graph.edges, np.int64).reshape(-1, 2)
    inputs, given_out = np.zeros((2, header.stages), np.int64)
    np.add.at(inputs, ends[:, 1], outputs[header.stages :])
    np.add.at(given_out, ends[:, 0], outputs[header.stages :])
    given_out = np.where(header.graph.is_per_consumer, given_out, outputs[: header.stages])
    redone = header.compute[F] != header.compute[B]  # such a forward saves nothing, its RECOMPUTE does
    again = subject.having(Op.RECOMPUTE)
    redone[table.stage[again], table.mb[again]] = True
    taken, given = np.zeros((2, len(program), len(by_kind)), np.int64)
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
            column = np.where(np.isin(things, (WEIGHT, DW, PARTIAL)), subject.unit(rows), stage)
            if which == NAMED:
                travels = things <= G
                column[travels] = header.graph.size_columns(stage[travels], table.via[rows][travels])
            of_stage = {(G, INPUTS): inputs, (X, OUTPUTS): given_out}.get((thing, which))
            amount = by_kind[things, column] if of_stage is None else of_stage[stage]
            np.add.at(taken if what == DEFINE else given, (origin[rows], things), amount)
    # The first part of a sum, and the first behind a FREE of it, defines it. A backward adds to all units of its stage.
    adding = [op for op, steps in EVENTS.items() if any(what == ADD_TO for what, _, _ in steps)]
    ends = subject.having(Op.FREE)
    ends = ends[table.kind[ends] == Kind.DW]
    rows = subject.having(*adding)
    rows = np.sort(np.concatenate([rows[~np.isin(table.kind[rows], EXCHANGED)], ends]))
    whole = np.isin(table.op[rows], (Op.BWD, Op.BWD_W))
    counts = np.where(whole, np.diff(subject.first_unit)[table.stage[rows]], 1)
    rows, part = np.repeat(rows, counts), np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    unit = subject.unit(rows) + part
    order = np.argsort(table.rank[rows].astype(np.int64) * len(w) + unit, kind="stable")
    rows, unit = rows[order], unit[order]
    rank, free = table.rank[rows], table.op[rows] == Op.FREE
    begins = np.append(True, (rank[1:] != rank[:-1]) | (unit[1:] != unit[:-1]) | free[:-1]) & ~free
    np.add.at(taken[:, DW], origin[rows[begins]], w[unit[begins]])
    stashed = np.flatnonzero(kept(subject))
    np.add.at(taken[:, WEIGHT], origin[stashed], sizes.weight[table.stage[stashed]])
    return MemoryTimeline(taken, given)
