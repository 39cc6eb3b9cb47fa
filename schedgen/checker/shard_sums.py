"""Rule 10: every output and gradient of a split stage is summed over its shards once, before it is used.

What a shard gives is a part: x.s.b of its FWD, g.p.b of its BWD or BWD_I for
every producer p. On the rank of that job stands one ALLREDUCE of it, of the
ranks of all shards, before any SEND of it or job that reads it. Rule 2 then
says that it stands behind the job, and rule 6 that all ranks enter it together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedgen.analysis.subject import BACKWARD, Numbers, Subject
from schedgen.ir.instructions import AnyInts, B, F, Kind, Op, buffer_name


class _Parts(NamedTuple):
    """The x, or the g, that shards give, a name and all its microbatches a row."""

    names: Numbers  # the numbers of all names, ascending
    row: Numbers  # and each one's row here
    stage: Numbers
    via: Numbers
    giver: Numbers  # the stage whose jobs give it


def rule_10(subject: Subject) -> None:
    header = subject.header
    sums = subject.having(Op.ALLREDUCE)
    if header.tensor_parallel.degree == 1:
        for row in sums[np.isin(subject.kind[sums], (Kind.X, Kind.G))][:1]:
            subject.refuse(10, int(row), "stages have no shards here")
        return
    split = np.flatnonzero(header.tensor_parallel.split)
    none = np.full_like(split, -1)
    _summed(subject, Kind.X, F, _parts(subject, split, none, split))
    edges = np.array(
        [
            (p, header.graph.gradient_consumer(p, c), c)
            for p, c in header.graph.edges
            if header.tensor_parallel.split[c]
        ],
        np.int64,
    )
    _summed(subject, Kind.G, B, _parts(subject, *edges.reshape(-1, 3).T))


def _parts(subject: Subject, stage: Numbers, via: Numbers, giver: Numbers) -> _Parts:
    names = _number(subject, stage, via)
    row = np.argsort(names)
    return _Parts(names[row], row, stage, via, giver)


def _number(subject: Subject, stage: AnyInts, via: AnyInts) -> Numbers:
    return stage.astype(np.int64) * (subject.header.stages + 1) + via + 1


def _part(subject: Subject, parts: _Parts, rows: Numbers) -> Numbers:
    """The part that each row names, or -1."""
    if not len(parts.names):
        return np.full(len(rows), -1, np.int64)
    names = _number(subject, subject.stage[rows], subject.via[rows])
    place = np.minimum(np.searchsorted(parts.names, names), len(parts.names) - 1)
    return np.where(parts.names[place] == names, parts.row[place], -1)


def _summed(subject: Subject, kind: Kind, d: int, parts: _Parts) -> None:
    header = subject.header
    rank = header.compute[d][parts.giver]  # of every part and microbatch
    rows = subject.having(Op.ALLREDUCE)
    rows = rows[subject.kind[rows] == kind]
    part, mb = _part(subject, parts, rows), subject.mb[rows]
    for row in rows[part < 0][:1]:
        subject.refuse(10, int(row), "the job that gives this is not split: it is no part of a sum")
    for row in rows[rank[part, mb] != subject.rank[rows]][:1]:
        subject.refuse(10, int(row), "this rank does not give it")
    T = header.tensor_parallel.degree
    shards = np.sort(header.compute[d].reshape(-1, T, header.microbatches), axis=1)  # their ranks
    groups = np.array([group if len(group) == T else (-1,) * T for group in header.groups], np.int64).reshape(-1, T)
    right = (groups[subject.peer[rows]] == shards[parts.giver[part] // T, :, mb]).all(axis=1)
    for row in rows[~right][:1]:
        subject.refuse(10, int(row), "this is not the group of the stage's shards")
    at = np.full(rank.shape, -1, np.int64)
    at[part, mb] = rows
    for row in rows[at[part, mb] != rows][:1]:
        subject.refuse(10, int(at[part, mb][rows == row][0]), "this is summed twice")
    for k, b in np.argwhere(at < 0)[:1].tolist():
        name = buffer_name(kind, int(parts.stage[k]), b, int(parts.via[k]))
        subject.refuse_rank(10, int(rank[k, b]), f"ALLREDUCE of {name} is missing")
    used = _first_uses(subject, kind, rank, parts)
    for k, b in np.argwhere(used < at)[:1].tolist():
        name = buffer_name(kind, int(parts.stage[k]), b, int(parts.via[k]))
        subject.refuse(10, int(used[k, b]), f"{name} is only a shard's part here")


def _first_uses(subject: Subject, kind: Kind, rank: NDArray[np.int32], parts: _Parts) -> Numbers:
    """The first row that sends or reads each part on the rank that gives it; the program's length if none does."""
    header = subject.header
    first = np.full(rank.shape, len(subject.program), np.int64)

    def note(rows: Numbers, part: Numbers) -> None:
        mine = part >= 0
        rows, part = rows[mine], part[mine]
        mb = subject.mb[rows]
        here = rank[part, mb] == subject.rank[rows]
        np.minimum.at(first, (part[here], mb[here]), rows[here])

    sends = subject.having(Op.SEND)
    sends = sends[subject.kind[sends] == kind]
    note(sends, _part(subject, parts, sends))
    # Who reads x.p are p's consumers; who reads g.s is s itself.
    jobs = subject.having(*(BACKWARD if kind == Kind.G else (Op.FWD, Op.RECOMPUTE, *BACKWARD)))
    jobs = jobs[np.argsort(subject.stage[jobs], kind="stable")]
    begin = np.searchsorted(subject.stage[jobs], np.arange(header.stages + 1))
    for k, (stage, giver) in enumerate(zip(parts.stage.tolist(), parts.giver.tolist(), strict=True)):
        readers = (stage,) if kind == Kind.G else header.graph.consumers[giver]
        for reader in readers:
            found = jobs[begin[reader] : begin[reader + 1]]
            note(found, np.full(len(found), k))
    return first
