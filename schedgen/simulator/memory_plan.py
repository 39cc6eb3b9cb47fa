"""Where everything that is received lies, planned before the first step, and the memory that a rank needs.

A received x, g or partial takes the place of its size that was given back last,
or else a new one, so that a rank has as many places of a size as it ever holds
such buffers at once. Of a fetched stage every copy has the same place: what a
forward saves points to the weights and stays valid when they are freed and
fetched again. Two stages share a place where no copy of the one is ever held
together with a copy of the other; stages take, in the order of their first
fetch, the first place that is possible. Of a divided stage all parts together have one, with room for those that
the rank owns: it computes with all of them, one behind the other.

Weight gradients have places too: an owner's own, which is its for the whole run
and counts as owned, and elsewhere one from the first backward to the FREE, of the
last part of them if they are divided. So have versions of weights: an owner's own place, and one more for every version
that is alive besides. Of what else a rank computes there is only the most at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from schedgen.analysis.lifetimes import Lives, lives
from schedgen.analysis.subject import Numbers, Subject
from schedgen.ir.cost import DIRECTION, Amount, by_stage
from schedgen.ir.header import Header
from schedgen.ir.instructions import B, F, Ints, Kind, Op, Small
from schedgen.ir.program import Program
from schedgen.ir.weight_shards import LINE
from schedgen.simulator.cost import Machine
from schedgen.util.jit import kernel

FEW = 16  # copies of the weights with less than this part of them beside are copies
MOST_TOGETHER = 2**24  # of a stage that is fetched and one held meanwhile, on a rank; with more, no stages share


class Bytes(NamedTuple):
    """The bytes of what a schedule handles, each an array by stage, shape (S,) of int64."""

    activation: Numbers  # x.s.b and g.s.b
    weight: Numbers  # a copy of w.s, with all its parts; dw.s too
    partial: Numbers  # a received dw.s; where that is divided, a multiple of w.s, and so is a part of it
    saved: Numbers  # what a forward keeps for its backward
    half: Numbers  # what BWD_I keeps in addition until BWD_W
    workspace: Mapping[str, Numbers]  # by direction, F, B, I or W: what a job takes only while it runs; left out: 0
    owned: Numbers  # what an owner holds for the stage throughout: weights and optimizer state
    apart: Numbers | None = None  # by edge: x.s.b.c, where it is apart, and g.s.b.c; None: all of x.s.b

    def outputs(self, header: Header) -> Numbers:
        """Of x and g: by stage, and behind that by edge."""
        producers = np.array(header.graph.edges, np.int64).reshape(-1, 2)[:, 0]
        whole = self.activation[producers]
        by_edge = whole if self.apart is None else np.where(header.graph.is_per_consumer[producers], self.apart, whole)
        return np.concatenate([self.activation, by_edge])

    def by_kind(self, header: Header) -> Numbers:
        """As `lives` takes them: by kind of `check.Memory`, and by stage and then edge, of weights by unit."""
        x, (w, partial) = self.outputs(header), self.by_unit(header)
        amounts = (x, x, w, w, partial, self.saved, self.half)
        found = np.zeros((len(amounts), max(map(len, amounts))), np.int64)
        for row, amount in zip(found, amounts, strict=True):
            row[: len(amount)] = amount
        return found

    def by_unit(self, header: Header) -> tuple[Numbers, Numbers]:
        """weight and partial of every unit: a stage, or a part of its weights."""
        weight = header.weight_shards.sizes(self.weight)
        if not header.part_owners:
            return weight, self.partial
        counts = np.diff(header.weight_shards.first_unit)
        return weight, weight * np.repeat(self.partial // np.maximum(self.weight, 1), counts)


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


def measured(machine: Machine, stages: int, edges: int = 0) -> Bytes:
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
        apart=None if machine.apart is None else by_stage(machine.apart, edges).astype(np.int64),
    )


def follow(subject: Subject, bytes: Bytes) -> Lives:
    """`lives`, in bytes."""
    workspace = np.zeros((len(Op), subject.header.stages), np.int64)
    for op, direction in DIRECTION.items():
        workspace[op] = bytes.workspace.get(direction, 0)
    workspace[Op.RECOMPUTE] += bytes.activation  # its output, thrown away
    return lives(subject, bytes.by_kind(subject.header), workspace)


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
    weight, _ = bytes.by_unit(header)
    for size, (stage, via) in zip(weight.tolist(), header.weight_shards.units, strict=True):
        ranks = header.weight_shards.holders(stage, via)
        parts = len(ranks)  # each owner adds up one of so many, and receives that of all others
        part = -(-size // (parts * LINE)) * LINE
        held = int(bytes.owned[stage])
        if via >= 0:
            held = _owned(held, int(bytes.weight[stage]), size)
        owned[list(ranks)] += held + size + (parts - 1) * part
    for stage in range(header.stages):
        if not header.graph.consumers[stage]:  # losses are kept until NORM
            owned += bytes.activation[stage] * np.bincount(header.compute[F, stage], minlength=header.workers)
    for rank, ranks, size in _exchanges(header, bytes.outputs(header)):  # its part, and others' of the slice it sums
        owned[rank] += size + (len(ranks) - 1) * -(-size // (len(ranks) * LINE)) * LINE
    of_places = np.array([size.sum() for size in planned.sizes], np.int64)
    return Footprint(owned, of_places, found.computed)


def _owned(owned: int, weight: int, size: int) -> int:
    """What the owner of a part of `size` bytes holds throughout, where it is `owned` for all `weight` bytes.

    Beside copies of the weights an optimizer keeps a few bytes a parameter: all parameters may be in this part.
    """
    few = owned % max(weight, 1)
    few = min(few, weight - few)
    return -(-owned * size // max(weight, 1)) + (few if FEW * few < weight else 0)


def _exchanges(header: Header, outputs: Numbers) -> set[tuple[int, tuple[int, ...], int]]:
    """Each rank with the ranks of shards that it adds up with, in the shards' order, and the bytes of its part.

    What is the same in these has the same memory. `outputs`: bytes of x and g, by stage and then by edge.
    """
    found: set[tuple[int, tuple[int, ...], int]] = set()
    producer, consumer = np.array(header.graph.edges, np.int64).reshape(-1, 2).T
    via = np.array([header.graph.gradient_consumer(*edge) for edge in header.graph.edges], np.int64)
    gradients: dict[int, list[int]] = {}  # by stage: bytes of those that it gives
    for stage, size in zip(consumer.tolist(), outputs[header.graph.size_columns(producer, via)].tolist(), strict=True):
        gradients.setdefault(stage, []).append(size)
    for stage in np.flatnonzero(header.tensor_parallel.split).tolist():
        shards = header.tensor_parallel.siblings(stage)
        for d, sizes in ((F, [int(outputs[stage])]), (B, gradients.get(stage, []))):
            for ranks in set(map(tuple, header.compute[d, shards.start : shards.stop].T.tolist())):
                found |= {(ranks[shards.index(stage)], ranks, size) for size in sizes}
    return found


def plan(program: Program, bytes: Bytes, found: Lives) -> Places:
    """The places, from the lives of all buffers; `found` in any measure."""
    table, bounds = program.rows, program.bounds
    receives = np.flatnonzero((table.op == Op.RECV) | (table.op == Op.FETCH_W))
    size = np.zeros(len(program), np.int64)
    size[receives] = message_sizes(program, bytes, receives)
    fetches = receives[table.op[receives] == Op.FETCH_W]
    size[fetches] = bytes.weight[table.stage[fetches]]  # the place of a part is in that of them all
    pools = np.full(len(program), -1, np.int32)  # by RECV row: the number of its size
    pooled = receives[table.op[receives] == Op.RECV]
    found_sizes, pools[pooled] = np.unique(size[pooled], return_inverse=True)
    row, sizes, counts = _plan.sized(2 * len(program))(
        table.op, table.stage, bounds, size, pools, found.ended, len(found_sizes), program.header.stages, len(receives)
    )
    parts = np.split(sizes[: counts.sum()], np.cumsum(counts)[:-1])
    more = _versions if program.header.weight_versions.count else _gradients
    others = [more(program, rank, len(parts[rank]), bytes.weight, row) for rank in range(len(parts))]
    return Places(row, tuple(np.concatenate(both) for both in zip(parts, others, strict=True)))


def message_sizes(program: Program, bytes: Bytes, rows: Numbers) -> Numbers:
    """Bytes of what SEND, RECV and FETCH_W rows name; where a dw is received, of its partial."""
    header, table = program.header, program.rows.take(rows)
    column = header.weight_shards.first_unit[table.stage] + np.maximum(table.via, 0)
    light = table.kind <= Kind.G
    column[light] = header.graph.size_columns(table.stage[light], table.via[light])
    x, g, w, dw, partial = bytes.by_kind(header)[:5]
    of_kind = np.stack([0 * x, x, g, w, dw, partial])
    return of_kind[np.where((table.kind == Kind.DW) & (table.op == Op.RECV), Kind.DW + 1, table.kind), column]


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
