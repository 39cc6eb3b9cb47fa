"""Finding rows and neighbours in a program in global order; used by the passes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schedgen.ir.instructions import COMPUTE, Ints, Kind, Op
from schedgen.ir.program import Program

Places = NDArray[np.int64]


def rows_of(program: Program, *ops: Op) -> Places:
    """The row of each job (s, b) under one of `ops`, shape (S, B); -1 where there is none."""
    header = program.header
    places = np.full((header.stages, header.microbatches), -1, np.int64)
    found = np.flatnonzero(np.isin(program.rows.op, ops))
    places[program.rows.stage[found], program.rows.mb[found]] = found
    return places


def given(program: Program, kind: Kind, at: Places, stage: Places | Ints, mb: Places, via: Places) -> Places:
    """The rows behind which x or g of these names are there: of jobs `at`, or behind the last member of their sum."""
    header, table = program.header, program.rows
    found = np.flatnonzero((table.op == Op.ALLREDUCE) & (table.kind == kind))
    if not len(found):
        return at

    def key(stage: Places | Ints, mb: Places | Ints, via: Places | Ints) -> Places:
        return (stage.astype(np.int64) * header.microbatches + mb) * (header.stages + 1) + via + 1

    keys = key(table.stage[found], table.mb[found], table.via[found])
    last = (
        found.reshape(-1, header.tensor_parallel.degree)[:, -1:].repeat(header.tensor_parallel.degree, axis=1).ravel()
    )
    order = np.argsort(keys)
    wanted = key(stage, mb, via)
    place = np.minimum(np.searchsorted(keys[order], wanted), len(order) - 1)
    return np.where(keys[order][place] == wanted, last[order][place], at)


def home(program: Program, rank: int, stage: int) -> int:
    """The owner that serves `rank`, which computes a stage it does not own: the one its first job names."""
    header = program.header
    d, b = np.argwhere(header.compute[:, stage] == rank)[0]
    return int(header.weights[d, stage, b])


def behind(program: Program, backward: Places) -> Places:
    """The last row that happens before each of these backwards (BWD or BWD_W) has ended."""
    assert program.time is not None
    cost = program.header.cost
    last_job = cost.get("W", cost.get("B", 0))
    whole = program.rows.op[backward] == Op.BWD
    ended = program.time[backward] + np.where(whole, last_job + cost.get("I", 0), last_job)
    return np.maximum(np.searchsorted(program.time, ended) - 1, backward)


def earlier_compute(program: Program, at: Places, count: int) -> Places:
    """The `count`-th compute row before row `at` on its rank; the first if there are fewer; `at` if there is none."""
    rank = program.rows.rank[at].astype(np.int64)
    keys, length = _compute_keys(program)
    place = np.maximum(np.searchsorted(keys, rank * length + at) - count, np.searchsorted(keys, rank * length))
    found = np.append(keys, -1)[place]
    return np.where(found // length == rank, np.minimum(found % length, at), at)


def next_compute(program: Program, at: Places, rank: Ints | None = None) -> Places:
    """The next compute row behind row `at` on its rank (or on `rank`); the program's last row if there is none."""
    rank = program.rows.rank[at] if rank is None else rank
    keys, length = _compute_keys(program)
    following = np.append(keys, -1)[np.searchsorted(keys, rank.astype(np.int64) * length + at, side="right")]
    return np.where(following // length == rank, following % length, len(program) - 1)


def _compute_keys(program: Program) -> tuple[Places, int]:
    """rank * length + row of every compute row, ascending; and `length`."""
    compute = np.flatnonzero(np.isin(program.rows.op, COMPUTE))
    length = len(program) + 1
    return np.sort(program.rows.rank[compute].astype(np.int64) * length + compute), length
