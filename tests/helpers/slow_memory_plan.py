"""The lifetime of every buffer, read off each rank's list by slow plain Python, and checks of memory plans by it."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from schedgen.analysis import analyse
from schedgen.ir.effects import Buffer
from schedgen.ir.instructions import B, F, Kind, Op
from schedgen.ir.program import Program
from schedgen.ir.weights import LINE, shard_offsets
from schedgen.simulator.buffer_sizes import BufferSizes, buffer_sizes
from schedgen.simulator.footprint import footprint
from schedgen.simulator.machine import Machine
from schedgen.simulator.memory_plan import memory_plan
from schedgen.simulator.simulate import simulate

DIRECTION = {Op.FWD: "F", Op.RECOMPUTE: "F", Op.BWD: "B", Op.BWD_I: "I", Op.BWD_W: "W"}


def random_bytes(rng, stages, edges=0):
    """Random sizes of buffers, often the same for several stages and kinds."""

    def some(count=stages):
        return rng.integers(1, 4, count)

    workspace = {direction: some() for direction in "FBIW" if rng.integers(4)}
    weight = 2 * some()
    owned = weight + some() - 1
    return BufferSizes(some(), weight, some(), some(), some(), workspace, owned, some(edges) if edges else None)


class Life(NamedTuple):
    """A lifetime of a buffer on a rank: it takes memory from row `begin` of the rank's list up to row `end`."""

    kind: Kind | str
    stage: int
    column: int  # of its size, for x and g
    begin: int
    end: int
    placed: bool  # received, or the gradient of weights that another rank owns
    piece: int = -1  # of weights and what is received of their gradients: the part; -1: all


def lives(program, rank):
    """All lifetimes of all buffers that a rank does not own."""
    header, part = program.header, program.instructions(rank)
    jobs = zip(program.rows.op.tolist(), program.rows.stage.tolist(), program.rows.mb.tolist(), strict=True)
    redone = {(s, b) for op, s, b in jobs if op == Op.RECOMPUTE}
    begun, found = {}, []
    for at, i in enumerate(part):
        s, b, starts, ends = i.stage, i.mb, [], []
        received = i.op == Op.RECV and i.kind == Kind.SAVED
        if i.op in (Op.RECV, Op.FETCH_W) and not received:
            starts = [("partial", s, i.operand, i.piece) if i.kind == Kind.DW else (i.kind, s, b, i.piece)]
        if i.op == Op.FWD:
            starts = [(Kind.X, s, b, piece) for piece in header.graph.output_consumers(s)]
        if i.kind == Kind.OPT:
            starts = [(Kind.OPT, s, b, i.piece)] * (i.op == Op.RELOAD)
        elif i.op in (Op.RECOMPUTE, Op.RELOAD) or (i.op == Op.FWD and (s, b) not in redone) or received:
            starts.append(("saved", s, b))
        if i.op in (Op.BWD, Op.BWD_I):
            starts = [(Kind.G, p, b, header.graph.gradient_consumer(p, s)) for p in header.graph.producers[s]]
        if i.op == Op.BWD_I:
            starts.append(("half", s, b))
        if i.op in (Op.BWD, Op.BWD_W, Op.ADD, Op.ALLREDUCE) and i.kind not in (Kind.X, Kind.G):
            if i.kind == Kind.T:  # s is the number of a tie
                sums = [(Kind.DW, t, -1, -1) for t in header.tied[s] if rank in header.owners[t]]
            else:
                sums = [(Kind.DW, s, -1, k) for k in ((i.piece,) if i.kind == Kind.DW else header.gradient_units.of(s))]
            starts += [one for one in sums if one not in begun]
        if i.op in (Op.BWD, Op.BWD_W):
            ends = [("saved", s, b)] + [("half", s, b)] * (i.op == Op.BWD_W)
        if i.op == Op.ADD:
            ends = [("partial", s, i.operand, i.piece)]
        if i.op == Op.FREE:
            ends = [("saved", s, b) if i.kind == Kind.SAVED else (i.kind, s, b, i.piece)]
        begun |= dict.fromkeys(starts, at)
        for name in ends:
            begin = begun.pop(name)
            foreign = name[0] == Kind.DW and rank not in header.gradient_units.holders(name[1], name[3])
            piece = name[3] if name[0] in (Kind.W, Kind.DW, Kind.OPT, "partial") else -1
            column = (
                header.graph.size_columns(np.array([name[1]]), np.array([name[3]]))[0]
                if name[0] in (Kind.X, Kind.G)
                else -1
            )
            placed = foreign or (part[begin].op in (Op.RECV, Op.FETCH_W) and name[0] != "saved")
            found.append(Life(name[0], name[1], column, begin, at, placed, piece))
    assert not begun
    # The gradients that a rank gathers for other ranks' parts of a stage are contiguous.
    for stage in {life.stage for life in found if life.kind == Kind.DW and life.placed and life.piece >= 0}:
        parts = [life for life in found if life.kind == Kind.DW and life.placed and life.stage == stage]
        found = [life for life in found if life not in parts]
        found.append(Life(Kind.DW, stage, -1, min(one.begin for one in parts), max(one.end for one in parts), True))
    return found


