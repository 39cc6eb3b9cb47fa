"""Mutants of programs: rows moved, repeated, left out, inserted and changed, and lines of the file likewise."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from random import Random
from typing import Any

import mutations
import numpy as np
from edited_programs import written

from schedgen.ir.file import read
from schedgen.ir.instructions import COMPUTE, Instruction, Kind, Op
from schedgen.ir.program import Program, concatenate, rows
from schedgen.util.errors import RefusedFile


def some_row(chance: Random, program: Program) -> int:
    """A row: each opcode is as likely as any other."""
    ops = program.rows.op
    return chance.choice(np.flatnonzero(ops == chance.choice(np.unique(ops).tolist())).tolist())


def reordered(program: Program, order: list[int], ranks: Any = None) -> Program:
    rows = program.rows.take(np.array(order, np.int64))
    return Program(program.header, rows if ranks is None else rows._replace(rank=ranks)).project()


def moved(program: Program, row: int, to: int) -> Program:
    """The program with row `row` moved to where row `to` of its rank is now."""
    order = list(range(len(program)))
    order.insert(to, order.pop(row))
    return reordered(program, order)


def stretch(program: Program, row: int) -> range:
    """The rows of a row's rank."""
    rank = int(program.rows.rank[row])
    return range(*program.bounds[rank : rank + 2].tolist())


def a_neighbour(chance: Random, program: Program) -> Program:
    row = some_row(chance, program)
    to = row + chance.choice((-3, -2, -1, -1, -1, 1, 1, 1, 2, 3))
    return moved(program, row, to) if to in stretch(program, row) else program


def a_place(chance: Random, program: Program) -> Program:
    row = some_row(chance, program)
    return moved(program, row, chance.choice(stretch(program, row)))


def a_swap(chance: Random, program: Program) -> Program:
    """Swap two instructions of one opcode on one rank."""
    row, order = some_row(chance, program), list(range(len(program)))
    other = chance.choice([at for at in stretch(program, row) if program.rows.op[at] == program.rows.op[row]])
    order[row], order[other] = other, row
    return reordered(program, order)


def beside_norm(chance: Random, program: Program) -> Program:
    row = some_row(chance, program)
    norms = [at for at in stretch(program, row) if program.rows.op[at] == Op.NORM]
    return moved(program, row, norms[0]) if norms else program


def less(chance: Random, program: Program) -> Program:
    row = some_row(chance, program)
    return reordered(program, [at for at in range(len(program)) if at != row])


def twice(chance: Random, program: Program) -> Program:
    row, order = some_row(chance, program), list(range(len(program)))
    order.insert(chance.choice(stretch(program, row)), row)
    return reordered(program, order)


def elsewhere(chance: Random, program: Program) -> Program:
    """Move a row to a random rank."""
    row, ranks = some_row(chance, program), program.rows.rank.copy()
    ranks[row] = chance.randrange(program.header.workers)
    return reordered(program, list(range(len(program))), ranks)


def together(chance: Random, program: Program) -> Program:
    """Swap the same two of an opcode's instructions on every rank."""
    op, order = program.rows.op[some_row(chance, program)], list(range(len(program)))
    k = chance.randrange(4)
    for rank in range(program.header.workers):
        rows = [at for at in range(*program.bounds[rank : rank + 2].tolist()) if program.rows.op[at] == op]
        if len(rows) > k + 1:
            order[rows[k]], order[rows[k + 1]] = order[rows[k + 1]], order[rows[k]]
    return reordered(program, order)


def an_operand(chance: Random, program: Program) -> Program:
    header, rows, row = program.header, program.rows, some_row(chance, program)
    column = chance.choice(("stage", "mb", "piece", "operand", "op"))
    values = getattr(rows, column).copy()
    peers = len(header.groups) if rows.op[row] in (Op.ALLREDUCE, Op.NORM) else max(header.workers, header.microbatches)
    most = {"stage": header.stages, "mb": header.microbatches, "piece": header.stages, "operand": peers}
    if column == "op" and rows.op[row] in COMPUTE:
        values[row] = chance.choice(COMPUTE)
    elif column != "op" and values[row] >= 0:
        count = len(header.tied) if column == "stage" and rows.kind[row] == Kind.T else most[column]
        values[row] = chance.randrange(max(count, 1))
    return Program(header, rows._replace(**{column: values}))


def with_rows(program: Program, new: list[tuple[int, int, Instruction]]) -> Program:
    """The program with `new` inserted: (row, rank, instruction), each before the row."""
    rank, *columns = np.array([(rank, *instruction) for _, rank, instruction in new], np.int32).reshape(-1, 7).T
    op, kind, stage, mb, piece, operand = columns
    added = rows(op, rank, kind=kind, stage=stage, mb=mb, piece=piece, operand=operand)
    order = np.argsort(np.array([*range(len(program)), *(at - 0.5 for at, _, _ in new)]), kind="stable")
    return Program(program.header, concatenate([program.rows, added]).take(order)).project()


