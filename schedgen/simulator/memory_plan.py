"""Memory plan: a slot for every received buffer of a rank, before the first step.

1. Activations, gradients and partial sums come from free lists, one per size. A buffer takes the slot that was
   freed last, so a rank has as many slots of a size as it has live buffers of that size.
2. All copies of a stage's weights use one slot, because autograd graphs keep pointers to them across FREE and
   FETCH_W. Two stages share a slot if their copies are never live together (first fit, by first fetch). The slot of
   divided weights has room for all parts, the rank's own included, because a job reads them one behind the other.
3. An owner's weight gradient is permanent and counts as owned. Elsewhere it has a slot from the first backward to its
   FREE; if it is divided, to the FREE of its last part.
4. The first version of an owner's weights lies in the owner's own memory. Each further live version takes one slot.

Everything else a rank computes has no slot: `footprint` counts the most bytes of it that are live at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedgen.analysis.lifetimes import Lives, Memory, lives
from schedgen.analysis.subject import Numbers, Subject
from schedgen.ir.cost import DIRECTION
from schedgen.ir.instructions import Ints, Kind, Op, Small
from schedgen.ir.program import Program
from schedgen.simulator.buffer_sizes import BufferSizes, message_bytes
from schedgen.util.jit import kernel

MOST_TOGETHER = 2**24  # of a stage that is fetched and one held meanwhile, on a rank; with more, no stages share


class MemoryPlan(NamedTuple):
    """The slots of every rank, numbered from 0, for what it receives, foreign weight gradients and weight versions."""

    # By row: the slot, on its rank, that a RECV, a FETCH_W, the begin of a dw, or a STEP to a version that does not
    # lie in the owner's own weights fills; else -1.
    slot: Ints
    sizes: tuple[Numbers, ...]  # by rank: the bytes of each of its slots


def follow(subject: Subject, sizes: BufferSizes) -> Lives:
    """`lives`, in bytes."""
    workspace = np.zeros((len(Op), subject.header.stages), np.int64)
    for op, direction in DIRECTION.items():
        workspace[op] = sizes.workspace.get(direction, 0)
    workspace[Op.RECOMPUTE] += sizes.activation  # its output, thrown away
    return lives(subject, sizes.by_kind(subject.header), workspace)


def peak_memory(program: Program, sizes: BufferSizes) -> Memory:
    """The most bytes of each kind of buffer at once, by rank."""
    return follow(Subject(program, ""), sizes).memory


def memory_plan(program: Program, sizes: BufferSizes, lifetimes: Lives | None = None) -> MemoryPlan:
    """The plan for a checked, projected program, or for the rows of some of its ranks: each rank's is its own."""
    lifetimes = lifetimes or follow(Subject(program, ""), sizes)
    table = program.rows
    receives = np.flatnonzero((table.op == Op.RECV) | (table.op == Op.FETCH_W))
    size = np.zeros(len(program), np.int64)
    size[receives] = message_bytes(program, sizes, receives)
    fetches = receives[table.op[receives] == Op.FETCH_W]
    size[fetches] = sizes.weight[table.stage[fetches]]  # the slot of a part is in that of them all
    pools = np.full(len(program), -1, np.int32)  # by RECV row: the number of its size
    pooled = receives[table.op[receives] == Op.RECV]
    pool_sizes, pools[pooled] = np.unique(size[pooled], return_inverse=True)
    slot, slot_sizes, counts = _plan.sized(2 * len(program))(
        table.op, table.stage, program.bounds, size, pools, lifetimes.ended, len(pool_sizes), program.header.stages,
        len(receives),
    )  # fmt: skip
    parts = np.split(slot_sizes[: counts.sum()], np.cumsum(counts)[:-1])
    more = _versions if program.header.weight_versions else _gradients
    others = [more(program, rank, len(parts[rank]), sizes.weight, slot) for rank in range(len(parts))]
    return MemoryPlan(slot, tuple(np.concatenate(both) for both in zip(parts, others, strict=True)))


