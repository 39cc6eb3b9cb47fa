"""Random small lists, and everything that can happen when one is executed on a transport, interleaving by interleaving.

`outcomes` shares nothing with `schedgen.analysis` and `schedgen.checker`: it follows buffers by their names, and tries
every step that some rank or message can take next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from operator import or_
from random import Random
from typing import Any, NamedTuple

from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.ir.instructions import COMPUTE, Instruction, Kind, Op
from schedgen.ir.program import Program, concatenate, rows
from schedgen.ir.transport import Communicator, Transport
from schedgen.schemes import load
from schedgen.schemes.scheme import Sizes

BACKWARD = (Op.BWD, Op.BWD_I, Op.BWD_W)
RECEIVES = (Op.RECV, Op.FETCH_W)
MESSAGES = (Op.SEND, *RECEIVES)
SUMS = (Op.ALLREDUCE, Op.NORM)
Row = tuple[int, int]  # a rank, and a place in its list
Carrier = Callable[[int, int, Instruction], object]  # (sender, receiver, an end) of a message: its communicator
SCHEMES = (
    ("1f1b", Sizes(2, 3, 2)), ("1f1b", Sizes(3, 2, 3)), ("gpipe", Sizes(2, 2, 2)), ("zb-h1", Sizes(2, 2, 2)),
    ("interleaved-1f1b", Sizes(4, 2, 2)), ("zb-v", Sizes(4, 2, 2)), ("chimera", Sizes(2, 2, 2)),
    ("ddp", Sizes(2, 2, 2)), ("fsdp", Sizes(2, 2, 2)), ("fsdp", Sizes(1, 3, 3)), ("lpp", Sizes(2, 2, 2, groups=2)),
    ("fslpp", Sizes(2, 2, 2, groups=1)),
)  # fmt: skip
CARRIERS: dict[str, Carrier | None] = {  # the communicator of a collective is asked for with sender -1
    "mpi": None,
    "one": lambda a, b, end: 0,
    "rank": lambda a, b, end: 0 if a >= 0 else ("group", end.group),
    "pair": lambda a, b, end: (min(a, b), max(a, b)) if a >= 0 else ("group", end.group),
    "edge": lambda a, b, end: (a, b) if a >= 0 else ("group", end.group),
    "edge-kind": lambda a, b, end: (a, b, end.kind) if a >= 0 else ("group", end.group),
}


def assigned(random: Random, program: Program) -> tuple[Transport, Carrier]:
    """Some communicators that carry all messages and some collectives, and the same as a function."""
    ranks, count = range(program.header.workers), random.randint(1, 4)
    edges = {
        (a, b, kind): random.randrange(count)
        for a in ranks
        for b in ranks
        for kind in (Kind.X, Kind.G, Kind.W, Kind.DW)
    }
    groups = {group: random.randrange(count + 2) for group in range(len(program.header.groups))}
    communicators = [
        Communicator(
            tuple(edge for edge, number in edges.items() if number == one),
            tuple(group for group, number in groups.items() if number == one),
        )
        for one in range(count)
    ]

    def carrier(a: int, b: int, end: Instruction) -> object:
        kind = Kind.W if end.op == Op.FETCH_W else Kind(end.kind)
        number = edges[a, b, kind] if a >= 0 else groups[end.group]
        return number if number < count else ("group", end.group)

    return Transport("in-order:some", "some", random.random() < 0.5, tuple(communicators)), carrier


def name_of(each: Instruction) -> str:
    """The buffer that an instruction names; a partial sum is one of its sender."""
    name = each._replace(op=Op.SEND, kind=Kind.W).buffer if each.op == Op.FETCH_W else each.buffer
    return f"{name} of {each.source}" if each.op == Op.RECV and each.kind == Kind.DW else name


def used(program: Program, each: Instruction) -> set[str]:
    """The buffers that exist before the instruction, and that it uses."""
    if each.op in COMPUTE:
        inputs = {f"x.{p}.{each.mb}" for p, c in program.header.graph.edges if c == each.stage}
        return {f"w.{each.stage}", *inputs} | ({f"g.{each.stage}.{each.mb}"} if each.op in BACKWARD else set())
    if each.op == Op.STEP:
        return {f"w.{each.stage}", f"dw.{each.stage}"}
    if each.op == Op.ADD:
        return {f"{name_of(each)} of {each.source}"}
    return set() if each.op in (Op.NORM, *RECEIVES) else {name_of(each)}


def touched(program: Program, each: Instruction) -> set[str]:
    """The buffers that it uses, defines or adds to."""
    s, b, defined = each.stage, each.mb, set[str]()
    if each.op in BACKWARD:
        defined = {f"dw.{s}", *(f"g.{p}.{b}" for p, c in program.header.graph.edges if c == s)}
    elif each.op in COMPUTE:
        defined = {f"x.{s}.{b}"}
    elif each.op in (*RECEIVES, Op.ADD):
        defined = {name_of(each)}
    return used(program, each) | defined


def shuffled(random: Random) -> Program:
    """A small program whose SENDs, receives and FREEs stand in random places among the uses of their buffers."""
    scheme, sizes = random.choice(SCHEMES)
    options = Options(prefetch=random.randint(0, 2), fan_out=random.randint(1, 2))
    program = compile(load(scheme, sizes), sizes, options)
    lists = []
    for rank in range(program.header.workers):
        listed = program.instructions(rank)
        for _ in range(random.choice((0, 3, 10, 40, 150))):
            k = random.randrange(len(listed) - 1)
            a, b = listed[k : k + 2]
            if {a.op, b.op} & {*MESSAGES, Op.FREE} and not touched(program, a) & touched(program, b):
                listed[k : k + 2] = b, a
        op, *fields = map(list, zip(*listed, strict=True))
        names = ("kind", "stage", "mb", "piece", "operand")
        lists.append(rows(op, [rank] * len(op), **dict(zip(names, fields, strict=True))))
    return Program(program.header, concatenate(lists))


class Outcome(NamedTuple):
    """How an execution ends."""

    ends: bool  # every rank reaches its end, and every message is delivered
    swapped: frozenset[tuple[str, ...]]  # the buffers of the SEND and the receive that met though they differ


def outcomes(program: Program, carrier: Carrier | None, batch: bool = False, most: int = 20_000) -> set[Outcome]:
    """How all executions end; `carrier` None: MPI with tags, where a rank waits at each SEND until it is received.

    OverflowError if there are more than `most` states.
    """
    lists = [program.instructions(rank) for rank in range(program.header.workers)]
    events = _events(program, lists, carrier)
    event = {row: 1 << k for k, ends in enumerate(events) for row in ends}
    queue = {row: queue for ends in events for row, queue in ends.items()}
    run: dict[Row, int] = {}  # by operation, the first row of those that are issued with it
    for rank, row in sorted(queue):
        joins = batch and (rank, row - 1) in run and _joins(program, lists[rank], row)
        run[rank, row] = run[rank, row - 1] if joins else row
    last = {(rank, first): row for (rank, row), first in sorted(run.items())}
    peers = {o: [p for p in run if p[0] == o[0] and queue[p] == queue[o]] for o in run}
    done_with = {o: _all(event[p] for p in peers[o] if run[p] == run[o]) for o in run}
    ahead = {o: _all(event[p] for p in peers[o] if run[p] < run[o]) for o in run}
    needs = {  # by row, the events that have to be done before it
        (rank, k): _all(done_with[rank, j] for j in _awaited(program, listed, k, carrier is None))
        for rank, listed in enumerate(lists)
        for k in range(len(listed))
    }

    def steps(at: tuple[int, ...], done: int) -> Iterator[tuple[tuple[int, ...], int]]:
        for rank, row in enumerate(at):
            if row < len(lists[rank]) and not needs[rank, row] & ~done:
                yield (*at[:rank], row + 1, *at[rank + 1 :]), done
        for k, ends in enumerate(events):
            issued = all(at[row[0]] > last[row[0], run[row]] for row in ends)
            if issued and not done >> k & 1 and not any(ahead[row] & ~done for row in ends):
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
            happened = [[lists[rank][k] for rank, k in ends] for e, ends in enumerate(events) if state[1] >> e & 1]
            met = {tuple(_sent(end) for end in ends) for ends in happened if ends[0].op in MESSAGES}
            swapped = {names for names in met if names[0] != names[1]}
            found.add(Outcome(state[1] + 1 == 1 << len(events), frozenset(swapped)))
    return found


def _all(bits: Iterable[int]) -> int:
    return reduce(or_, bits, 0)


def _sent(end: Instruction) -> str:
    """The buffer that a message carries."""
    return name_of(end).partition(" ")[0]


def _joins(program: Program, listed: list[Instruction], row: int) -> bool:
    """Whether a row behind a SEND or receive is issued with it: it is one, and no relay of what has just come."""
    name = name_of(listed[row]) if listed[row].op in MESSAGES else ""
    before = [each for each in listed[:row] if name in touched(program, each)]
    relays = listed[row].op == Op.SEND and any(each.op in RECEIVES for each in before[-1:])
    return listed[row].op in MESSAGES and listed[row - 1].op in MESSAGES and not relays


def _awaited(program: Program, listed: list[Instruction], row: int, blocking: bool) -> Iterator[int]:
    """The rows whose operations have to be done before a row."""
    each = listed[row]
    wanted = used(program, each)
    ended = {name_of(each)} if each.op == Op.FREE else {f"w.{each.stage}"} if each.op == Op.STEP else set()
    for k, earlier in enumerate(listed[:row]):
        received = earlier.op in RECEIVES and name_of(earlier) in wanted
        sent = earlier.op == Op.SEND and (name_of(earlier) in ended or (blocking and k == row - 1))
        if received or sent or (earlier.op in SUMS and k == row - 1):
            yield k


def _events(program: Program, lists: list[list[Instruction]], carrier: Carrier | None) -> list[dict[Row, Any]]:
    """What can happen besides the steps of ranks: the operations that are done together, with their communicators."""
    ends: dict[Any, list[list[tuple[Row, Any]]]] = defaultdict(lambda: [[] for _ in range(1 + len(lists))])
    for rank, listed in enumerate(lists):
        for row, each in enumerate(listed):
            if each.op in MESSAGES:
                a, b = (rank, each.to) if each.op == Op.SEND else (each.source, rank)
                queue = (_sent(each), a, b) if carrier is None else carrier(a, b, each)
                ends[queue, a, b][each.op == Op.SEND].append(((rank, row), queue))
            elif each.op in SUMS:
                queue = ("group", each.group) if carrier is None else carrier(-1, -1, each)
                ends["group", each.group][rank].append(((rank, row), queue))
    return [dict(rows) for lists in ends.values() for rows in zip(*filter(None, lists), strict=True)]
