"""`Program`: a header and the instructions of every rank, as arrays.

A program comes in two orders with one type: *global*, the time order that passes insert into, and *projected*,
grouped by rank, which files hold and all other code reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import or_
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedgen.ir.header import Header
from schedgen.ir.instructions import EXCHANGED, Instruction, Kind, Op, Operands
from schedgen.util.arrays import AnyInts, Flags, Ints, Numbers, Small, Times, stable_order


class Columns(NamedTuple):
    """The fields of instructions, and their ranks, as columns of equal length; -1 where a field does not apply.

    `kind`, `stage`, `mb`, `piece` name the buffer; for t.k, `stage` is k. For compute `stage` and `mb` are the job.
    """

    rank: Ints
    op: Small
    kind: Small
    stage: Ints
    mb: Ints
    piece: Ints
    operand: Ints


class Rows(Columns, Operands):
    """Instructions as columns, whose last two `Operands` names."""

    __slots__ = ()

    def take(self, index: Numbers | slice) -> Rows:
        """The rows at these indices."""
        return Rows(*(column[index] for column in self.columns()))

    def columns(self) -> list[NDArray[Any]]:
        """All columns, in the order of the fields."""
        return list(self)


def rows(op: int | AnyInts, rank: AnyInts, **fields: int | AnyInts) -> Rows:
    """`Rows` as long as `rank`; scalars are broadcast. `fields`: columns or operands; default -1 (kind: 0)."""
    length = len(rank)
    fields = {Rows.FIELD.get(name, name): value for name, value in fields.items()}

    def column(value: int | AnyInts, dtype: type) -> NDArray[Any]:
        return np.broadcast_to(np.asarray(value, dtype), (length,))

    return Rows(
        np.asarray(rank, np.int32),
        column(op, np.int8),
        column(fields.get("kind", Kind.NONE), np.int8),
        *(column(fields.get(name, -1), np.int32) for name in ("stage", "mb", "piece", "operand")),
    )


def concatenate(parts: list[Rows]) -> Rows:
    """The rows of all parts, one part after another."""
    return Rows(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


@dataclass(frozen=True, eq=False)
class Program:
    """A header and its instructions, in global or in projected order."""

    header: Header
    rows: Rows
    time: Times | None = None  # global order only: when each row happens, ascending
    cells: Numbers | None = (
        None  # of torch's list only: the cell (from 1) that a row is from, or the last one before it
    )

    def __len__(self) -> int:
        """How many instructions all ranks have together."""
        return len(self.rows.op)

    def insert(self, new: Rows, after: Numbers) -> Program:
        """Insert row k of `new` after row `after[k]` (-1: at the front); rows at the same place keep their order."""
        if not len(after):
            return self
        order: slice | Numbers = slice(None)
        if (after[1:] < after[:-1]).any():
            order = np.argsort(after, kind="stable")
            after = after[order]
        merge = _merge_at(after, len(self))
        pairs = zip(self.rows.columns(), new.columns(), strict=True)
        rows = Rows(*(merge(column, inserted[order]) for column, inserted in pairs))
        before = np.maximum(after, 0)
        time, cells = (None if of is None else merge(of, of[before]) for of in (self.time, self.cells))
        return Program(self.header, rows, time, cells)

    def project(self) -> Program:
        """The same instructions grouped by rank, each rank in global order."""
        return Program(self.header, self.rows.take(stable_order(self.rows.rank)))

    @cached_property
    def bounds(self) -> Numbers:
        """Projected only: rank r's instructions are rows bounds[r] to bounds[r + 1] - 1."""
        return np.searchsorted(self.rows.rank, np.arange(self.header.workers + 1))

    @property
    def ranks_with_rows(self) -> Numbers:
        """Projected only: the ranks that have instructions; with forwards alone a list may be empty."""
        return np.flatnonzero(np.diff(self.bounds))

    def of_row_before(self, values: Times) -> Times:
        """Projected only: by row, the value of the row before it on its rank; 0 for the first of a rank."""
        before = np.append(0.0, values[:-1])
        before[self.bounds[self.ranks_with_rows]] = 0.0
        return before

    def is_one_of(self, *ops: Op) -> Flags:
        """By row, whether its opcode is one of these."""
        return reduce(or_, (self.rows.op == int(op) for op in ops))  # a tenth of a lookup's time

    def rows_of(self, *ops: Op) -> Numbers:
        """The rows with one of these opcodes, ascending."""
        return np.flatnonzero(self.is_one_of(*ops))

    def job_rows(self, *ops: Op) -> Numbers:
        """The row of each job (s, b) under one of these opcodes, shape (S, B); -1 if there is none."""
        rows, by_job = self.rows_of(*ops), np.full((self.header.stages, self.header.microbatches), -1, np.int64)
        by_job[self.rows.stage[rows], self.rows.mb[rows]] = rows
        return by_job

    def instruction(self, row: int) -> Instruction:
        """The instruction of one row."""
        return Instruction(*(int(column[row]) for column in self.rows[1:]))

    def exchanges(self) -> Numbers:
        """The rows of sums over slices: every member's ALLREDUCE of an x or a g."""
        sums = self.rows_of(Op.ALLREDUCE)
        return sums[np.isin(self.rows.kind[sums], EXCHANGED)]

    def instructions(self, rank: int) -> list[Instruction]:
        """Projected only: the list of one rank."""
        part = self.rows.take(slice(self.bounds[rank], self.bounds[rank + 1]))
        return [Instruction(*row) for row in zip(*(column.tolist() for column in part[1:]), strict=True)]


def _merge_at(after: Numbers, length: int) -> Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]:
    """A function that inserts values into a column of `length`, each after the row that the ascending `after` gives."""
    places = after + 1 + np.arange(len(after))
    is_old = np.ones(length + len(after), bool)
    is_old[places] = False
    old_places = np.flatnonzero(is_old)  # indices: four times as fast as assigning by the mask

    def merge(column: NDArray[Any], inserted: NDArray[Any]) -> NDArray[Any]:
        merged = np.empty(len(is_old), column.dtype)
        merged[old_places], merged[places] = column, inserted
        return merged

    return merge
