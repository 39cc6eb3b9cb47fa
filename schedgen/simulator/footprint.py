"""Footprint: the bytes that every rank needs, the sum of three amounts.

owned     what it holds throughout: weights, optimizer state and gradients of the units it owns, room for the sums that
          it takes part in, also over tied stages, losses; in a list of forwards alone, weights and room for sums
slots     its memory plan
computed  the most bytes at once of activations, gradients and saved forwards that it computes, and workspaces

Beside these a rank has `host` bytes in the memory of its host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from schedgen.analysis import Lifetimes, analyse
from schedgen.ir.cost import DIRECTION
from schedgen.ir.effects import Buffer
from schedgen.ir.header import Header
from schedgen.ir.instructions import B, F, Kind, Op
from schedgen.ir.program import Program
from schedgen.ir.weights import LINE
from schedgen.simulator.buffer_sizes import NUMBER, BufferSizes
from schedgen.simulator.memory_plan import host_plan, memory_plan
from schedgen.util.arrays import Flags, Numbers


class Footprint(NamedTuple):
    """The bytes a rank needs, arrays by rank; the peak is their sum."""

    owned: Numbers
    slots: Numbers
    computed: Numbers
    host: Numbers  # not of the device, and not in its peak

    @property
    def peak(self) -> Numbers:
        """Bytes by rank on its device."""
        return self.owned + self.slots + self.computed


def footprint(program: Program, sizes: BufferSizes) -> Footprint:
    """The bytes that every rank needs, for a checked, projected program or, as in `memory_plan`, some ranks' rows."""
    slots = [slot_sizes.sum() for slot_sizes in memory_plan(program, sizes).sizes]
    host = np.array([sizes.saved[stages].sum() for stages in host_plan(program).stages], np.int64)
    if program.header.offloads_optimizer:
        host += program.header.is_owner @ sizes.state_by_unit(program.header.weight_shards)[0]
    owned, computed = np.zeros((2, program.header.workers), np.int64)
    for part in owned_parts(program.header, sizes):
        np.add.at(owned, list(part.ranks), part.bytes)
    np.maximum.at(computed, program.rows.rank, computed_bytes(program, sizes).sum(axis=0))
    return Footprint(owned, np.array(slots, np.int64), computed, host)


def is_computed(lifetimes: Lifetimes) -> Flags:
    """By life: whether it is of what a rank computes, weights and their gradients left out."""
    return ~lifetimes.is_received & ~np.isin(lifetimes.buffer, (Buffer.W, Buffer.DW, Buffer.HOST))


def computed_bytes(program: Program, sizes: BufferSizes) -> Numbers:
    """By row, shape (2, rows): bytes of computed buffers that are alive, and what the job takes only while it runs."""
    lifetimes, table = analyse(program).lifetimes, program.rows
    workspace = np.zeros((len(Op), program.header.stages), np.int64)
    for op, direction in DIRECTION.items():
        workspace[op] = sizes.workspace.get(direction, 0)
    workspace[Op.RECOMPUTE] += sizes.activation  # its output, thrown away
    amounts = lifetimes.amounts(sizes.by_kind(program.header)) * is_computed(lifetimes)
    stage = np.where(table.kind == Kind.T, 0, table.stage)  # t.k has the number of a tie
    alone = workspace[table.op, stage]
    if not program.header.is_forward:  # a forward that keeps nothing still has its graph while it runs
        drops = table.op == Op.FWD
        drops[lifetimes.begin[lifetimes.buffer == Buffer.SAVED]] = False
        alone += np.where(drops, sizes.saved[stage], 0)
    return np.stack([lifetimes.timeline(amounts).during, alone])


class OwnedPart(NamedTuple):
    """A part of what ranks hold throughout."""

    kind: str
    stage: int  # -1: it is of no single stage
    ranks: Sequence[int]  # each holds it as often as it is listed
    bytes: int


