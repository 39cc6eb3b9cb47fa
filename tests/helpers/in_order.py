"""Random small lists, and everything that can happen when one is executed on a transport, interleaving by interleaving.

`outcomes` shares nothing with `schedgen.analysis` and `schedgen.checker`: it follows buffers by their names, and tries
every step that some rank or message can take next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, NamedTuple

from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.ir.instructions import COMPUTE, Instruction, Kind, Op
from schedgen.ir.program import Program, concatenate, rows
from schedgen.schemes import load
from schedgen.schemes.scheme import Sizes

BACKWARD = (Op.BWD, Op.BWD_I, Op.BWD_W)
MESSAGES = (Op.SEND, Op.RECV, Op.FETCH_W)
Carrier = Callable[[int, int, Instruction], object]  # (sender, receiver, instruction) of a message: its communicator
SCHEMES = (
    ("1f1b", Sizes(2, 3, 2)), ("1f1b", Sizes(3, 2, 3)), ("gpipe", Sizes(2, 2, 2)), ("zb-h1", Sizes(2, 2, 2)),
    ("interleaved-1f1b", Sizes(4, 2, 2)), ("zb-v", Sizes(4, 2, 2)), ("chimera", Sizes(2, 2, 2)), ("ddp", Sizes(2, 2, 2)),
    ("fsdp", Sizes(2, 2, 2)), ("fsdp", Sizes(1, 3, 3)), ("fslpp", Sizes(2, 2, 2, groups=1)), ("lpp", Sizes(2, 2, 2, groups=2)),
)  # fmt: skip


def name_of(instruction: Instruction) -> str:
    """The buffer that a message carries, or that an instruction names."""
    name = instruction._replace(op=Op.SEND, kind=Kind.W).buffer if instruction.op == Op.FETCH_W else instruction.buffer
    return f"{name} of {instruction.source}" if instruction.op == Op.RECV and instruction.kind == Kind.DW else name


def sent_name(end: Instruction) -> str:
    """The buffer that a message carries."""
    return name_of(end).partition(" ")[0]


def used(program: Program, each: Instruction) -> set[str]:
    """The buffers that exist before the instruction, and that it uses."""
    if each.op in COMPUTE:
        inputs = {f"x.{p}.{each.mb}" for p, c in program.header.graph.edges if c == each.stage}
        return {f"w.{each.stage}", *inputs} | ({f"g.{each.stage}.{each.mb}"} if each.op in BACKWARD else set())
    if each.op == Op.STEP:
        return {f"w.{each.stage}", f"dw.{each.stage}"}
    if each.op == Op.ADD:
        return {f"{name_of(each)} of {each.source}"}
    return set() if each.op in (Op.NORM, Op.RECV, Op.FETCH_W) else {name_of(each)}


def defined(program: Program, each: Instruction) -> set[str]:
    """The buffers that it defines or adds to."""
    s, b = each.stage, each.mb
    if each.op in BACKWARD:
        return {f"dw.{s}", *(f"g.{p}.{b}" for p, c in program.header.graph.edges if c == s)}
    return {f"x.{s}.{b}"} if each.op in COMPUTE else {name_of(each)} if each.op in (*MESSAGES, Op.ADD) else set()


def shuffled(random: Random) -> Program:
    """A small program whose SENDs, receives and FREEs stand in random places that keep their order with the jobs."""
    scheme, sizes = random.choice(SCHEMES)
    options = Options(prefetch=random.randint(0, 2), fan_out=random.randint(1, 2))
    program = compile(load(scheme, sizes), sizes, options)
    lists = []
    for rank in range(program.header.workers):
        listed = [(each, used(program, each) | defined(program, each)) for each in program.instructions(rank)]
        for _ in range(random.choice((0, 3, 10, 40, 150))):
            k = random.randrange(len(listed) - 1)
            (a, touched), (b, others) = listed[k : k + 2]
            if {a.op, b.op} & {*MESSAGES, Op.FREE} and not touched & others:
                listed[k : k + 2] = listed[k + 1], listed[k]
        lists.append(rows_of(rank, [each for each, _ in listed]))
    return Program(program.header, concatenate(lists))


def rows_of(rank: int, listed: list[Instruction]):
    columns = dict(zip(("op", "kind", "stage", "mb", "piece", "operand"), zip(*listed, strict=True), strict=True))
    op = columns.pop("op")
    return rows(list(op), [rank] * len(op), **{name: list(column) for name, column in columns.items()})


class Outcome(NamedTuple):
    """How an execution ends."""

    ends: bool  # every rank reaches its end, and every message is delivered
    swapped: frozenset[tuple[str, str]]  # the buffers sent and received by the messages that met another's receive


def outcomes(program: Program, carrier: Carrier | None, batch: bool = False, most: int = 100_000) -> set[Outcome]:
    """How all executions end; `carrier` None: MPI with tags, where a rank waits at each SEND until it is received.

    OverflowError if there are more than `most` states.
    """
    lists = [program.instructions(rank) for rank in range(program.header.workers)]
    events = _events(program, lists, carrier)
    of_row = {row: k for k, rows in enumerate(events) for row, _ in rows}
    queue = {row: queue for rows in events for row, queue in rows}
    run: dict[
        tuple[int, int], tuple[int, int]
    ] = {}  # by operation (rank, row): the first and the last row of its batch
    for rank, row in sorted(queue):
        joins = (
            batch and lists[rank][row].op in MESSAGES and lists[rank][row - 1].op in MESSAGES and (rank, row - 1) in run
        )
        joins = joins and not _is_relay(program, lists[rank], row)
        run[rank, row] = (run[rank, row - 1][0] if joins else row, row)
    final = {(row[0], run[row][0]): row[1] for row in sorted(run)}
    batch_of = {row: (row[0], run[row][0], queue[row]) for row in run}
    done_with = {row: sum(1 << of_row[o] for o in {o for o in run if batch_of[o] == batch_of[row]}) for row in run}
    ahead = {
        row: sum({1 << of_row[o] for o in run if o[0] == row[0] and queue[o] == queue[row] and run[o][0] < run[row][0]})
        for row in run
    }
    needs: dict[tuple[int, int], int] = {}  # by row, the events that have to be done before it
    for rank, listed in enumerate(lists):
        for k, each in enumerate(listed):
            wanted = used(program, each)
            ends = {name_of(each)} if each.op == Op.FREE else {f"w.{each.stage}"} if each.op == Op.STEP else set()
            bits = 0
            for j, earlier in enumerate(listed[:k]):
                received = earlier.op in (Op.RECV, Op.FETCH_W) and name_of(earlier) in wanted
                if received or (earlier.op == Op.SEND and name_of(earlier) in ends):
                    bits |= done_with[rank, j]
                if j == k - 1 and (
                    earlier.op in (Op.ALLREDUCE, Op.NORM) or (carrier is None and earlier.op == Op.SEND)
                ):
                    bits |= done_with[rank, j]
            needs[rank, k] = bits

    def steps(at: tuple[int, ...], done: int) -> Iterator[tuple[tuple[int, ...], int]]:
        for rank, row in enumerate(at):
            if row < len(lists[rank]) and not needs[rank, row] & ~done:
                yield (*at[:rank], row + 1, *at[rank + 1 :]), done
        for k, rows in enumerate(events):
            issued = all(at[row[0]] > final[row[0], run[row][0]] for row, _ in rows)
            if issued and not done >> k & 1 and not any(ahead[row] & ~done for row, _ in rows):
                yield at, done | 1 << k

    start = ((0,) * len(lists), 0)
    seen, stack, found = {start}, [start], set()
    while stack:
        state = stack.pop()
        following = [*steps(*state)]
        stack += [each for each in following if each not in seen]
        seen.update(following)
        if len(seen) > most:
            raise OverflowError
        if not following:
            happened = [[lists[r][k] for (r, k), _ in rows] for e, rows in enumerate(events) if state[1] >> e & 1]
            met = {tuple(sent_name(end) for end in ends) for ends in happened if ends[0].op in MESSAGES}
            swapped = {names for names in met if names[0] != names[1]}
            found.add(Outcome(state[1] + 1 == 1 << len(events), frozenset(swapped)))
    return found


def _is_relay(program: Program, listed: list[Instruction], row: int) -> bool:
    """Whether a SEND is the first to use what its rank has received."""
    name = name_of(listed[row])
    if listed[row].op != Op.SEND:
        return False
    before = [e for e in listed[:row] if name in used(program, e) | defined(program, e)]
    return bool(before) and before[-1].op in (Op.RECV, Op.FETCH_W)


def _events(program: Program, lists: list[list[Instruction]], carrier: Carrier | None) -> list[list[tuple[Any, Any]]]:
    """What can happen besides the steps of ranks: the operations that are done together, with their communicators."""
    ends: dict[Any, tuple[list[Any], ...]] = defaultdict(lambda: tuple([] for _ in range(1 + program.header.workers)))
    for rank, listed in enumerate(lists):
        for row, each in enumerate(listed):
            if each.op in MESSAGES:
                edge = (rank, each.to) if each.op == Op.SEND else (each.source, rank)
                queue = (sent_name(each), *edge) if carrier is None else carrier(*edge, each)
                ends[queue, *edge][each.op == Op.SEND].append(((rank, row), queue))
            elif each.op in (Op.ALLREDUCE, Op.NORM):
                queue = f"group {each.group}" if carrier is None else carrier(-1, -1, each)
                ends[f"group {each.group}"][rank].append(((rank, row), queue))
    return [list(rows) for lists in ends.values() for rows in zip(*filter(None, lists), strict=True)]
