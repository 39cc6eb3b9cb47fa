"""Where everything that is received lies, planned before the first step, and the memory that a rank needs.

A received x, g or partial takes the place of its size that was given back last,
or else a new one, so that a rank has as many places of a size as it ever holds
such buffers at once. Of a fetched stage every copy has the same place: what a
forward saves points to the weights and stays valid when they are freed and
fetched again. Two stages share a place where no copy of the one is ever held
together with a copy of the other; stages take, in the order of their first
fetch, the first place that is possible.

Weight gradients have places too: an owner's own, which is its for the whole run
and counts as owned, and elsewhere one from the first backward to the FREE. So
have versions of weights: an owner's own place, and one more for every version
that is alive besides. Of what else a rank computes there is only the most at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from schedgen.check.lives import Lives, lives
from schedgen.check.subject import Numbers, Subject
from schedgen.cost import DIRECTION, Amount, Machine, by_stage
from schedgen.kernels import kernel
from schedgen.program import B, F, Header, Ints, Kind, Op, Program, Small

LINE = 64  # bytes: where a rank's part of a sum begins is a multiple
MOST_TOGETHER = 2**24  # of a stage that is fetched and one held meanwhile, on a rank; with more, no stages share


class Bytes(NamedTuple):
    """The bytes of what a schedule handles, each an array by stage, shape (S,) of int64."""

    activation: Numbers  # x.s.b and g.s.b
    weight: Numbers  # a copy of w.s; dw.s too
    partial: Numbers  # a received dw.s
    saved: Numbers  # what a forward keeps for its backward
    half: Numbers  # what BWD_I keeps in addition until BWD_W
    workspace: Mapping[str, Numbers]  # by direction, F, B, I or W: what a job takes only while it runs; left out: 0
    owned: Numbers  # what an owner holds for the stage throughout: weights and optimizer state


class Places(NamedTuple):
    """Of every rank, its places for what it receives, for gradients of weights it does not own, and for versions."""

    # By row: the number, on its rank, of the place that a RECV, a FETCH_W, the begin of a dw, or a STEP to a version
    # that has no place in the owner's own weights fills; else -1.
    row: Ints
    sizes: tuple[Numbers, ...]  # by rank: the bytes of each of its places


class Footprint(NamedTuple):
    """The bytes a rank needs, arrays by rank; the peak is their sum."""

    owned: Numbers  # held throughout: weights, optimizer state, gradients, room for sums over owners, losses
    places: Numbers
    computed: Numbers  # the most at once of activations, their gradients and saved forwards that it computes

    @property
    def peak(self) -> Numbers:
        return self.owned + self.places + self.computed


def measured(machine: Machine, stages: int) -> Bytes:
    """The bytes that a machine's amounts come to.

    A workspace by direction that has I or W but no B has the larger of them for B; one that has
    B but no I or no W has B's for that. Owned weights come without optimizer state unless given.
    """

    def count(amount: Amount) -> Numbers:
        return by_stage(amount, stages).astype(np.int64)

    given = machine.workspace if isinstance(machine.workspace, Mapping) else dict.fromkeys("FBIW", machine.workspace)
    workspace = {direction: count(amount) for direction, amount in given.items()}
    halves = [workspace[direction] for direction in "IW" if direction in workspace]
    if halves:
        workspace.setdefault("B", np.max(halves, axis=0))
    if "B" in workspace:
        workspace = {"I": workspace["B"], "W": workspace["B"]} | workspace
    weight = count(machine.weight)
    return Bytes(
        activation=count(machine.activation),
        weight=weight,
        partial=weight,
        saved=count(machine.saved),
        half=count(machine.half),
        workspace=workspace,
        owned=weight if machine.owned is None else count(machine.owned),
    )


def follow(subject: Subject, bytes: Bytes) -> Lives:
    """`lives`, in bytes."""
    x, w, partial, saved, half, by_direction, _ = bytes
    workspace = np.zeros((len(Op), len(x)), np.int64)
    for op, direction in DIRECTION.items():
        workspace[op] = by_direction.get(direction, 0)
    workspace[Op.RECOMPUTE] += x  # its output, thrown away
    return lives(subject, np.stack([x, x, w, w, partial, saved, half]), workspace)


def places(program: Program, bytes: Bytes) -> Places:
    """The places of a checked, projected program, or of the rows of some of its ranks: each rank's are its own."""
    return plan(program, bytes, follow(Subject(program, ""), bytes))


def footprint(program: Program, bytes: Bytes) -> Footprint:
    """What every rank of a checked, projected program needs; it may hold some ranks' rows only, as for `places`."""
    subject = Subject(program, "")
    found = follow(subject, bytes)
    return needed(program.header, bytes, found, plan(program, bytes, found))