def a_sum_of_all(chance: Random, program: Program) -> Program:
    """Insert, before NORM, an ALLREDUCE of a stage's gradient by any group."""
    header, stage, group = program.header, chance.randrange(program.header.stages), 0
    if not header.groups or header.weight_shards:
        return program
    group, new = chance.randrange(len(header.groups)), []
    for rank in header.groups[group]:
        norm = [at for at in range(*program.bounds[rank : rank + 2].tolist()) if program.rows.op[at] == Op.NORM]
        if not norm:
            return program
        new.append((norm[0], rank, Instruction(Op.ALLREDUCE, Kind.DW, stage, -1, -1, group)))
        if rank not in header.owners[stage]:
            new.append((norm[0] + 1, rank, Instruction(Op.FREE, Kind.DW, stage, -1, -1, -1)))
    return with_rows(program, new)


def a_message_again(chance: Random, program: Program) -> Program:
    """What was received and freed is sent, received and freed once more."""
    row = some_row(chance, program)
    i, rank = program.instruction(row), int(program.rows.rank[row])
    if i.op not in (Op.SEND, Op.RECV, Op.FETCH_W):
        return program
    sender, receiver = (rank, i.operand) if i.op == Op.SEND else (i.operand, rank)
    new = []
    for at in range(len(program)):
        other = program.instruction(at)
        if other[1:5] != i[1:5]:
            continue
        if (other.op, program.rows.rank[at], other.operand) == (Op.SEND, sender, receiver):
            new.append((at + 1, sender, other))
        elif (other.op, program.rows.rank[at]) == (Op.FREE, receiver):
            get = Op.FETCH_W if i.kind == Kind.W else Op.RECV
            new += [(at + 1, receiver, i._replace(op=get, operand=sender)), (at + 1, receiver, other)]
    return with_rows(program, new) if new else program


def an_offload(chance: Random, program: Program) -> Program:
    """What a forward saves is copied to the host, freed, and brought back, in three ascending places of its list."""
    row = some_row(chance, program)
    i, rows = program.instruction(row), stretch(program, row)
    if i.op not in COMPUTE:
        return program
    at = sorted(chance.choice(rows) for _ in range(3))
    copies = (i._replace(op=op, kind=Kind.SAVED, operand=-1) for op in (Op.OFFLOAD, Op.FREE, Op.RELOAD))
    return with_rows(
        program, [(place, int(program.rows.rank[row]), each) for place, each in zip(at, copies, strict=True)]
    )


def a_loan(chance: Random, program: Program) -> Program:
    """What a forward saves goes to another rank and comes back, with three ascending places in either list."""
    row, header = some_row(chance, program), program.header
    i, rank, other = program.instruction(row), int(program.rows.rank[row]), chance.randrange(header.workers)
    rows = range(*program.bounds[other : other + 2].tolist())
    if i.op not in COMPUTE or not rows:
        return program
    saved, new = i._replace(kind=Kind.SAVED, operand=-1), []
    for of, to, places, ops in (
        (rank, other, stretch(program, row), (Op.SEND, Op.FREE, Op.RECV)),
        (other, rank, rows, (Op.RECV, Op.SEND, Op.FREE)),
    ):
        at = sorted(chance.choice(places) for _ in ops)
        each = (saved._replace(op=op, operand=-1 if op == Op.FREE else to) for op in ops)
        new += [(place, of, one) for place, one in zip(at, each, strict=True)]
    return with_rows(program, new)


ROWS: tuple[Callable[[Random, Program], Program], ...] = (
    a_neighbour, a_neighbour, a_neighbour, a_place, a_swap, beside_norm, less, twice, elsewhere, together, an_operand,
    an_operand, a_sum_of_all, a_message_again, an_offload, an_offload, a_loan, a_loan,
)  # fmt: skip


def a_header(chance: Random, data: bytes) -> bytes:
    """A number of the header becomes another small one: a worker, a stage, a limit, a version."""
    end = data.find(b'"programs"')
    numbers = list(re.finditer(rb"(?<=[\[ ])\d+(?=[,\]}])", data[:end]))
    number = chance.choice(numbers)
    return data[: number.start()] + str(chance.randrange(4)).encode() + data[number.end() :]


LINES = (*mutations.LINES, a_header, a_header, a_header, a_header)


def mutant(chance: Random, program: Program) -> Program | None:
    """A mutant, as it is read from its file; None if reading refuses it."""
    if chance.randrange(3):
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            program = chance.choice(ROWS)(chance, program)
        data = written(program)
    else:
        data = written(program)
        for _ in range(chance.choice((1, 1, 2))):
            data = chance.choice(LINES)(chance, data)
        data = mutations.sealed(data)
    try:
        program, fault = read(io.BytesIO(data), "mutant")
    except RefusedFile:
        return None
    return None if fault else program
