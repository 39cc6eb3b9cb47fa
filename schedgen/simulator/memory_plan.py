"""Memory plan: a slot for every buffer that a rank receives, assigned before the first step.

1. Activations, gradients and partial sums come from free lists, one per size. A buffer takes the slot that was
   freed last, so a rank has as many slots of a size as it has live buffers of that size at its peak.
2. All copies of a stage's weights use one slot, because autograd graphs keep pointers to them across FREE and
   FETCH_W. Two stages share a slot if their copies are never live together (first fit, by first fetch). The slot of
   divided weights has room for all shards, the rank's own included, because a job reads them as one block.
3. An owner's weight gradient is permanent and counts as owned. Elsewhere it has a slot from the first backward to its
   FREE or, if it is divided, to the FREE of its last shard. There is a free list per size.
4. The first version of an owner's weights is in the owner's own memory. Each further live version takes one slot, from
   a free list per stage, which also gets the owner's own memory once that is freed.

Everything else has no slot, also what a rank saves for another: `footprint` counts the most bytes that are live.
What a rank offloads has slots in the memory of the host, from a free list per stage: `host_plan`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedgen.analysis import Lifetimes, analyse
from schedgen.ir.effects import Buffer
from schedgen.ir.instructions import Op
from schedgen.ir.program import Program
from schedgen.simulator.buffer_sizes import BufferSizes
from schedgen.util.arrays import Ints, Numbers
from schedgen.util.jit import kernel


class MemoryPlan(NamedTuple):
    """The slots of every rank, numbered from 0, for what it receives, foreign weight gradients and weight versions."""

    # By row: the slot, on its rank, that a RECV, a FETCH_W, the first addition to a dw, or a STEP to a version that is
    # not in the owner's own weights fills; else -1.
    slot: Ints
    sizes: tuple[Numbers, ...]  # by rank: the bytes of each of its slots


class HostPlan(NamedTuple):
    """The slots of every rank, numbered from 0, in the memory of its host. A slot serves one stage.

    A RELOAD gives its slot back when it starts: the next OFFLOAD into it has to wait for the copy back.
    """

    slot: Ints  # by row: of an OFFLOAD its slot; else -1
    stages: tuple[Numbers, ...]  # by rank: the stage of each of its slots


class _Claims(NamedTuple):
    """Claims to slots, arrays by claim. The claims of a rank to one pool share a free list."""

    begin: Ints  # the first row at which it has a slot; -1: it has the owner's own memory, from the start
    end: Ints  # the row that frees it; -1: it keeps its slot
    pool: Numbers
    size: Numbers  # bytes


def memory_plan(program: Program, sizes: BufferSizes) -> MemoryPlan:
    """The plan for a checked, projected program, or for some of its ranks' rows: the ranks' plans are independent."""
    lifetimes, header = analyse(program).lifetimes, program.header
    is_weight = lifetimes.buffer == Buffer.W
    fetched = np.flatnonzero(lifetimes.is_received & is_weight)
    versions = np.flatnonzero(~lifetimes.is_received & is_weight)
    received = np.flatnonzero(lifetimes.is_received & ~is_weight)
    copies, copy_of_shard = _merge_shards(lifetimes, fetched, sizes)
    sums = np.flatnonzero(lifetimes.buffer == Buffer.DW)
    sums = sums[~header.owns_gradient[lifetimes.rank[sums], lifetimes.size_column[sums]]]
    gradients, _ = _merge_shards(lifetimes, sums, sizes)
    amounts = lifetimes.amounts(sizes.by_kind(header))[received]
    stage = lifetimes.stages_of(versions)
    claims = _concatenate(
        copies._replace(pool=_shared_slots(program, copies)),
        _Claims(lifetimes.begin[received], lifetimes.end[received], amounts, amounts),
        gradients._replace(pool=gradients.size),
        _Claims(lifetimes.begin[versions], lifetimes.end[versions], stage, sizes.weight[stage]),
    )
    slot_of_claim, counts = _slots_of(program, claims)
    slot, slotted = np.full(len(program), -1, np.int32), slot_of_claim >= 0
    slot[claims.begin[slotted]] = slot_of_claim[slotted]
    slot[lifetimes.begin[fetched]] = slot_of_claim[copy_of_shard]
    _continue_versions(program, lifetimes.begin[versions], slot)
    return MemoryPlan(slot, _by_slot(program, claims, slot_of_claim, counts))


def host_plan(program: Program) -> HostPlan:
    """The plan of the hosts' memory, for a program as for `memory_plan`."""
    lifetimes = analyse(program).lifetimes
    lives = np.flatnonzero(lifetimes.buffer == Buffer.HOST)
    stage = lifetimes.size_column[lives]
    claims = _Claims(lifetimes.begin[lives], lifetimes.end[lives], stage, stage)
    slot_of_claim, counts = _slots_of(program, claims)
    slot = np.full(len(program), -1, np.int32)
    slot[claims.begin] = slot_of_claim
    return HostPlan(slot, _by_slot(program, claims, slot_of_claim, counts))