def needed(header: Header, bytes: Bytes, found: Lives, planned: Places) -> Footprint:
    """The same from what `follow` and `plan` gave."""
    owned = np.zeros(header.workers, np.int64)
    for stage, ranks in enumerate(header.owners):
        parts = len(ranks)  # each owner adds up one of so many, and receives that of all others
        part = -(-bytes.weight[stage] // (parts * LINE)) * LINE
        owned[list(ranks)] += bytes.owned[stage] + bytes.weight[stage] + (parts - 1) * part
        if not header.consumers[stage]:  # losses are kept until NORM
            owned += bytes.activation[stage] * np.bincount(header.compute[F, stage], minlength=header.workers)
    for rank, ranks, size in _exchanges(header, bytes.activation):  # its part, and others' of the slice it sums
        owned[rank] += size + (len(ranks) - 1) * -(-size // (len(ranks) * LINE)) * LINE
    of_places = np.array([size.sum() for size in planned.sizes], np.int64)
    return Footprint(owned, of_places, found.computed)


def _exchanges(header: Header, activation: Numbers) -> set[tuple[int, tuple[int, ...], int]]:
    """Each rank with the ranks of shards that it adds up with, in the shards' order, and the bytes of its part.

    What is the same in these has the same memory.
    """
    found: set[tuple[int, tuple[int, ...], int]] = set()
    for stage in np.flatnonzero(header.split).tolist():
        shards = header.shards(stage)
        for d, given in ((F, (stage,)), (B, header.producers[stage])):
            for ranks in set(map(tuple, header.compute[d, shards.start : shards.stop].T.tolist())):
                found |= {(ranks[shards.index(stage)], ranks, int(activation[one])) for one in given}
    return found


def plan(program: Program, bytes: Bytes, found: Lives) -> Places:
    """The places, from the lives of all buffers; `found` in any measure."""
    table, bounds = program.rows, program.bounds
    receives = np.flatnonzero((table.op == Op.RECV) | (table.op == Op.FETCH_W))
    of_kind = np.stack([0 * bytes.weight, bytes.activation, bytes.activation, bytes.weight, bytes.partial])
    size = np.zeros(len(program), np.int64)
    size[receives] = of_kind[table.kind[receives], table.stage[receives]]
    pools = np.full(len(program), -1, np.int32)  # by RECV row: the number of its size
    pooled = receives[table.op[receives] == Op.RECV]
    found_sizes, pools[pooled] = np.unique(size[pooled], return_inverse=True)
    row, sizes, counts = _plan.sized(2 * len(program))(
        table.op, table.stage, bounds, size, pools, found.ended, len(found_sizes), program.header.stages, len(receives)
    )
    parts = np.split(sizes[: counts.sum()], np.cumsum(counts)[:-1])
    more = _versions if program.header.versions else _gradients
    others = [more(program, rank, len(parts[rank]), bytes.weight, row) for rank in range(len(parts))]
    return Places(row, tuple(np.concatenate(both) for both in zip(parts, others, strict=True)))


def _gradients(program: Program, rank: int, count: int, weight: Numbers, row: Ints) -> Numbers:
    """Bytes of the places, numbered from `count`, for gradients of weights that a rank does not own; fills `row`."""
    table, begin = program.rows, int(program.bounds[rank])
    part = table.take(slice(begin, int(program.bounds[rank + 1])))
    adds = np.isin(part.op, (Op.BWD, Op.BWD_W, Op.ADD)) | ((part.op == Op.FREE) & (part.kind == Kind.DW))
    sizes: list[int] = []
    held: dict[int, int] = {}  # by stage: its place
    given_back: dict[int, list[int]] = {}  # places by size
    for at in np.flatnonzero(adds).tolist():
        stage = int(part.stage[at])
        if rank in program.header.owners[stage]:
            continue
        size = int(weight[stage])
        if part.op[at] == Op.FREE:
            given_back.setdefault(size, []).append(held.pop(stage))
        elif stage not in held:
            if not given_back.get(size):
                given_back.setdefault(size, []).append(count + len(sizes))
                sizes.append(size)
            held[stage] = given_back[size].pop()
            row[begin + at] = held[stage]
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
    # Twice through the rows: how many pairs of stages are held together, then which.
    for row in range(rows[0], rows[1]):
        if op[row] == Op.FETCH_W:
            pairs += few
            few += 1
            if number[stage[row]] < 0:
                order[fetched] = stage[row]
                number[stage[row]] = fetched
                fetched += 1
        elif ended[row] >= 0 and op[ended[row]] == Op.FETCH_W:
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
            for k in range(few):
                a, b = number[stage[row]], number[held[k]]
                other[pairs] = min(a, b)
                following[pairs] = head[max(a, b)]
                head[max(a, b)] = pairs
                pairs += 1
            held[few] = stage[row]
            few += 1
        elif ended[row] >= 0 and op[ended[row]] == Op.FETCH_W:
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
