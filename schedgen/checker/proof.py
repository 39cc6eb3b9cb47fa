"""The program under proof: what the rules read from it, and the form of a refusal."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import numpy as np

from schedgen.analysis import analyse
from schedgen.ir.effects import Buffer, Effect
from schedgen.ir.file import line_of
from schedgen.ir.instructions import Op
from schedgen.ir.program import Program
from schedgen.ir.transport import Transport
from schedgen.util.arrays import AnyInts, Flags, Ints, Numbers
from schedgen.util.errors import RefusedFile

RULES = {
    1: "every job exactly once, on the worker w names, a forward before it is redone",
    2: "every operand is defined before it is used",
    3: "every SEND has its RECV or FETCH_W, in order",
    4: "no deadlock, even if every SEND blocks until it is matched",
    5: "every gradient reaches every owner exactly once, every owner steps once",
    6: "collectives are entered in one order by all members",
    7: "everything defined is freed once, nothing is used after that",
    8: "the peak memory is what the list says, and within the header's limit",
    9: "every job uses the version of its weights that the schedule's updates say",
    10: "every output and gradient of a sliced stage is summed over its slices once, before it is used",
    11: "all slices of a replicated stage add up its gradient in one order and grouping",
}


class Touches(NamedTuple):
    """Accesses to buffers of one kind, in the order of the list: the row of each, its rank, its buffer's number."""

    rows: Ints
    rank: Ints
    number: Ints  # as in `ir.accesses.Accesses`: of a dw, its unit

    def by(self, chosen: Flags) -> Touches:
        """The accesses where `chosen` holds."""
        return Touches(self.rows[chosen], self.rank[chosen], self.number[chosen])

    def last(self, shape: tuple[int, int]) -> Ints:
        """The last row for every (rank, number), as an array of this `shape`; -1 where there is none."""
        last = np.full(shape, -1, np.int32)
        last[self.rank, self.number] = self.rows  # rows ascend: the last one stays
        return last


class Proof:
    """A projected program and what the rules share."""

    def __init__(self, program: Program, name: str, transport: Transport | None = None) -> None:
        self.program, self.header, self.name, self.transport = program, program.header, name, transport
        self.begin = f"{name}:" if program.cells is None else f"{name}: "  # of a refusal, before its place
        self.analysis = analyse(program)
        self.rank, self.op, self.kind, self.stage, self.mb, self.piece, self.operand = program.rows
        self.group = self.version = self.operand  # by the opcode: `Operands`

    def rows_of(self, *ops: Op) -> Numbers:
        """The rows with one of these opcodes, ascending."""
        return self.program.rows_of(*ops)

    def touches(self, buffer: Buffer, *effects: Effect) -> Touches:
        """The accesses to buffers of one kind that have one of these effects."""
        accesses, wanted = self.analysis.accesses, np.zeros(len(Effect), bool)
        wanted[list(effects)] = True
        at = np.flatnonzero(accesses.buffer == buffer)
        at = at[wanted[accesses.effect[at]]]
        rows = accesses.row[at]
        return Touches(rows, self.rank[rows], accesses.number[at])

    def where(self, row: int) -> str:
        """Line, rank and text of an instruction; of one from torch's list, rank and cell."""
        place, cells = f"rank {self.rank[row]}", self.program.cells
        place = f"line {line_of(self.program, row)}: {place}" if cells is None else f"{place}, cell {cells[row]}"
        return f"{place}: {self.program.instruction(row)}"

    def refuse(self, rule: int, row: int, reason: str) -> NoReturn:
        """Raise RefusedFile for an instruction that breaks a rule."""
        where, words = self.where(row).removeprefix("line "), RULES[rule]
        if self.transport and rule in (3, 4):
            words = f"{words.partition(',')[0]}, on {self.transport.name}"
        raise RefusedFile(f"{self.begin}{where}: {reason} (rule {rule}: {words})", rule)

    def refuse_any(self, rule: int, rows: AnyInts, reason: str) -> None:
        """Refuse the first of these rows, if there is one."""
        for row in rows[:1].tolist():
            self.refuse(rule, row, reason)

    def refuse_rank(self, rule: int, rank: int, reason: str) -> NoReturn:
        """Raise RefusedFile for a rank that lacks an instruction; the line is the end of the rank's list."""
        end = int(self.program.bounds[rank + 1])
        line = f"{line_of(self.program, end - 1, rank) + 1}: " if self.program.cells is None else ""
        raise RefusedFile(f"{self.begin}{line}rank {rank}: {reason} (rule {rule}: {RULES[rule]})", rule)