def _slots_of(program: Program, claims: _Claims) -> tuple[Ints, Numbers]:
    """By claim its slot, and by rank how many slots it has."""
    slot_of_claim, below = np.full((2, len(claims.pool)), -1, np.int32)
    top, rank_of = np.full((2, int(claims.pool.max(initial=-1)) + 1), -1, np.int32)
    counts = np.zeros(program.header.workers, np.int64)
    if not len(claims.pool):  # as of the host, where nothing is offloaded
        return slot_of_claim, counts
    _assign_slots.sized(len(program))(
        program.bounds, _by_row(claims.begin, len(program)), _by_row(claims.end, len(program)), claims.pool,
        slot_of_claim, below, top, rank_of, counts,
    )  # fmt: skip
    return slot_of_claim, counts


def _by_slot(program: Program, claims: _Claims, slot_of_claim: Ints, counts: Numbers) -> tuple[Numbers, ...]:
    """By rank, the largest `size` of the claims to each of its slots."""
    offset, slotted = np.append(0, np.cumsum(counts)), slot_of_claim >= 0
    largest = np.zeros(offset[-1], np.int64)
    rank = program.rows.rank[claims.begin[slotted]]
    np.maximum.at(largest, offset[rank] + slot_of_claim[slotted], claims.size[slotted])
    return tuple(np.split(largest, offset[1:-1]))


def _merge_shards(lifetimes: Lifetimes, lives: Numbers, sizes: BufferSizes) -> tuple[_Claims, Numbers]:
    """Lives of shards of weights, or of their gradients, merged into claims for a stage; and the claim of each life.

    A claim lasts as long as any shard is live; its pool is the stage.
    """
    header, rows = lifetimes.program.header, len(lifetimes.program) + 1
    stage = lifetimes.stages_of(lives)
    pair = lifetimes.rank[lives].astype(np.int64) * header.stages + stage
    order = np.argsort(pair, kind="stable")  # lives are in the order of their first rows
    begin, end = (pair[order] * rows + column[lives[order]] for column in (lifetimes.begin, lifetimes.end))
    is_first = np.append(True, begin[1:] > np.maximum.accumulate(end)[:-1])[: len(lives)]
    first = np.flatnonzero(is_first)
    claim = np.empty_like(order)
    claim[order] = np.cumsum(is_first) - 1
    stage, begin = stage[order[first]], lifetimes.begin[lives[order[first]]]
    end = np.maximum.reduceat(lifetimes.end[lives[order]], first)
    return _Claims(begin, end, stage, sizes.weight[stage]), claim


def _concatenate(*kinds: _Claims) -> _Claims:
    """All claims, renumbered so that no two kinds share a pool."""
    numbered, pools = [], 0
    for claims in kinds:
        distinct, pool = np.unique(claims.pool, return_inverse=True)
        numbered.append(claims._replace(pool=pool + pools))
        pools += len(distinct)
    return _Claims(*(np.concatenate(columns) for columns in zip(*numbered, strict=True)))


def _by_row(rows: Ints, length: int) -> Ints:
    """By row of the program: its index in `rows`, in which only -1 may be repeated; -1: it is not there."""
    places = np.full(length + 1, -1, np.int32)
    places[rows] = np.arange(len(rows))
    return places[:-1]


