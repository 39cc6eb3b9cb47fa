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

from schedgen.analysis.subject import Numbers, Subject
from schedgen.analysis.ties import spelled_out
from schedgen.ir.instructions import B, F, Ints, Kind, Op, Small, buffer_name
from schedgen.util.jit import kernel

# What takes memory on a rank, in the order of `Memory`.
X, G, WEIGHT, DW, PARTIAL, SAVED, HALF = range(7)
DEFINE, ADD_TO, USE, END = range(4)
# Which buffers of a kind: of this job; of the inputs of this stage; the shares of this stage's
# gradient, one a consumer; all parts of this stage; the part that is named, or the stage where it has no parts; that
# from rank `peer`; the buffer that is named; of this stage, the version before; what this stage gives.
JOB, INPUTS, SHARES, STAGE, PART, PEER, NAMED, BEFORE, OUTPUTS = range(9)

# By opcode, in the order in which memory is taken and given back.
EVENTS: dict[Op, tuple[tuple[int, int, int], ...]] = {
    Op.FETCH_W: ((DEFINE, WEIGHT, PART),),
    Op.RECV: ((DEFINE, NAMED, NAMED),),
    Op.SEND: ((USE, NAMED, NAMED),),
    Op.FWD: ((USE, WEIGHT, STAGE), (USE, X, INPUTS), (DEFINE, SAVED, JOB), (DEFINE, X, OUTPUTS)),
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
    Op.ADD: ((ADD_TO, DW, PART), (END, PARTIAL, PEER)),
    Op.ALLREDUCE: ((ADD_TO, DW, PART),),
    Op.NORM: (),
    Op.STEP: ((USE, WEIGHT, PART), (USE, DW, PART)),
    Op.FREE: ((END, NAMED, NAMED),),
}  # fmt: skip
# Where weights have versions. The version before ends here, too, unless there is a FREE of it.
STEP_OF_VERSIONS = ((END, WEIGHT, BEFORE), (DEFINE, WEIGHT, PART), (USE, DW, PART))

