"""The program under proof: its columns, its owners, and how a refusal is worded."""

from __future__ import annotations

from functools import cached_property
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from schedgen.analysis import Analysis, analyse
from schedgen.ir.file import line_of
from schedgen.ir.instructions import Op
from schedgen.ir.program import Program
from schedgen.util.errors import RefusedFile

RULES = {
    1: "every job exactly once, on the worker w names",
    2: "every operand is defined before it is used",
    3: "every SEND has its RECV or FETCH_W, in order",
    4: "no deadlock, even if every SEND blocks until it is matched",
    5: "every gradient reaches every owner exactly once, every owner steps once",
    6: "collectives are entered in one order by all members",
    7: "everything defined is freed once, nothing is used after that",
    8: "exact peak memory",
    9: "every job uses the version of its weights that the schedule's updates say",
    10: "every output and gradient of a split stage is summed over its shards once, before it is used",
}

Numbers = NDArray[np.int64]
BACKWARD = (Op.BWD, Op.BWD_I, Op.BWD_W)


class Subject:
    def __init__(self, program: Program, name: str) -> None:
        self.program, self.header, self.name = program, program.header, name
        self.rank, self.op, self.kind, self.stage, self.mb, self.via, self.peer = program.rows

    def having(self, *ops: Op) -> Numbers:
        """The rows with one of these opcodes, ascending."""
        return np.flatnonzero(np.isin(self.op, ops))

    rows_of = having

    @cached_property
    def analysis(self) -> Analysis:
        return analyse(self.program)

    @cached_property
    def owner(self) -> NDArray[np.bool_]:
        """Whether a rank owns a unit, shape (workers, units): a stage, or one part of its weights."""
        header = self.header
        owner = np.zeros((header.workers, len(self.stage_of)), bool)
        of_parts = [(rank,) for ranks in header.part_owners for rank in ranks]
        for unit, ranks in enumerate(of_parts or header.owners):
            owner[list(ranks), unit] = True
        return owner

    @cached_property
    def stage_of(self) -> Numbers:
        """The stage of each unit."""
        counts = [len(ranks) for ranks in self.header.part_owners] or [1] * self.header.stages
        return np.repeat(np.arange(self.header.stages), counts)

    @cached_property
    def first_unit(self) -> Numbers:
        """The units of stage s are first_unit[s] to first_unit[s + 1] - 1."""
        return np.searchsorted(self.stage_of, np.arange(self.header.stages + 1))

    def unit(self, rows: Numbers) -> Numbers:
        """The unit that each row names; of compute, the first of its stage."""
        found: Numbers = self.first_unit[self.stage[rows]] + np.maximum(self.via[rows], 0)
        return found

    def where(self, row: int) -> str:
        return f"{line_of(self.program, row)}: rank {self.rank[row]}: {self.program.instruction(row)}"

    def refuse(self, rule: int, row: int, reason: str) -> NoReturn:
        raise RefusedFile(f"{self.name}:{self.where(row)}: {reason} (rule {rule}: {RULES[rule]})", rule)

    def refuse_rank(self, rule: int, rank: int, reason: str) -> NoReturn:
        """Something is missing from a rank: the line is that of its list's end."""
        end = int(self.program.bounds[rank + 1])
        line = line_of(self.program, end - 1, rank) + 1
        raise RefusedFile(f"{self.name}:{line}: rank {rank}: {reason} (rule {rule}: {RULES[rule]})", rule)
