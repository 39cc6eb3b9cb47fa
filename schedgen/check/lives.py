"""Rules 2, 7 and 8: the life of every buffer on every rank.

`EVENTS` says once what each instruction does to which buffer. The events that
touch one buffer on one rank, in program order, must then read
    DEFINE USE* END
where ADD_TO may stand for DEFINE (the first part of a sum) and for USE, an
owned weight is there from the start to the end, and a fetched weight may have
several lives. What an instruction ends is there until it is done: all that it
reads and writes takes memory at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedgen.check.subject import Numbers, Subject
from schedgen.check.ties import spelled_out
from schedgen.kernels import kernel
from schedgen.program import B, F, Ints, Kind, Op, Small, buffer_name

# What takes memory on a rank, in the order of `Memory`.
X, G, WEIGHT, DW, PARTIAL, SAVED, HALF = range(7)
DEFINE, ADD_TO, USE, END = range(4)
# Which buffers of a kind: of this job; of the inputs of this stage; the shares of this stage's
# gradient, one a consumer; of this stage; of this stage from rank `peer`; the one that is named; of this stage, the
# version before.
JOB, INPUTS, SHARES, STAGE, PEER, NAMED, BEFORE = range(7)

# By opcode, in the order in which memory is taken and given back.
EVENTS: dict[Op, tuple[tuple[int, int, int], ...]] = {
    Op.FETCH_W: ((DEFINE, WEIGHT, STAGE),),
    Op.RECV: ((DEFINE, NAMED, NAMED),),
    Op.SEND: ((USE, NAMED, NAMED),),
    Op.FWD: ((USE, WEIGHT, STAGE), (USE, X, INPUTS), (DEFINE, SAVED, JOB), (DEFINE, X, JOB)),
    Op.RECOMPUTE: ((USE, WEIGHT, STAGE), (USE, X, INPUTS), (DEFINE, SAVED, JOB)),
    Op.BWD: (
        (USE, WEIGHT, STAGE), (USE, X, INPUTS), (USE, G, SHARES), (ADD_TO, DW, STAGE), (DEFINE, G, INPUTS),
        (END, SAVED, JOB),
    ),
    Op.BWD_I: (
        (USE, WEIGHT, STAGE), (USE, X, INPUTS), (USE, G, SHARES), (USE, SAVED, JOB), (DEFINE, HALF, JOB),
        (DEFINE, G, INPUTS),
    ),
    Op.BWD_W: (
        (USE, WEIGHT, STAGE), (USE, X, INPUTS), (USE, G, SHARES), (ADD_TO, DW, STAGE), (END, HALF, JOB),
        (END, SAVED, JOB),
    ),
    Op.ADD: ((ADD_TO, DW, STAGE), (END, PARTIAL, PEER)),
    Op.ALLREDUCE: ((ADD_TO, DW, STAGE),),
    Op.NORM: (),
    Op.STEP: ((USE, WEIGHT, STAGE), (USE, DW, STAGE)),
    Op.FREE: ((END, NAMED, NAMED),),
}  # fmt: skip
# Where weights have versions. The version before ends here, too, unless there is a FREE of it.
STEP_OF_VERSIONS = ((END, WEIGHT, BEFORE), (DEFINE, WEIGHT, STAGE), (USE, DW, STAGE))

UNDEFINED, AGAIN, TWICE, OWNED, LEFT, NOTHING = range(1, 7)
FAULTS = {
    UNDEFINED: "is not defined on this rank before this line",
    AGAIN: "is used again after its end",
    TWICE: "is defined twice",
    OWNED: "belongs to this rank: it is neither fetched nor freed",
    LEFT: "is never freed after this, its last use",
    NOTHING: "is asked for, but there is no such gradient",
}


class Memory(NamedTuple):
    """Rule 8: the most buffers (or their bytes) of each kind alive at once, one array entry a rank."""

    activation: Numbers  # x, computed or received
    gradient: Numbers  # g
    weight: Numbers  # copies of stages the rank does not own, and of its own all versions but one
    weight_gradient: Numbers  # dw
    partial: Numbers  # received dw, not added yet
    saved: Numbers  # what a forward keeps for its backward: the seed's activation storage
    half: Numbers  # what a BWD_I keeps in addition for its BWD_W


class Lives(NamedTuple):
    """What following all buffers shows."""

    fault: tuple[int, int, str] | None  # rule, row, words
    memory: Memory
    used: Numbers  # rows that are the first to use what was received ...
    received: Numbers  # ... and the rows that received it
    chain: Ints  # by row, for SEND, FREE and STEP: the SEND of the same buffer before it; -1 if there is none
    ended: Ints  # by row: the row that received what ends here; -1 if nothing ends, or it was computed here
    computed: Numbers  # by rank: the most bytes of x, g and saved that it computes, with workspaces, at once


def lives(subject: Subject, sizes: Numbers | None = None, workspace: Numbers | None = None) -> Lives:
    """Follow every buffer of every rank through the program, up to the first fault.

    sizes      what a buffer of each kind of `Memory` (rows) and stage (columns) counts; default: one
    workspace  what an instruction of each opcode (rows) and stage (columns) takes while it runs; default: nothing
    """
    if subject.header.tied:
        plain, origin = spelled_out(subject)
        return _as_written(lives(plain, sizes, workspace), origin, len(subject.program))
    header, (rank, op, kind, stage, mb, via, peer) = subject.header, subject.program.rows
    table = EVENTS | {Op.STEP: STEP_OF_VERSIONS} if header.versions else EVENTS
    events = [(o, what, thing, which) for o in Op for what, thing, which in table[o]]
    first_event = np.searchsorted([event[0] for event in events], np.arange(len(Op) + 1))
    # Rows that name a partial: a number for each (rank, stage, sender).
    partial = np.full(len(op), -1, np.int32)
    named = np.flatnonzero((op == Op.ADD) | ((op == Op.RECV) & (kind == Kind.DW)))
    key = (rank[named].astype(np.int64) * header.stages + stage[named]) * header.workers + peer[named]
    partials, partial[named] = np.unique(key, return_inverse=True)
    redone = header.compute[F] != header.compute[B]  # there the rank of the backward has the RECOMPUTE
    again = subject.having(Op.RECOMPUTE)
    redone[stage[again], mb[again]] = True
    # Edges by consumer and by producer; header.edges is sorted by producer.
    ends = np.array(header.edges, np.int64).reshape(-1, 2)
    by_consumer = np.lexsort((ends[:, 0], ends[:, 1]))
    first_in = np.searchsorted(ends[by_consumer, 1], np.arange(header.stages + 1))
    first_out = np.searchsorted(ends[:, 0], np.arange(header.stages + 1))
    if sizes is None:
        sizes = np.ones((len(Memory._fields), header.stages), np.int64)
    if workspace is None:
        workspace = np.zeros((len(Op), header.stages), np.int64)
    code, row, slot_of_fault, count, (peaks, used, received, chain, ended, computed) = _follow.sized(4 * len(op))(
        rank, op, kind, stage, mb, via, peer, partial, kept(subject), np.array(events, np.int64), first_event, ends,
        by_consumer, first_in, first_out, redone, subject.owner, sizes, workspace, header.stages, header.microbatches,
        max(header.versions, 1), len(partials), int(((op == Op.RECV) | (op == Op.FETCH_W)).sum()),
        bool((op == Op.BWD_I).any()),
    )  # fmt: skip
    fault = None
    if code:
        words = f"{_name(subject, slot_of_fault, int(row), ends)} {FAULTS[code]}"
        fault = (2 if code in (UNDEFINED, NOTHING) else 7, int(row), words)
    return Lives(fault, Memory(*peaks.T), used[:count], received[:count], chain, ended, computed)


def kept(subject: Subject) -> NDArray[np.bool_]:
    """By row, for STEP of versioned weights: whether the version before lives on, to its FREE."""
    found = np.zeros(len(subject.program), bool)
    if subject.header.versions:
        steps, frees = subject.having(Op.STEP), subject.having(Op.FREE)
        frees = frees[subject.kind[frees] == Kind.W]

        def key(rows: Numbers, back: int) -> Numbers:
            pair = subject.rank[rows].astype(np.int64) * subject.header.stages + subject.stage[rows]
            return pair * (subject.header.versions + 1) + subject.peer[rows] - back + 1

        found[steps] = np.isin(key(steps, back=1), key(frees, back=0))
    return found


def _as_written(found: Lives, origin: Numbers, length: int) -> Lives:
    """The same for the program whose row origin[i] the row i stands for."""
    chain, ended = np.full(length, -1, np.int32), np.full(length, -1, np.int32)
    chain[origin] = np.where(found.chain < 0, -1, origin[found.chain])
    ended[origin] = np.where(found.ended < 0, -1, origin[found.ended])
    fault = found.fault and (found.fault[0], int(origin[found.fault[1]]), found.fault[2])
    return Lives(fault, found.memory, origin[found.used], origin[found.received], chain, ended, found.computed)


def rule_2(subject: Subject, found: Lives) -> None:
    if found.fault is not None and found.fault[0] == 2:
        subject.refuse(*found.fault)


def rule_7(subject: Subject, found: Lives) -> None:
    if found.fault is not None:
        subject.refuse(*found.fault)


def _name(subject: Subject, slot: tuple[int, int], row: int, ends: Numbers) -> str:
    """What the number of a buffer within its kind stands for."""
    thing, number = slot
    first, mb = divmod(number, subject.header.microbatches)
    if thing == SAVED:
        return f"what the forward of stage {first}, microbatch {mb} saves"
    if thing == HALF:
        return f"what BWD_I of stage {first}, microbatch {mb} keeps for BWD_W"
    if thing == PARTIAL:
        return f"dw.{subject.stage[row]} from rank {subject.peer[row]}"
    if thing == WEIGHT:
        stage, version = divmod(number, max(subject.header.versions, 1))
        return buffer_name(Kind.W, stage, version=version if subject.header.versions else -1)
    if thing == DW:
        return buffer_name(Kind.DW, number)
    if thing == X:
        return buffer_name(Kind.X, first, mb)
    stages = subject.header.stages
    if number < 0:
        return buffer_name(Kind.G, *(int(column[row]) for column in (subject.stage, subject.mb, subject.via)))
    producer, consumer = (first, -1) if first < stages else ends[first - stages].tolist()
    return buffer_name(Kind.G, producer, mb, consumer)


@kernel
def _follow(
    rank: Ints, op: Small, kind: Small, stage: Ints, mb: Ints, via: Ints, peer: Ints, partial: Ints,
    kept: NDArray[np.bool_], events: Numbers,
    first_event: Numbers, ends: Numbers, by_consumer: Numbers, first_in: Numbers, first_out: Numbers,
    redone: NDArray[np.bool_], owner: NDArray[np.bool_], sizes: Numbers, workspace: Numbers,
    stages: int, batches: int, versions: int, partials: int, receives: int, split: bool,
) -> tuple[int, int, tuple[int, int], int, tuple[Numbers, Numbers, Numbers, Ints, Ints, Numbers]]:  # fmt: skip
    """(fault, row, (thing, number), how many used, what `Lives` holds); fault 0: none.

    Buffers are numbered within their kind: x, saved and half by job, g by job of
    the producer, or of the edge where there are several, dw by stage, w by stage and version.
    """
    edges, jobs = len(ends), stages * batches
    base = np.zeros(8, np.int64)  # where each kind begins among all buffers
    for thing, size in enumerate(
        (jobs, jobs + edges * batches, stages * versions, stages, partials, jobs, jobs * split)
    ):
        base[thing + 1] = base[thing] + size
    seen = np.full(base[7], -1, np.int32)  # the rank whose life a buffer's entry speaks of
    state = np.zeros(base[7], np.int8)  # 0 not defined, 1 alive, 2 ended
    arrived = np.full(base[7], -1, np.int32)  # the row that receives it, -2 - row once it is used; -1: computed
    last = np.zeros(base[7], np.int32)
    sent, chain, ended = np.full(base[7], -1, np.int32), np.full(len(op), -1, np.int32), np.full(len(op), -1, np.int32)
    workers = len(owner)
    alive, peaks, computed = np.zeros(7, np.int64), np.zeros((workers, 7), np.int64), np.zeros(workers, np.int64)
    used, received = np.empty(receives, np.int64), np.empty(receives, np.int64)
    found = peaks, used, received, chain, ended, computed
    count = 0
    total = np.int64(0)  # bytes of what is computed, apart from weight gradients
    for row in range(len(op)):
        o, r, s, b = op[row], rank[row], stage[row], mb[row]
        given_back = np.int64(0)  # bytes
        for e in range(first_event[o], first_event[o + 1]):
            what, thing, which = events[e, 1], events[e, 2], events[e, 3]
            if thing == SAVED and what == DEFINE and o == Op.FWD and redone[s, b]:
                continue  # a forward that is redone saves nothing the first time
            if o == Op.ALLREDUCE and kind[row] <= Kind.G:
                what, which = USE, NAMED  # the sum of an x or g of shards takes its place
            if which == NAMED:
                thing = kind[row] - 1  # X, G, WEIGHT, DW
                which = JOB if thing in (X, G) else STAGE
                if thing == DW and o == Op.RECV:
                    thing, which = PARTIAL, PEER
            if which == BEFORE and kept[row]:
                what = USE
            many = 1
            if which == INPUTS:
                many = first_in[s + 1] - first_in[s]
            elif which == SHARES:
                many = first_out[s + 1] - first_out[s]
            for j in range(many):
                number = s * batches + b
                if which == INPUTS:
                    edge = by_consumer[first_in[s] + j]
                    producer = ends[edge, 0]
                    number = producer * batches + b
                    if thing == G and first_out[producer + 1] - first_out[producer] > 1:
                        number = (stages + edge) * batches + b
                elif which == SHARES:
                    if many > 1:
                        number = (stages + first_out[s] + j) * batches + b
                elif which in (STAGE, BEFORE) and thing == WEIGHT and versions > 1:
                    number = s * versions + peer[row] - (which == BEFORE)
                    if number < s * versions:
                        return UNDEFINED, row, (thing, s * versions), count, found
                elif which == STAGE:
                    number = s
                elif which == PEER:
                    number = partial[row]
                elif thing == G:
                    # A gradient by name: the only share, or that of consumer `via`.
                    shares = first_out[s + 1] - first_out[s]
                    if shares == 0 or (shares == 1) != (via[row] < 0):
                        number = -1
                    elif shares > 1:
                        edge, behind = first_out[s], first_out[s + 1]
                        while behind - edge > 1:  # consumers ascend
                            middle = (edge + behind) // 2
                            if ends[middle, 1] <= via[row]:
                                edge = middle
                            else:
                                behind = middle
                        number = (stages + edge) * batches + b if ends[edge, 1] == via[row] else -1
                    if number < 0:
                        return NOTHING, row, (thing, number), count, found
                slot = base[thing] + number
                own = thing == WEIGHT and owner[r, s] and (versions == 1 or number == s * versions)
                now = state[slot] if seen[slot] == r else (1 if own else 0)
                again = (thing == WEIGHT and what == DEFINE) or (versions > 1 and thing == DW and what == ADD_TO)
                fault = 0
                if own and versions == 1 and what in (DEFINE, END):
                    fault = OWNED
                elif what == DEFINE and now == 1:
                    fault = TWICE
                elif now == 2 and not again:
                    fault = AGAIN
                elif now == 0 and what in (USE, END):
                    fault = UNDEFINED
                if fault:
                    return fault, row, (thing, number), count, found
                if seen[slot] != r:
                    seen[slot] = r
                    arrived[slot] = -1
                    sent[slot] = -1
                if now != 1:
                    size = sizes[thing, s if which != INPUTS else ends[edge, 0]]
                    alive[thing] += size
                    peaks[r, thing] = max(peaks[r, thing], alive[thing])
                    arrived[slot] = row if o == Op.RECV or o == Op.FETCH_W else -1
                    if arrived[slot] < 0 and thing != DW and thing != WEIGHT:
                        total += size
                elif arrived[slot] >= 0:
                    used[count], received[count] = row, arrived[slot]
                    count += 1
                    arrived[slot] = -2 - arrived[slot]
                state[slot] = 1
                last[slot] = row
                of_version = versions > 1 and thing == WEIGHT
                if not of_version and (o == Op.SEND or o == Op.FREE or (o == Op.STEP and thing == WEIGHT)):
                    chain[row] = sent[slot]
                    sent[slot] = row
                if what == END:
                    state[slot] = 2
                    sent[slot] = -1
                    alive[thing] -= sizes[thing, s]
                    if arrived[slot] == -1:
                        given_back += sizes[thing, s] * (thing != DW and thing != WEIGHT)
                    else:
                        ended[row] = -2 - arrived[slot]
        computed[r] = max(computed[r], total + workspace[o, s])
        total -= given_back
        if (row + 1 == len(op) or rank[row + 1] != r) and alive.max() > 0:
            # Something is left at the rank's end: the one whose last use comes first.
            first, left = len(op), -1
            for slot in range(base[7]):
                own = base[WEIGHT] <= slot < base[WEIGHT + 1] and owner[r, (slot - base[WEIGHT]) // versions]
                if own and versions > 1:  # the last version is
                    for later in range(slot + 1, slot + versions - (slot - base[WEIGHT]) % versions):
                        own = own and not (seen[later] == r and state[later] == 1)
                if seen[slot] == r and state[slot] == 1 and not own and last[slot] < first:
                    first, left = last[slot], slot
            thing = 0
            while left >= base[thing + 1]:
                thing += 1
            return LEFT, first, (thing, left - base[thing]), count, found
    return 0, 0, (0, 0), count, found
