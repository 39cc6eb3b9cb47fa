"""Rules 2, 7 and 8: the life of every buffer on every rank.

What an instruction does to which buffer is said once, in `lives`. The events
that touch one buffer on one rank, in program order, must then read
    DEFINE USE* END
where ADD_TO may stand for DEFINE (the first part of a sum) and for USE, an
owned weight is there from the start to the end, and a fetched weight may have
several lives.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedgen.check.subject import BACKWARD, Numbers, Subject
from schedgen.program import Kind, Op, buffer_name

# What takes memory on a rank, in the order of `Memory`.
X, G, WEIGHT, DW, PARTIAL, SAVED = range(6)
DEFINE, ADD_TO, USE, END = range(4)
THING = {Kind.X: X, Kind.G: G, Kind.W: WEIGHT, Kind.DW: DW}


class Memory(NamedTuple):
    """The most buffers of each kind alive at once, one array entry a rank."""

    activation: Numbers  # x, computed or received
    gradient: Numbers  # g
    weight: Numbers  # copies of stages the rank does not own
    weight_gradient: Numbers  # dw
    partial: Numbers  # received dw, not added yet
    saved: Numbers  # what a forward keeps for its backward: the seed's activation storage


class Events(NamedTuple):
    """What happens to buffers, sorted by rank, then buffer, then row."""

    row: Numbers
    what: Numbers  # DEFINE, ADD_TO, USE or END
    thing: Numbers  # X .. SAVED
    stage: Numbers
    second: Numbers  # the microbatch; the sender of a PARTIAL; -1
    via: Numbers
    buffer: Numbers  # a number for each buffer on each rank


def lives(subject: Subject) -> Events:
    """Every event of every buffer: the meaning of the instruction set."""
    header = subject.header
    parts: list[tuple[Numbers, ...]] = []

    def event(
        rows: Numbers, what: int, thing: int, second: object = -1, stage: object = None, via: object = -1
    ) -> None:
        columns = (what, thing, subject.stage[rows] if stage is None else stage, second, via)
        parts.append((rows, *(np.broadcast_to(np.asarray(column, np.int64), rows.shape) for column in columns)))

    def job(ops: tuple[Op, ...], what: int, thing: int) -> None:
        rows = subject.having(*ops)
        event(rows, what, thing, subject.mb[rows])

    def whole(ops: tuple[Op, ...], what: int, thing: int) -> None:
        event(subject.having(*ops), what, thing)

    compute = (Op.FWD, Op.RECOMPUTE, *BACKWARD)
    # A forward that is redone later saves nothing the first time.
    forward, again = subject.having(Op.FWD), subject.having(Op.RECOMPUTE)
    redone = np.zeros((header.stages, header.microbatches), bool)
    redone[subject.stage[again], subject.mb[again]] = True
    keeps = np.concatenate([forward[~redone[subject.stage[forward], subject.mb[forward]]], again])
    event(keeps, DEFINE, SAVED, subject.mb[keeps])
    job((Op.BWD_I,), USE, SAVED)
    job((Op.BWD, Op.BWD_W), END, SAVED)
    # Outputs and their gradients. The last stage's output is the loss: it has none, and nobody needs it.
    job((Op.FWD,), DEFINE, X)
    _along_edges(subject, compute, USE, X, event)
    _along_edges(subject, (Op.BWD, Op.BWD_I), DEFINE, G, event)
    _along_edges(subject, BACKWARD, USE, G, event)
    # Weights and their gradients.
    whole((*compute, Op.STEP), USE, WEIGHT)
    whole((Op.BWD, Op.BWD_W, Op.ADD, Op.ALLREDUCE), ADD_TO, DW)
    whole((Op.STEP,), USE, DW)
    rows = subject.having(Op.ADD)
    event(rows, END, PARTIAL, subject.peer[rows])
    # Messages and FREE name their buffer.
    for op, what in ((Op.RECV, DEFINE), (Op.FETCH_W, DEFINE), (Op.SEND, USE), (Op.FREE, END)):
        for kind, thing in THING.items():
            rows = np.flatnonzero((subject.op == op) & (subject.kind == kind))
            if op == Op.RECV and kind == Kind.DW:
                event(rows, DEFINE, PARTIAL, subject.peer[rows])
            else:
                event(rows, what, thing, subject.mb[rows], via=subject.via[rows])
    return _sort(subject, [np.concatenate(column) for column in zip(*parts, strict=True)])


def _along_edges(subject: Subject, ops: tuple[Op, ...], what: int, thing: int, event: object) -> None:
    """x.p.b and g.p.b for every edge (p, c) at a job of c; USE of g at a job of p."""
    assert callable(event)
    header = subject.header
    rows = subject.having(*ops)
    rows = rows[np.argsort(subject.stage[rows], kind="stable")]
    bounds = np.searchsorted(subject.stage[rows], np.arange(header.stages + 1))
    for producer, consumer in header.edges:
        at = producer if (what, thing) == (USE, G) else consumer
        some = rows[bounds[at] : bounds[at + 1]]
        via = header.share(producer, consumer) if thing == G else -1
        event(some, what, thing, subject.mb[some], producer, via)


def _sort(subject: Subject, columns: list[Numbers]) -> Events:
    header = subject.header
    row, _, thing, stage, second, via = columns
    # A gradient is one a stage, or one an edge where several stages read the output.
    slot = stage.copy()
    forked = np.array([len(consumers) > 1 for consumers in header.consumers])
    loss = np.array([not consumers for consumers in header.consumers])
    wrong = (thing == G) & ((forked[stage] != (via >= 0)) | loss[stage])
    if forked.any():
        shared = np.flatnonzero(via >= 0)
        edges = np.array(header.edges, np.int64) @ (header.stages, 1)  # sorted, as header.edges is
        asked = stage[shared] * header.stages + via[shared]
        found = np.minimum(np.searchsorted(edges, asked), len(edges) - 1)
        wrong[shared] |= edges[found] != asked
        slot[shared] = header.stages + found
    if wrong.any():
        subject.refuse(2, int(row[wrong].min()), "there is no such gradient")
    buffer = subject.rank[row].astype(np.int64)
    seconds = max(header.microbatches, header.workers) + 1
    for size, part in ((6, thing), (header.stages + len(header.edges), slot), (seconds, second + 1)):
        buffer = buffer * size + part
    order = np.lexsort((row, buffer))
    return Events(*(column[order] for column in (*columns, buffer)))


def _name(events: Events, i: int) -> str:
    thing, stage, second, via = (int(column[i]) for column in (events.thing, events.stage, events.second, events.via))
    if thing == SAVED:
        return f"what the forward of stage {stage}, microbatch {second} saves"
    if thing == PARTIAL:
        return f"dw.{stage} from rank {second}"
    return buffer_name(list(THING)[thing], stage, second, via)


def _owned(subject: Subject, events: Events) -> NDArray[np.bool_]:
    owned: NDArray[np.bool_] = (events.thing == WEIGHT) & subject.owner[subject.rank[events.row], events.stage]
    return owned


def rule_2(subject: Subject, events: Events) -> None:
    first = np.append(True, events.buffer[1:] != events.buffer[:-1])
    wrong = np.flatnonzero(first & (events.what >= USE) & ~_owned(subject, events))
    if len(wrong):
        i = int(wrong[np.argmin(events.row[wrong])])
        subject.refuse(2, int(events.row[i]), f"{_name(events, i)} is not defined on this rank before this line")


def rule_7(subject: Subject, events: Events) -> None:
    owned = _owned(subject, events)
    same = np.append(False, events.buffer[1:] == events.buffer[:-1])
    last = np.append(~same[1:], True)
    ended = np.roll(events.what, 1) == END
    fetched = (events.thing == WEIGHT) & (events.what == DEFINE)
    found: list[tuple[int, str]] = []
    for wrong, words in (
        (
            owned & ((events.what == DEFINE) | (events.what == END)),
            "belongs to this rank: it is neither fetched nor freed",
        ),
        (same & ended & ~fetched, "is used again after its end"),
        (same & ~ended & (events.what == DEFINE), "is defined twice"),
        (last & (events.what != END) & ~owned, "is never freed after this, its last use"),
    ):
        places = np.flatnonzero(wrong)
        if len(places):
            i = int(places[np.argmin(events.row[places])])
            found.append((int(events.row[i]), f"{_name(events, i)} {words}"))
    if found:
        subject.refuse(7, *min(found))


def rule_8(subject: Subject, events: Events) -> Memory:
    same = np.append(False, events.buffer[1:] == events.buffer[:-1])
    starts = (events.what <= ADD_TO) & (~same | (np.roll(events.what, 1) == END))
    ends = (events.what == END) & ~_owned(subject, events)
    peaks = []
    for thing in range(6):
        chosen = (starts | ends) & (events.thing == thing)
        row, change = events.row[chosen], np.where(starts[chosen], 1, -1)
        order = np.lexsort((-change, row))  # what a row defines is there before what it ends is gone
        alive = np.cumsum(change[order])  # zero between ranks, by rule 7
        peak = np.zeros(subject.header.workers, np.int64)
        np.maximum.at(peak, subject.rank[row[order]], alive)
        peaks.append(peak)
    return Memory(*peaks)