def owned_parts(header: Header, sizes: BufferSizes) -> Iterator[OwnedPart]:
    """The parts of `Footprint.owned`."""
    shards = header.weight_shards
    weight, _ = sizes.by_unit(shards)
    columns = np.stack([weight, *sizes.state_by_unit(shards)], axis=1).tolist()
    for (size, state, few), (stage, part) in zip(columns, shards.units, strict=True):
        ranks = shards.holders(stage, part)
        if header.is_forward:
            yield OwnedPart("weights", stage, ranks, size)
            continue
        if header.offloads_optimizer:
            yield OwnedPart("weights", stage, ranks, size + few)
        else:
            yield OwnedPart("weights and optimizer state", stage, ranks, size + state + few)
        yield OwnedPart("gradients", stage, ranks, size)
        yield OwnedPart(
            "room for sums", stage, ranks, _received_slices(size, 1 if header.sums_by_messages else len(ranks))
        )
    for stage in range(header.stages):
        if not header.graph.consumers[stage] and not header.is_forward:  # losses are kept until NORM
            losses = min(int(sizes.activation[stage]), NUMBER)
            yield OwnedPart("losses", stage, header.compute[F, stage].tolist(), losses)
    for rank, ranks, size in _summed_parts(header, sizes.outputs(header)):
        yield OwnedPart("room for sums", -1, [rank], size + _received_slices(size, len(ranks)))
    yield from _tied_sums(header, sizes)


def _tied_sums(header: Header, sizes: BufferSizes) -> Iterator[OwnedPart]:
    """The bytes of the sums over tied stages, if it is known how much these share.

    A stage counts once, by its first owner: that packs its gradient into a row. Every owner has the total, and receives
    one slice of all rows that others packed.
    """
    known = [] if sizes.tied is None else sizes.tied.tolist()
    for tie, (stages, size) in enumerate(zip(header.tied, known, strict=False)):  # a search orders jobs without ties
        ranks = header.sharers(tie)
        for rank in ranks:
            packed = sum(header.owners[stage][0] == rank for stage in stages)
            bytes = (packed + 1) * size + (len(stages) - packed) * _slice(size, len(ranks))
            yield OwnedPart("room for sums", -1, [rank], bytes)


def _summed_parts(header: Header, outputs: Numbers) -> set[tuple[int, tuple[int, ...], int]]:
    """For every sum over slices and each member: its rank, all members in the order of the slices, bytes of the sum.

    Equal entries share one scratch buffer. `outputs`: bytes of x and g, by stage and then by edge.
    """
    entries: set[tuple[int, tuple[int, ...], int]] = set()
    producer, consumer = np.array(header.graph.edges, np.int64).reshape(-1, 2).T
    names = np.array([header.graph.gradient_consumer(*edge) for edge in header.graph.edges], np.int64)
    gradients: dict[int, list[int]] = {}  # by stage: bytes of each that its backward gives
    by_edge = outputs[header.graph.size_columns(producer, names)]
    for stage, size in zip(consumer.tolist(), by_edge.tolist(), strict=True):
        gradients.setdefault(stage, []).append(size)
    for stage in range(header.stages):
        slices = header.tensor_parallel.summed_stages(stage)
        if len(slices) == 1:
            continue
        given = (F, [int(outputs[stage])]), (B, gradients.get(stage, []))
        for d, parts in given[: len(header.compute)]:
            for ranks in set(map(tuple, header.compute[d, slices.start : slices.stop].T.tolist())):
                entries |= {(ranks[slices.index(stage)], ranks, size) for size in parts}
    return entries


def _received_slices(size: int, members: int) -> int:
    """Bytes that a member needs to all-reduce `size` bytes: it adds up one slice, which it receives from all others."""
    return (members - 1) * _slice(size, members)


def _slice(size: int, members: int) -> int:
    """Bytes of the slice of `size` bytes that one member adds up."""
    return -(-size // (members * LINE)) * LINE