def _gradients(program: Program, rank: int, count: int, weight: Numbers, row: Ints) -> Numbers:
    """Bytes of the places, numbered from `count`, for gradients of weights that a rank does not own; fills `row`."""
    table, begin = program.rows, int(program.bounds[rank])
    part = table.take(slice(begin, int(program.bounds[rank + 1])))
    adds = np.isin(part.op, (Op.BWD, Op.BWD_W, Op.ADD)) | ((part.op == Op.FREE) & (part.kind == Kind.DW))
    sizes: list[int] = []
    held: dict[int, int] = {}  # by stage: its place
    alive: dict[int, set[int]] = {}  # by stage: the parts in it that are not freed
    foreign: dict[int, set[int]] = {}  # by stage: the parts that the rank does not own
    given_back: dict[int, list[int]] = {}  # places by size
    for at in np.flatnonzero(adds).tolist():
        stage, via = int(part.stage[at]), int(part.via[at])
        if stage not in foreign:
            header = program.header
            foreign[stage] = {
                one for one in header.weight_shards.parts(stage) if rank not in header.weight_shards.holders(stage, one)
            }
        jobs = part.op[at] != Op.ADD and part.op[at] != Op.FREE
        touched = foreign[stage] if jobs else foreign[stage] & {via}
        if not touched:
            continue
        size = int(weight[stage])
        if part.op[at] == Op.FREE:
            alive[stage] -= touched
            if not alive[stage]:
                given_back.setdefault(size, []).append(held.pop(stage))
            continue
        if stage not in held:
            if not given_back.get(size):
                given_back.setdefault(size, []).append(count + len(sizes))
                sizes.append(size)
            held[stage], alive[stage] = given_back[size].pop(), set()
            row[begin + at] = held[stage]
        alive[stage] |= touched
    return np.array(sizes, np.int64)


def _versions(program: Program, rank: int, count: int, weight: Numbers, row: Ints) -> Numbers:
    """Bytes of the places, numbered from `count`, for versions of a rank's weights; fills `row`."""
    table, begin = program.rows, int(program.bounds[rank])
    part = table.take(slice(begin, int(program.bounds[rank + 1])))
    changes = np.flatnonzero((part.op == Op.STEP) | ((part.op == Op.FREE) & (part.kind == Kind.W))).tolist()
    freed = {(int(part.stage[at]), int(part.peer[at])) for at in changes if part.op[at] == Op.FREE}
    sizes: list[int] = []
    held: dict[int, dict[int, int]] = {}  # by stage and version: its place; -1: the owner's own weights
    given_back: dict[int, list[int]] = {}  # by stage
    for at in changes:
        stage, version = int(part.stage[at]), int(part.peer[at])
        alive = held.setdefault(stage, {0: -1})
        if part.op[at] == Op.FREE:
            given_back.setdefault(stage, []).append(alive.pop(version))
        elif (stage, version - 1) not in freed:
            row[begin + at] = alive[version] = alive.pop(version - 1)
        else:
            if not given_back.get(stage):
                given_back.setdefault(stage, []).append(count + len(sizes))
                sizes.append(int(weight[stage]))
            row[begin + at] = alive[version] = given_back[stage].pop()
    return np.array(sizes, np.int64)