UNDEFINED, AGAIN, TWICE, OWNED, LEFT, NOTHING = range(1, 7)
FAULTS = {
    UNDEFINED: "is not defined on this rank before this line",
    AGAIN: "is used again after its end",
    TWICE: "is defined twice",
    OWNED: "belongs to this rank: it is neither fetched nor freed",
    LEFT: "is never freed after this, its last use",
    NOTHING: "is asked for, but there is no such buffer",
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

    sizes      what a buffer of each kind of `Memory` (rows) counts, by stage, an x or g of an edge behind these; of
               weights and their gradients by unit (columns); default: one
    workspace  what an instruction of each opcode (rows) and stage (columns) takes while it runs; default: nothing
    """
    if subject.header.tied:
        plain, origin = spelled_out(subject)
        return _as_written(lives(plain, sizes, workspace), origin, len(subject.program))
    header, (rank, op, kind, stage, mb, via, peer) = subject.header, subject.program.rows
    table = EVENTS | {Op.STEP: STEP_OF_VERSIONS} if header.weight_versions.count else EVENTS
    events = [(o, what, thing, which) for o in Op for what, thing, which in table[o]]
    first_event = np.searchsorted([event[0] for event in events], np.arange(len(Op) + 1))
    # Rows that name a partial: a number for each (rank, unit, sender).
    partial = np.full(len(op), -1, np.int32)
    named = np.flatnonzero((op == Op.ADD) | ((op == Op.RECV) & (kind == Kind.DW)))
    units = len(subject.stage_of)
    key = (rank[named].astype(np.int64) * units + subject.unit(named)) * header.workers + peer[named]
    partials, partial[named] = np.unique(key, return_inverse=True)
    redone = header.compute[F] != header.compute[B]  # there the rank of the backward has the RECOMPUTE
    again = subject.having(Op.RECOMPUTE)
    redone[stage[again], mb[again]] = True
    # Edges by consumer and by producer; header.graph.edges is sorted by producer.
    ends = np.array(header.graph.edges, np.int64).reshape(-1, 2)
    by_consumer = np.lexsort((ends[:, 0], ends[:, 1]))
    first_in = np.searchsorted(ends[by_consumer, 1], np.arange(header.stages + 1))
    first_out = np.searchsorted(ends[:, 0], np.arange(header.stages + 1))
    if sizes is None:
        sizes = np.ones((len(Memory._fields), max(units, header.stages + len(ends))), np.int64)
    if workspace is None:
        workspace = np.zeros((len(Op), header.stages), np.int64)
    code, row, slot_of_fault, count, (peaks, used, received, chain, ended, computed) = _follow.sized(4 * len(op))(
        rank, op, kind, stage, mb, via, peer, partial, kept(subject), np.array(events, np.int64), first_event, ends,
        by_consumer, first_in, first_out, header.graph.is_per_consumer, redone, subject.owner, subject.first_unit,
        sizes, workspace, header.stages, header.microbatches,
        max(header.weight_versions.count, 1), len(partials), int(((op == Op.RECV) | (op == Op.FETCH_W)).sum()),
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
    if subject.header.weight_versions.count:
        steps, frees = subject.having(Op.STEP), subject.having(Op.FREE)
        frees = frees[subject.kind[frees] == Kind.W]

        def key(rows: Numbers, back: int) -> Numbers:
            pair = subject.rank[rows].astype(np.int64) * subject.header.stages + subject.stage[rows]
            return pair * (subject.header.weight_versions.count + 1) + subject.peer[rows] - back + 1

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
        name = buffer_name(Kind.DW, int(subject.stage[row]), via=int(subject.via[row]))
        return f"{name} from rank {subject.peer[row]}"
    if thing == WEIGHT:
        unit, version = divmod(number, max(subject.header.weight_versions.count, 1))
        stage, via = subject.header.weight_shards.units[unit]
        return buffer_name(Kind.W, stage, via=via, version=version if subject.header.weight_versions.count else -1)
    if thing == DW:
        stage, via = subject.header.weight_shards.units[number]
        return buffer_name(Kind.DW, stage, via=via)
    stages, kind = subject.header.stages, Kind.X if thing == X else Kind.G
    if number < 0:
        return buffer_name(kind, *(int(column[row]) for column in (subject.stage, subject.mb, subject.via)))
    producer, consumer = (first, -1) if first < stages else ends[first - stages].tolist()
    return buffer_name(kind, producer, mb, consumer)


@kernel
def _follow(
    rank: Ints, op: Small, kind: Small, stage: Ints, mb: Ints, via: Ints, peer: Ints, partial: Ints,
    kept: NDArray[np.bool_], events: Numbers,
    first_event: Numbers, ends: Numbers, by_consumer: Numbers, first_in: Numbers, first_out: Numbers,
    apart: NDArray[np.bool_], redone: NDArray[np.bool_], owner: NDArray[np.bool_], first_unit: Numbers, sizes: Numbers,
    workspace: Numbers,
    stages: int, batches: int, versions: int, partials: int, receives: int, split: bool,
) -> tuple[int, int, tuple[int, int], int, tuple[Numbers, Numbers, Numbers, Ints, Ints, Numbers]]:  # fmt: skip
    """(fault, row, (thing, number), how many used, what `Lives` holds); fault 0: none.

    Buffers are numbered within their kind: saved and half by job, x and g by job of
    the producer, or of the edge where there are several, dw by unit, w by unit and version.
    """
    edges, jobs, units = len(ends), stages * batches, first_unit[stages]
    base = np.zeros(8, np.int64)  # where each kind begins among all buffers
    of_x = jobs + edges * batches * apart.any()
    for thing, size in enumerate((of_x, jobs + edges * batches, units * versions, units, partials, jobs, jobs * split)):
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
        part = first_unit[s] + max(via[row], 0) if s >= 0 else 0  # of w.s and dw.s
        given_back = np.int64(0)  # bytes
        for e in range(first_event[o], first_event[o + 1]):
            what, thing, which = events[e, 1], events[e, 2], events[e, 3]
            if thing == SAVED and what == DEFINE and o == Op.FWD and redone[s, b]:
                continue  # a forward that is redone saves nothing the first time
            if o == Op.ALLREDUCE and kind[row] <= Kind.G:
                what, which = USE, NAMED  # the sum of an x or g of shards takes its place
            named = which == NAMED
            if named:
                thing = kind[row] - 1  # X, G, WEIGHT, DW
                which = JOB if thing in (X, G) else PART
                if thing == DW and o == Op.RECV:
                    thing, which = PARTIAL, PEER
            if which == BEFORE and kept[row]:
                what = USE
            many = 1
            if which == INPUTS:
                many = first_in[s + 1] - first_in[s]
            elif which == SHARES or (which == OUTPUTS and apart[s]):
                many = first_out[s + 1] - first_out[s]
            elif which == STAGE:
                many = first_unit[s + 1] - first_unit[s]
            for j in range(many):
                number, of = s * batches + b, s
                if which == INPUTS:
                    edge = by_consumer[first_in[s] + j]
                    producer = ends[edge, 0]
                    number = producer * batches + b
                    if apart[producer] or (thing == G and first_out[producer + 1] - first_out[producer] > 1):
                        number = (stages + edge) * batches + b
                elif which in (SHARES, OUTPUTS):
                    if many > 1:
                        number = (stages + first_out[s] + j) * batches + b
                elif thing == WEIGHT and versions > 1:  # a stage is a unit there
                    number = s * versions + peer[row] - (which == BEFORE)
                    if number < s * versions:
                        return UNDEFINED, row, (thing, s * versions), count, found
                elif which == STAGE:
                    number = of = first_unit[s] + j
                elif which == PART:
                    number = of = part
                elif which == PEER:
                    number, of = partial[row], part
                elif named:
                    # An x or g by name: the only one, or that of consumer `via`.
                    shares = first_out[s + 1] - first_out[s]
                    several = apart[s] or (thing == G and shares > 1)
                    if (thing == G and shares == 0) or several == (via[row] < 0):
                        number = -1
                    elif several:
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
                own = thing == WEIGHT and owner[r, of] and (versions == 1 or number == s * versions)
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
                    size = sizes[thing, number // batches if thing <= G else of]
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
                    size = sizes[thing, number // batches if thing <= G else of]
                    alive[thing] -= size
                    if arrived[slot] == -1:
                        given_back += size * (thing != DW and thing != WEIGHT)
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