def part_of(amount, header, stage, piece):
    """The bytes of part `piece` of a stage's `amount` bytes; -1: of all."""
    return (
        int(np.diff(shard_offsets(int(amount), len(header.gradient_units.of(stage))))[piece])
        if piece >= 0
        else int(amount)
    )


def size(life, bytes, header):
    if life.kind in (Kind.X, Kind.G):
        return int(bytes.outputs(header)[life.column])
    if life.kind == Kind.OPT:
        whole, few = owned_for(bytes, header, life.stage, life.piece)
        return whole - few - part_of(bytes.weight[life.stage], header, life.stage, life.piece)
    by_kind = {
        Kind.W: bytes.weight, Kind.DW: bytes.weight,
        "partial": bytes.partial, "saved": bytes.saved, "half": bytes.half,
    }  # fmt: skip
    if life.piece >= 0:
        rows = bytes.partial[life.stage] // bytes.weight[life.stage] if life.kind == "partial" else 1
        return rows * part_of(bytes.weight[life.stage], header, life.stage, life.piece)
    return int(by_kind[life.kind][life.stage])


def owned_for(bytes, header, stage, piece):
    """The bytes of a unit's weights and of the state of its optimizer; and of these, of its counts of steps."""
    weight, owned = int(bytes.weight[stage]), int(bytes.owned[stage])
    few = min(owned % weight, -owned % weight)
    few = few if 16 * few < weight else 0
    if piece < 0:
        return owned, min(few, owned - weight)
    return -(-owned * part_of(weight, header, stage, piece) // weight) + few, few


def at_once(found, measure=lambda life: 1):
    """The largest sum of `measure` over the lifetimes that contain one row."""
    rows = {life.begin for life in found}
    return max((sum(measure(life) for life in found if life.begin <= row <= life.end) for row in rows), default=0)


def peak(program, rank, found, planned, bytes):
    """The peak memory of a rank in bytes, row by row, as it is defined."""
    header, running = program.header, []
    computed = [life for life in found if not life.placed and life.kind != Kind.DW]
    for at, i in enumerate(program.instructions(rank)):
        workspace = bytes.workspace[DIRECTION[i.op]][i.stage] if DIRECTION.get(i.op) in bytes.workspace else 0
        workspace += bytes.activation[i.stage] if i.op == Op.RECOMPUTE else 0
        drops = i.op == Op.FWD and not any(life.kind == "saved" and life.begin == at for life in found)
        workspace += bytes.saved[i.stage] if drops and not header.is_forward else 0
        alive = sum(size(life, bytes, header) for life in computed if life.begin <= at <= life.end)
        running.append(alive + workspace)
    losses = [s for s in range(header.stages) if not header.graph.consumers[s]]
    forwards = [i.stage for i in program.instructions(rank) if i.op == Op.FWD and i.stage in losses]
    owned = sum(min(bytes.activation[stage], 8) for stage in forwards)
    for stage, k in header.weight_shards.units:
        owners = header.weight_shards.holders(stage, k)
        if rank in owners:
            mine = part_of(bytes.weight[stage], header, stage, k)
            whole, few = owned_for(bytes, header, stage, k)
            owned += mine + (mine + few if header.offloads_optimizer else whole)
        if rank in owners and k < 0:  # what the other owners send of their gradients
            part = -(-bytes.weight[stage] // (len(owners) * LINE)) * LINE * (not header.sums_by_messages)
            owned += (len(owners) - 1) * part
    sums = set()
    for i in program.instructions(rank):
        if i.op == Op.ALLREDUCE and i.kind in (Kind.X, Kind.G):
            giver = i.stage if i.kind == Kind.X else (i.piece if i.piece >= 0 else header.graph.consumers[i.stage][0])
            ranks = header.compute[F if i.kind == Kind.X else B, list(header.tensor_parallel.slices_of(giver)), i.mb]
            column = header.graph.size_columns(np.array([i.stage]), np.array([i.piece]))[0]
            sums.add((tuple(ranks), int(bytes.outputs(header)[column])))
    for ranks, part in sums:  # what is summed, and a slice from each of the other ranks
        owned += part + (len(ranks) - 1) * -(-part // (len(ranks) * LINE)) * LINE
    return owned + sum(planned.sizes[rank]) + max(running)


def hold(program, bytes):
    """Assert all properties of the planned slots, and the peak."""
    planned, needed = memory_plan(program, bytes), footprint(program, bytes)
    assert planned.slot.dtype == np.int32
    assert len(planned.sizes) == program.header.workers
    for rank in range(program.header.workers):
        row, sizes = planned.slot[program.bounds[rank] : program.bounds[rank + 1]], planned.sizes[rank]
        found = lives(program, rank)
        received = [life for life in found if life.placed]
        assert np.flatnonzero(row >= 0).tolist() == sorted({life.begin for life in received})
        for life in received:
            assert size(life, bytes, program.header) <= sizes[row[life.begin]]
        for one, other in combinations(received, 2):
            apart = one.end < other.begin or other.end < one.begin
            if one.kind == other.kind == Kind.W and one.stage == other.stage and one.piece != other.piece:
                continue  # parts of one copy
            assert apart or row[one.begin] != row[other.begin], (one, other)
        # As many slots of a size as buffers of that size are alive at once, each filled by its buffers.
        pools = defaultdict(list)
        for life in received:
            if life.kind != Kind.W:
                pools[life.kind == Kind.DW, size(life, bytes, program.header)].append(life)
        count = 0
        for (_, each), pool in pools.items():
            used = {int(row[life.begin]) for life in pool}
            assert len(used) == at_once(pool) and (sizes[list(used)] == each).all()
            count += len(used)
        # One slot for all copies of a stage's weights, as large as the largest stage in it.
        copies = defaultdict(set)
        for life in received:
            if life.kind == Kind.W:
                copies[life.stage].add(int(row[life.begin]))
        assert all(len(one) == 1 for one in copies.values())
        shared = {one: [stage for stage in copies if copies[stage] == {one}] for one in set().union(*copies.values())}
        for one, stages in shared.items():
            assert sizes[one] == bytes.weight[stages].max()
        assert len(sizes) == count + len(shared)
        assert needed.peak[rank] == peak(program, rank, found, planned, bytes)
        assert needed.slots[rank] == sizes.sum()
        one_rank(program, rank, bytes, planned, needed)


def one_rank(program, rank, bytes, planned, needed):
    """Assert that the rank's rows alone give the same slots and peak of the rank."""
    mine = slice(program.bounds[rank], program.bounds[rank + 1])
    part = Program(program.header, program.rows.take(mine))
    again = memory_plan(part, bytes)
    assert (again.slot == planned.slot[mine]).all()
    assert (again.sizes[rank] == planned.sizes[rank]).all() and sum(map(len, again.sizes)) == len(planned.sizes[rank])
    assert footprint(part, bytes).peak[rank] == needed.peak[rank]


def timeline_of(program, sizes, kind):
    """The bytes of buffers of a kind that every rank holds."""
    lives = analyse(program).lifetimes
    return lives.timeline(np.where(lives.buffer == kind, lives.amounts(sizes.by_kind(program.header)), 0))


def peaks_of_timeline(program, data):
    """Assert that the maximum of each kind's timeline is the peak of that kind, and that all memory is freed."""
    stages = program.header.stages
    sizes = st.lists(st.integers(1, 9), min_size=stages, max_size=stages)
    edges = len(program.header.graph.edges)
    by_edge = data.draw(st.none() | st.lists(st.integers(1, 9), min_size=edges, max_size=edges))
    amounts = {key: data.draw(sizes) for key in ("activation", "weight", "saved", "half")}
    machine = Machine(**amounts, edge_activation=by_edge)
    memory = simulate(program, program.header.cost, machine).memory
    for kind, most in zip(Buffer, memory, strict=True):
        series = timeline_of(program, buffer_sizes(machine, stages, edges), kind)
        peak = np.zeros(program.header.workers, np.int64)
        np.maximum.at(peak, program.rows.rank, series.during)
        assert peak.tolist() == most.tolist()
        assert series.taken.min() >= 0 and series.freed.min() >= 0
        net = np.bincount(program.rows.rank, series.taken - series.freed, minlength=program.header.workers)
        assert not net.any()
