"""FREE behind the last use of every x, g and dw (the weights pass frees weight copies).

Where the last use is a SEND, the FREE, which waits for it, stands behind the
rank's next compute instruction: the message has that long to leave.
"""

from __future__ import annotations

import numpy as np

from schedgen.passes.lookup import Places, neighbours, next_compute
from schedgen.passes.options import Options
from schedgen.program import COMPUTE, Ints, Kind, Op, Program, rows

BACKWARD = (Op.BWD, Op.BWD_I, Op.BWD_W)


def free(program: Program, _: Options) -> Program:
    header, table = program.header, program.rows
    at, kind, stage, mb, via = _accesses(program)
    rank = table.rank[at]
    key = rank.astype(np.int64)
    for part, size in ((kind, len(Kind)), (stage, header.stages), (mb, header.microbatches), (via, header.stages)):
        key = key * (size + 1) + part + 1
    order = np.lexsort((at, key))
    final = order[np.append(key[order][1:] != key[order][:-1], True)]  # the last access of each buffer
    last = at[final]
    sends = table.op[last] == Op.SEND
    last[sends] = next_compute(program, last[sends])
    order = np.argsort(last, kind="stable")
    final, last = final[order], last[order]
    new = rows(Op.FREE, rank[final], kind=kind[final], stage=stage[final], mb=mb[final], via=via[final])
    return program.insert(new, after=last)


def _accesses(program: Program) -> tuple[Places, Ints, Ints, Ints, Ints]:
    """(row, kind, stage, mb, via) of every definition and use of an x, g or dw."""
    header, table = program.header, program.rows
    found: list[tuple[Places, int, Ints, Ints, Ints]] = []

    def access(at: Places, kind: int, stage: Ints, via: Ints | None = None) -> None:
        none = np.full(len(at), -1, np.int32)
        mb = none if kind == Kind.DW else table.mb[at]
        found.append((at, kind, stage, mb, none if via is None else via))

    for kind in (Kind.X, Kind.G, Kind.DW):
        # A received partial of a dw is freed by its ADD.
        named = (table.kind == kind) & ~((table.op == Op.RECV) & (kind == Kind.DW))
        at = np.flatnonzero(named)
        access(at, kind, table.stage[at], table.via[at])

    forward = np.flatnonzero(table.op == Op.FWD)
    access(forward, Kind.X, table.stage[forward])
    compute = np.flatnonzero(np.isin(table.op, COMPUTE))
    i, producer = neighbours(table.stage[compute], header.producers)
    access(compute[i], Kind.X, producer)

    share = np.full((header.stages, header.stages), -1, np.int32) if _forks(program) else None
    if share is not None:
        for p, c in header.edges:
            share[p, c] = header.share(p, c)
    backward = np.flatnonzero(np.isin(table.op, BACKWARD))
    at, stage = backward, table.stage[backward]
    i, consumer = neighbours(stage, header.consumers)
    access(at[i], Kind.G, stage[i], None if share is None else share[stage[i], consumer])
    gives = np.flatnonzero(np.isin(table.op, (Op.BWD, Op.BWD_I)))
    i, producer = neighbours(table.stage[gives], header.producers)
    access(gives[i], Kind.G, producer, None if share is None else share[producer, table.stage[gives][i]])

    sums = np.flatnonzero(np.isin(table.op, (Op.BWD, Op.BWD_W, Op.STEP)))
    access(sums, Kind.DW, table.stage[sums])
    columns = zip(*((at, np.full(len(at), k, np.int32), s, b, v) for at, k, s, b, v in found), strict=True)
    at, *rest = (np.concatenate(column) for column in columns)
    return at, rest[0], rest[1], rest[2], rest[3]


def _forks(program: Program) -> bool:
    return any(len(consumers) > 1 for consumers in program.header.consumers)
