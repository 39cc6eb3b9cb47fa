"""Transports: which communicator carries each message, and so what may be delivered before what.

    mpi              every message has tags: nothing but its own SEND and receive delays it
    in-order:NAME    communicators that deliver in the order of issue, as NCCL's; NAME says which there are

In order means: each rank issues its operations (SEND, RECV, FETCH_W, ALLREDUCE, NORM) in the order of its list, and
issuing a message does not block the rank. The operations of one communicator run on a rank in the order of issue, one
at a time: a message needs its operation at both ends to be the first that is not done, and nothing is buffered.
There are no tags: within a communicator, the k-th SEND of a directed edge meets the k-th receive. A row waits until the
receive of what it first uses is done, and a row that ends or changes a buffer until the SENDs of the buffer are. A rank
waits at a collective until it is done. With +batch, adjacent SENDs and receives of a rank are one operation in each of
their communicators, as between ncclGroupStart and ncclGroupEnd: all begin together, and none is done before all are.
Only a SEND that is the first to use what the rank has received begins another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from schedgen.ir.effects import COLLECTIVES, RECEIVERS, SENDERS
from schedgen.ir.instructions import KIND_NAME, Kind
from schedgen.ir.program import Program
from schedgen.util.arrays import Numbers
from schedgen.util.errors import RefusedFile, UsageError
from schedgen.util.files import display_name, read_json, read_text

NAMES = ("one", "rank", "pair", "edge", "edge-kind")
MESSAGES = (*SENDERS, *RECEIVERS)
_IN_ORDER, _BATCH = "in-order:", "+batch"
MOST_COMMUNICATORS = 4096  # of a user's assignment: each takes time that grows with the list
_KINDS: dict[str, Kind] = {name: kind for kind, name in KIND_NAME.items() if kind != Kind.T}


class Communicator(NamedTuple):
    """What one communicator of a user's assignment carries."""

    edges: tuple[tuple[int, int, Kind], ...] = ()  # sender, receiver, and the kind of buffer; Kind.NONE: all kinds
    groups: tuple[int, ...] = ()  # whose collectives

    @property
    def as_json(self) -> dict[str, Any]:
        """Its entry in an assignment."""
        edges = [[*edge[:2], *([KIND_NAME[edge[2]]] if edge[2] else [])] for edge in self.edges]
        return {"edges": edges} | ({"groups": self.groups} if self.groups else {})


class Transport(NamedTuple):
    """Communicators that deliver in the order of issue."""

    name: str  # as in the option
    communicators: str  # one of NAMES, or the user's file
    batch: bool = False
    assigned: tuple[Communicator, ...] = ()  # by the user's file: a message goes through the first that carries it


def read_transport(text: str) -> Transport | None:
    """The transport that an option names, None: mpi. UsageError for no transport, RefusedFile for a bad assignment."""
    if text == "mpi":
        return None
    communicators, batch = text.removeprefix(_IN_ORDER).removesuffix(_BATCH), text.endswith(_BATCH)
    if not text.startswith(_IN_ORDER) or not communicators:
        raise UsageError(
            f"--transport '{text}' is none of mpi, {_IN_ORDER}{{{','.join(NAMES)},FILE}}, or these{_BATCH}"
        )
    if communicators in NAMES:
        return Transport(text, communicators, batch)
    shown = display_name(communicators)
    raw = read_json(read_text(communicators), shown)
    if not isinstance(raw, list) or not 0 < len(raw) <= MOST_COMMUNICATORS:
        raise RefusedFile(f"{shown}: an assignment is a list of 1 to {MOST_COMMUNICATORS} communicators")
    assigned = tuple(_communicator(entry, f"{shown}: entry {k}") for k, entry in enumerate(raw))
    return Transport(text, communicators, batch, assigned)


def _communicator(entry: Any, where: str) -> Communicator:
    """One entry of an assignment; `where` it stands, for a refusal."""
    try:
        named = Communicator(**entry)
        return Communicator(tuple(_edge(*edge) for edge in named.edges), tuple(map(_number, named.groups)))
    except (TypeError, ValueError, LookupError):
        form = '{"edges": [[sender, receiver], [sender, receiver, "x"], ...], "groups": [number, ...]}'
        raise RefusedFile(f"{where}: a communicator is {form}") from None


def _edge(sender: Any, receiver: Any, kind: Any = None) -> tuple[int, int, Kind]:
    return _number(sender), _number(receiver), Kind.NONE if kind is None else _KINDS[kind]


def _number(value: Any) -> int:
    """A rank or a group; ValueError for anything else."""
    if type(value) is not int or not 0 <= value < 2**31:
        raise ValueError
    return value


def communicators(program: Program, transport: Transport) -> Numbers:
    """By row of a projected program, the communicator of its operation, numbered from 0; -1: it has none.

    RefusedFile if no communicator of the user's carries a message. Collectives have communicators of their own, one a
    group, except that those that an assignment names share one with messages, and with `one` all do.
    """
    table, workers, chosen = program.rows, program.header.workers, transport.communicators
    rows, sums = program.rows_of(*MESSAGES), program.rows_of(*COLLECTIVES)
    own, other, kind = table.rank[rows].astype(np.int64), table.operand[rows], table.kind[rows]
    edge = np.where(program.is_one_of(*SENDERS)[rows], own * workers + other, other * workers + own)
    own_one = workers * workers * len(Kind)  # above all numbers of messages
    number = np.full(len(program), -1, np.int64)
    number[sums] = own_one + table.group[sums]
    if transport.assigned:
        for k, carried in reversed([*enumerate(transport.assigned)]):
            for a, b, of in carried.edges:
                number[rows[(edge == a * workers + b) & (b < workers) & ((kind == of) | (of == Kind.NONE))]] = k
            number[sums[np.isin(table.group[sums], carried.groups)]] = k
        for row in rows[number[rows] < 0][:1].tolist():
            raise RefusedFile(
                f"{chosen}: no communicator carries this: rank {table.rank[row]}: {program.instruction(row)}"
            )
    elif chosen in ("one", "rank"):
        number[np.concatenate([rows, sums]) if chosen == "one" else rows] = 0
    elif chosen == "pair":
        number[rows] = np.minimum(own, other) * workers + np.maximum(own, other)
    else:
        number[rows] = edge * len(Kind) + kind if chosen == "edge-kind" else edge
    has = np.flatnonzero(number >= 0)
    number[has] = np.unique(number[has], return_inverse=True)[1]
    return number


def in_queue_order(place: Numbers, queue: Numbers) -> Numbers:
    """The least places, none below those given, at which no operation is above one that comes before it in its queue.

    Operations are sorted by `queue`, which is not below 0, and within each are in its order.
    """
    above = queue * (int(place.max(initial=0)) + 2)  # apart, so that one maximum does for all
    least: Numbers = np.maximum.accumulate(place + above) - above
    return least


def queues(program: Program, transport: Transport) -> Numbers:
    """By row, a number for its rank and communicator together; -1: it has no communicator."""
    communicator = communicators(program, transport)
    return np.where(communicator < 0, -1, communicator * program.header.workers + program.rows.rank)