def _continue_versions(program: Program, begins: Ints, slot: Ints) -> None:
    """Give a STEP that changes a version in place that version's slot; `begins`: the rows that fill other slots."""
    table = program.rows
    steps = program.rows_of(Op.STEP)
    pair = table.rank[steps].astype(np.int64) * program.header.stages + table.stage[steps]
    order = np.argsort(pair, kind="stable")
    steps, pair = steps[order], pair[order]
    place = np.arange(len(steps))
    source = np.maximum.accumulate(np.where(np.isin(steps, begins), place, -1))
    same = (source >= 0) & (pair[source] == pair)
    slot[steps[same]] = slot[steps[source[same]]]


@kernel
def _assign_slots(
    row_offsets: Numbers, begins: Ints, ends: Ints, pool: Numbers, slot: Ints, below: Ints, top: Ints, rank_of: Ints,
    counts: Numbers,
) -> None:  # fmt: skip
    """Fill `slot`, by claim, and `counts`, by rank, given the claim that begins and the one that ends at every row.

    `top`, by pool: on rank `rank_of`, the claim freed last; `below`, by claim: the one freed before; at first -1.
    """
    for rank in range(len(counts)):
        for row in range(row_offsets[rank], row_offsets[rank + 1]):
            for claim in (begins[row], ends[row]):
                if claim >= 0 and rank_of[pool[claim]] != rank:
                    rank_of[pool[claim]], top[pool[claim]] = rank, -1  # another rank's slots
            claim = begins[row]
            if claim >= 0 and top[pool[claim]] >= 0:
                slot[claim] = slot[top[pool[claim]]]
                top[pool[claim]] = below[top[pool[claim]]]
            elif claim >= 0:
                slot[claim] = counts[rank]
                counts[rank] += 1
            claim = ends[row]
            if claim >= 0:
                below[claim] = top[pool[claim]]
                top[pool[claim]] = claim


def _shared_slots(program: Program, copies: _Claims) -> Numbers:
    """By copy of fetched weights: the number, within its rank, of the slot that its stage shares with others."""
    shared, order = np.empty(len(copies.begin), np.int64), np.argsort(copies.begin)
    by_rank = np.split(order, np.searchsorted(copies.begin[order], program.bounds[1:-1]))
    for lives in filter(len, by_rank):  # the copies of one rank, by first row
        begin, end = copies.begin[lives], copies.end[lives]
        stages, first, stage = np.unique(copies.pool[lives], return_index=True, return_inverse=True)
        number = np.argsort(np.argsort(first))[stage]  # stages by first fetch
        pairs = int((np.arange(len(lives)) - np.searchsorted(np.sort(end), begin)).sum())
        shared[lives] = _first_fit.sized(pairs + len(lives))(number, begin, end, len(stages), pairs)[number]
    return shared


@kernel
def _first_fit(number: Numbers, begin: Ints, end: Ints, stages: int, pairs: int) -> Numbers:
    """By stage: the first slot that has no stage with a copy live at the same time as one of its own.

    Copies, by the `number` of their stage, are in the order of `begin`; `pairs`: how many of them are live together.
    """
    live, count = np.empty(stages, np.int64), 0  # copies
    # By stage, a list of the stages before it that it is live together with.
    head, following, other = np.full(stages, -1), np.empty(pairs, np.int64), np.empty(pairs, np.int64)
    listed = 0
    for copy in range(len(number)):
        remaining = 0
        for k in range(count):
            if end[live[k]] > begin[copy]:
                live[remaining] = live[k]
                remaining += 1
                a, b = number[copy], number[live[k]]
                other[listed], following[listed], head[max(a, b)] = min(a, b), head[max(a, b)], listed
                listed += 1
        live[remaining] = copy
        count = remaining + 1
    slot, taken = np.zeros(stages, np.int64), np.full(stages + 1, -1)  # by slot: the last stage that cannot have it
    for stage in range(stages):
        pair = head[stage]
        while pair >= 0:
            taken[slot[other[pair]]] = stage
            pair = following[pair]
        while taken[slot[stage]] == stage:
            slot[stage] += 1
    return slot
