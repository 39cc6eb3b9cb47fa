"""The checker against the reference machine: random programs, and mutants of them.

    python tests/helpers/fuzz_check.py --count 200000 --processes 2

Every program, and every mutant of it, is written, read, checked and executed. The machine must execute what `check`
accepts, with the peaks that `check` reports: any other file is printed, left in build/fuzz, and makes the exit code 1.
Files that `check` refuses and the machine executes are counted by rule and reason. A seed gives the same mutants again.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import mutations
import numpy as np
from edited_programs import written

from schedgen.checker import check, check_compiled
from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.ir.file import read
from schedgen.ir.instructions import COMPUTE, DIRECTIONS, B, F, Instruction, Kind, Op
from schedgen.ir.program import Program, concatenate, rows
from schedgen.ir.reference_machine import CannotExecute, execute
from schedgen.schemes import SCHEMES, load
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.util.errors import RefusedFile, UsageError
from schedgen.util.jit import compiled_always

EACH = 100  # mutants of a program
FAILED = Path("build/fuzz")


class Verdict(NamedTuple):
    """What the checker, or the machine, says of a file."""

    right: bool
    words: str  # why not
    peaks: list[list[int]]  # by rank and kind of buffer


# Programs


def a_program(chance: Random) -> Program:
    """A small program by a built-in scheme or a random one, with random options."""
    while True:
        try:
            program = chance.choice((of_a_scheme, of_random_functions, of_random_functions))(chance)
            check_compiled(program)
        except UsageError:
            continue
        if len(program) <= 250:
            return program


def of_a_scheme(chance: Random) -> Program:
    name, tensor = chance.choice(list(SCHEMES)), chance.choice((1, 1, 1, 2))
    S, batches, workers = chance.choice((1, 2, 2, 3, 4)), chance.randrange(1, 5), chance.choice((None, 1, 2, 4))
    shards = (chance.choice((2, 3)),) if chance.randrange(6) == 0 else None
    replicas = tuple(chance.choice((1, 2)) for _ in range(S)) if name in ("1f1b-rr", "pipedream") else None
    groups = chance.choice((1, 2)) if name in ("lpp", "fslpp") else None
    sizes = Sizes(S, batches, workers, groups=groups, shards=shards, replicas=replicas)
    scheme = load(name, sizes, tensor)
    return compile(scheme, sizes, options(chance, S, scheme.mode == "greedy", tensor))


def options(chance: Random, S: int, greedy: bool, tensor: int) -> Options:
    more: dict[str, Any] = {}
    if S > 1 and chance.randrange(3) == 0:
        more["tied"] = [sorted(chance.sample(range(S), 2)) for _ in range(chance.choice((1, 1, 2)))]
    if tensor > 1:
        more |= {"tensor": tensor, "replicated_stages": [s for s in range(S) if chance.randrange(2)]}
    elif chance.randrange(6) == 0:
        more["updates"] = chance.choice(("stash", "vertical", "2bw"))
    if greedy and chance.randrange(4) == 0:
        more["memory_limit"] = chance.randrange(1, 4)
    return Options(
        weight_slots=chance.randrange(1, 4),
        fan_out=chance.randrange(1, 4),
        prefetch=chance.randrange(3),
        recompute=[chance.choice((s, (s, 0))) for s in range(S) if chance.randrange(3) == 0],
        **more,
    )


def of_random_functions(chance: Random) -> Program:
    """Any placement, any owners, any n, any DAG that ends in one loss, slices of stages where w puts them."""
    S, batches, workers, directions = (chance.randrange(*ends) for ends in ((1, 4), (1, 5), (1, 4), (2, 4)))
    numbers, T = np.random.default_rng(chance.randrange(2**32)), chance.choice((1, 1, 2))
    shape = (directions, S, batches)
    compute = numbers.integers(0, workers, shape)
    if chance.randrange(3):
        compute[B:] = compute[F]
    compute[directions - 1] = compute[B]
    one_owner = np.broadcast_to(numbers.integers(0, workers, (1, S, 1)), shape)
    weights = chance.choice((compute, compute, one_owner, numbers.integers(0, workers, shape)))
    n = numbers.integers(0, 9, shape)
    edges = [(p, c) for p in range(S - 1) for c in sorted({p + 1, *chance.sample(range(p + 1, S), 1)})]
    forks = [p for p in range(S - 1) if sum(producer == p for producer, _ in edges) > 1]
    at = np.array([numbers.permutation(T + 1)[:T] for _ in range(S * batches)]).reshape(S, batches, T)
    by_stage = chance.randrange(2)

    def w(s: Any, b: Any, d: Any, t: Any) -> Any:
        on = at[s, 0 * b if by_stage else b, t]
        return on, on

    by_slice = T > 1 and chance.randrange(2) == 0
    scheme = Scheme(
        "random", T + 1 if by_slice else workers,
        w if by_slice else lambda s, b, d: (weights[d, s, b], compute[d, s, b]),
        lambda s, b, d: n[d, s, b], "random", "greedy", split=directions == 3, edges=tuple(edges),
        per_consumer=tuple(p for p in forks if T == 1 and chance.randrange(2)), by_slice=by_slice,
    )  # fmt: skip
    cost = {name: chance.randrange(1, 4) for name in DIRECTIONS[directions]}
    sizes = Sizes(S, batches, T + 1 if by_slice else workers)
    return compile(scheme, sizes, replace(options(chance, S, True, T), cost=cost))


# Mutants: of the rows of a program, and of the lines of its file


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
            new += [(at + 1, receiver, i._replace(op=get, last=sender)), (at + 1, receiver, other)]
    return with_rows(program, new) if new else program


ROWS: tuple[Callable[[Random, Program], Program], ...] = (
    a_neighbour, a_neighbour, a_neighbour, a_place, a_swap, beside_norm, less, twice, elsewhere, together, an_operand,
    an_operand, a_sum_of_all, a_message_again,
)  # fmt: skip


def a_header(chance: Random, data: bytes) -> bytes:
    """A number of the header becomes another small one: a worker, a stage, a limit, a version."""
    end = data.find(b'"programs"')
    numbers = list(re.finditer(rb"(?<=[\[ ])\d+(?=[,\]}])", data[:end]))
    number = chance.choice(numbers)
    return data[: number.start()] + str(chance.randrange(4)).encode() + data[number.end() :]


LINES = (*mutations.LINES, a_header, a_header, a_header, a_header)


def mutant(chance: Random, program: Program, data: bytes) -> bytes:
    if chance.randrange(3):
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            program = chance.choice(ROWS)(chance, program)
        return written(program)
    for _ in range(chance.choice((1, 1, 2))):
        data = chance.choice(LINES)(chance, data)
    return mutations.sealed(data)


# Verdicts


def by_checker(program: Program) -> Verdict:
    try:
        memory = check(program)
    except RefusedFile as error:
        reason = re.sub(r"^.*?rank \d+: (\{.*?\}: )?", "", str(error))
        return Verdict(False, re.sub(r"\d+", "#", reason.partition(" (rule ")[0]) + f" (rule {error.rule})", [])
    return Verdict(True, "", [[int(peak[rank]) for peak in memory] for rank in range(program.header.workers)])


def by_machine(program: Program) -> Verdict:
    try:
        most = execute(program)
    except CannotExecute as error:
        return Verdict(False, str(error), [])
    return Verdict(True, "", [list(peaks.values()) for peaks in most])


def judge(data: bytes, tally: Counter[str]) -> str:
    """Compare both verdicts on a file, and count them; return what is wrong with them, or nothing."""
    try:
        program, fault = read(io.BytesIO(data), "mutant")
    except RefusedFile:
        tally["refused in reading"] += 1
        return ""
    if fault:
        tally["refused in reading"] += 1
        return ""
    checker, machine = by_checker(program), by_machine(program)
    if checker == machine:
        tally["accepted and right"] += 1
    elif not checker.right and not machine.right:
        tally["refused and wrong"] += 1
    elif machine.right and not checker.right:
        tally["refused and right"] += 1
        tally[f"  {checker.words}"] += 1
    else:
        tally["accepted and wrong"] += 1
        return machine.words or f"peaks {checker.peaks}, but {machine.peaks}"
    return ""


def campaign(count: int, seed: str) -> tuple[Counter[str], int]:
    """Judge `count` mutants; return the counts of verdicts, and the number of programs."""
    tally, chance, programs = Counter[str](), Random(seed), 0
    with compiled_always():
        while count > 0:
            program = a_program(chance)
            data, programs = written(program), programs + 1
            for k in range(min(EACH, count) + 1):
                judged = data if k == 0 else mutant(chance, program, data)
                before = tally.copy() if k == 0 else tally
                if words := judge(judged, tally):
                    report(judged, words, f"{seed}-{programs}-{k}")
                if k == 0 and tally["accepted and right"] == before["accepted and right"]:
                    report(judged, "what is compiled is refused", f"{seed}-{programs}-{k}")
                    tally["accepted and wrong"] += 1
            count -= EACH
    return tally, programs


def report(data: bytes, words: str, name: str) -> None:
    FAILED.mkdir(parents=True, exist_ok=True)
    (FAILED / f"check-{name}.json").write_bytes(data)
    print(f"check-{name}.json: {words}", file=sys.stderr, flush=True)


def run_all(count: int, processes: int, seed: int) -> int:
    """Run campaigns in several processes; return the exit code."""
    share = 20 * EACH
    seeds = [f"{seed}-{k}" for k in range(-(-count // share))]
    total, programs = Counter[str](), 0
    with ProcessPoolExecutor(processes) as pool:
        for k, (tally, some) in enumerate(pool.map(campaign, [share] * len(seeds), seeds)):
            total, programs = total + tally, programs + some
            print(f"{(k + 1) * share} mutants, {total['accepted and wrong']} wrong", file=sys.stderr, flush=True)
    print(f"{programs} programs, {len(seeds) * share} mutants")
    for words, number in sorted(total.items(), key=lambda item: (item[0].startswith(" "), -item[1])):
        print(f"{number:8} {words}")
    return int(total["accepted and wrong"] > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=200_000, help="mutants")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sys.exit(run_all(arguments.count, arguments.processes, arguments.seed))