@kernel
def _plan(
    op: Small, stage: Ints, bounds: Numbers, size: Numbers, pools: Ints, ended: Ints, many: int, stages: int,
    receives: int,
) -> tuple[Ints, Numbers, Numbers]:  # fmt: skip
    """(place by row, bytes of all ranks' places one after another, how many each rank has)."""
    place = np.full(len(op), -1, np.int32)
    sizes, counts = np.zeros(receives, np.int64), np.zeros(len(bounds) - 1, np.int64)
    top, below = np.full(many, -1, np.int32), np.empty(receives, np.int32)  # places given back, by pool
    shared = np.full(stages, -1, np.int32)  # by shared place of stages: its number
    begin = 0
    for rank in range(len(bounds) - 1):
        rows = bounds[rank], bounds[rank + 1]
        group = _shared(op, stage, rows, ended, stages)
        count = 0
        for row in range(rows[0], rows[1]):
            if op[row] == Op.RECV:
                one = top[pools[row]]
                if one >= 0:
                    top[pools[row]] = below[one]
                else:
                    one = count
                    count += 1
                place[row] = one
            elif op[row] == Op.FETCH_W:
                if shared[group[stage[row]]] < 0:
                    shared[group[stage[row]]] = count
                    count += 1
                place[row] = shared[group[stage[row]]]
            if place[row] >= 0:
                sizes[begin + place[row]] = max(sizes[begin + place[row]], size[row])
            if ended[row] >= 0 and op[ended[row]] == Op.RECV:
                below[place[ended[row]]] = top[pools[ended[row]]]
                top[pools[ended[row]]] = place[ended[row]]
        for row in range(rows[0], rows[1]):  # the next rank has places of its own
            if op[row] == Op.RECV:
                top[pools[row]] = -1
            elif op[row] == Op.FETCH_W:
                shared[group[stage[row]]] = -1
        counts[rank] = count
        begin += count
    return place, sizes, counts


@kernel
def _shared(op: Small, stage: Ints, rows: tuple[int, int], ended: Ints, stages: int) -> Ints:
    """By stage that one rank fetches: the number of the place it shares with others; a greedy colouring."""
    held = np.empty(stages, np.int32)  # the stages held at a row
    order, number = np.empty(stages, np.int32), np.full(stages, -1, np.int32)  # stages by first fetch, and back
    few, fetched, pairs = 0, 0, 0
    parts = np.zeros(stages, np.int32)  # held of each stage
    # Twice through the rows: how many pairs of stages are held together, then which.
    for row in range(rows[0], rows[1]):
        if op[row] == Op.FETCH_W:
            parts[stage[row]] += 1
            if parts[stage[row]] > 1:
                continue
            pairs += few
            few += 1
            if number[stage[row]] < 0:
                order[fetched] = stage[row]
                number[stage[row]] = fetched
                fetched += 1
        elif ended[row] >= 0 and op[ended[row]] == Op.FETCH_W:
            parts[stage[row]] -= 1
            if parts[stage[row]] == 0:
                few -= 1
    group = np.full(stages, -1, np.int32)
    if pairs > MOST_TOGETHER:
        for a in range(fetched):
            group[order[a]] = a
        return group
    # By stage, a list of those before it in `order` that it is held together with.
    head, following = np.full(fetched, -1, np.int32), np.empty(pairs, np.int32)
    other = np.empty(pairs, np.int32)
    pairs = 0
    for row in range(rows[0], rows[1]):
        if op[row] == Op.FETCH_W:
            parts[stage[row]] += 1
            if parts[stage[row]] > 1:
                continue
            for k in range(few):
                a, b = number[stage[row]], number[held[k]]
                other[pairs] = min(a, b)
                following[pairs] = head[max(a, b)]
                head[max(a, b)] = pairs
                pairs += 1
            held[few] = stage[row]
            few += 1
        elif ended[row] >= 0 and op[ended[row]] == Op.FETCH_W:
            parts[stage[row]] -= 1
            if parts[stage[row]] > 0:
                continue
            k = 0
            while held[k] != stage[row]:
                k += 1
            few -= 1
            held[k] = held[few]
    taken = np.full(fetched + 1, -1, np.int32)  # by place: the last stage that could not have it
    for a in range(fetched):
        pair = head[a]
        while pair >= 0:
            taken[group[order[other[pair]]]] = a
            pair = following[pair]
        one = 0
        while taken[one] == a:
            one += 1
        group[order[a]] = one
    return group
