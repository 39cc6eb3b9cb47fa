"""Rows that passes look for in a program in global order: those that define a buffer, jobs near a row, ends of jobs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from schedgen.ir.instructions import COMPUTE, Kind, Op
from schedgen.ir.program import Program
from schedgen.util.arrays import AnyInts, Flags, Ints, Numbers, Times
from schedgen.util.jit import kernel


def defining_rows(program: Program, kind: Kind, job: Numbers, stage: Ints, mb: Ints, consumer: Ints) -> Numbers:
    """The rows after which these x or g are complete: those of their jobs, or of the last ALLREDUCE over slices."""
    header, table = program.header, program.rows
    sums = program.rows_of(Op.ALLREDUCE)
    sums = sums[table.kind[sums] == kind]
    if not len(sums):
        return job

    def key(stage: Ints, mb: Ints, consumer: Ints) -> Numbers:
        return (stage.astype(np.int64) * header.microbatches + mb) * (header.stages + 1) + consumer + 1

    keys = key(table.stage[sums], table.mb[sums], table.consumer[sums])
    T = len(header.tensor_parallel.slices_of(int(table.stage[sums[0]])))
    last_member = sums.reshape(-1, T)[:, -1:].repeat(T, axis=1).ravel()
    order = np.argsort(keys)
    wanted = key(stage, mb, consumer)
    place = np.minimum(np.searchsorted(keys[order], wanted), len(order) - 1)
    return np.where(keys[order][place] == wanted, last_member[order][place], job)


def serving_owners(program: Program) -> list[list[int]]:
    """By stage and rank that computes it: the owner that serves the rank, the one that w names for its first job."""
    header = program.header
    serving = np.full((header.stages, header.workers), -1)
    for stage, owners in enumerate(serving):
        ranks, first_job = np.unique(header.compute[:, stage], return_index=True)
        owners[ranks] = header.weights[:, stage].flat[first_job]
    return serving.tolist()


def rows_at_end(program: Program, backward: Numbers, lengths: Mapping[str, Times]) -> Numbers:
    """By backward (BWD or BWD_W), the last row that starts before it ends; `lengths`: those of the placed scheme."""
    assert program.time is not None
    last_job = lengths.get("W", lengths.get("B", 0 * lengths["F"]))
    by_op = np.stack([last_job, last_job + lengths.get("I", 0)])[..., 0]
    ended = program.time[backward] + by_op[1 * (program.rows.op[backward] == Op.BWD), program.rows.stage[backward]]
    row: Numbers = np.maximum(np.searchsorted(program.time, ended) - 1, backward)
    return row


def earlier_compute(program: Program, row: Numbers, count: int) -> Numbers:
    """By row, the `count`-th compute row before it on its rank; the first if there are fewer; itself if none."""
    is_compute = program.is_one_of(*COMPUTE)
    count = min(count, int(np.bincount(program.rows.rank[is_compute]).max()))
    return _earlier_compute.sized(len(program))(program.rows.rank, is_compute, row, count, program.header.workers)


@kernel
def _earlier_compute(rank: Ints, is_compute: Flags, row: Numbers, count: int, workers: int) -> Numbers:
    """`earlier_compute` for ascending rows, in one pass that keeps the last `count` compute rows of each rank."""
    latest, met = np.zeros((workers, count), np.int64), np.zeros(workers, np.int64)
    earlier, at = row.copy(), 0
    for k in range(len(row)):
        while at < row[k]:
            if is_compute[at]:
                r = rank[at]
                latest[r, met[r] % count] = at
                met[r] += 1
            at += 1
        r = rank[row[k]]
        if met[r]:
            earlier[k] = latest[r, met[r] % count if met[r] >= count else 0]
    return earlier


class NextRow:
    """Finds the next row with one of some opcodes after a row on a rank, or the row before it."""

    def __init__(self, program: Program, *ops: Op) -> None:
        self.length, chosen = len(program) + 1, program.rows_of(*ops)
        self.keys = np.append(np.sort(program.rows.rank[chosen].astype(np.int64) * self.length + chosen), -1)

    def __call__(self, row: Numbers, rank: AnyInts) -> Numbers:
        """The next such row; the program's last row if there is none."""
        place = np.searchsorted(self.keys[:-1], rank.astype(np.int64) * self.length + row, side="right")
        following = self.keys[place]
        return np.where(following // self.length == rank, following % self.length, self.length - 2)

    def before(self, row: Numbers, rank: AnyInts) -> Numbers:
        """The last such row before a row; -1 if there is none."""
        place = np.searchsorted(self.keys[:-1], rank.astype(np.int64) * self.length + row)
        found = self.keys[place - 1]
        return np.where(found // self.length == rank, found % self.length, -1)


def next_compute(program: Program, row: Numbers, rank: Ints | None = None) -> Numbers:
    """The next compute row after a row on its rank (or on `rank`); the program's last row if there is none."""
    return NextRow(program, *COMPUTE)(row, program.rows.rank[row] if rank is None else rank)
