"""Bytes of every buffer, message and sum of a schedule, from the amounts of a machine; and of those in flight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from schedgen.analysis import analyse
from schedgen.ir.cost import Amount, by_stage
from schedgen.ir.effects import Effect
from schedgen.ir.header import Header
from schedgen.ir.instructions import EXCHANGED, Kind, Op
from schedgen.ir.program import Program
from schedgen.ir.weights import WeightShards
from schedgen.simulator.machine import Machine, workspaces
from schedgen.util.arrays import Numbers
from schedgen.util.errors import UsageError

BOOKKEEPING = 16  # what an owner holds besides whole copies of the weights is bookkeeping if below 1/16 of them
NUMBER = 8  # the most bytes of a loss, which is the x of a last stage


class BufferSizes(NamedTuple):
    """Bytes of what a schedule handles, each an array by stage, shape (S,) of int64, if nothing else is said."""

    activation: Numbers  # x.s.b and g.s.b
    weight: Numbers  # a copy of w.s with all its shards, and dw.s
    partial: Numbers  # a received dw.s; if weights are divided, a multiple of w.s, and the same for each of its shards
    saved: Numbers  # what a forward keeps for its backward
    half: Numbers  # what BWD_I keeps in addition until BWD_W; below 0 if it frees part of `saved`
    workspace: Mapping[str, Numbers]  # by direction, F, B, I or W: what a job takes only while it runs; left out: 0
    owned: Numbers  # what an owner holds for the stage throughout: weights and optimizer state
    edge_activation: Numbers | None = None  # by edge, x.s.b.c of a stage with outputs per consumer; None: as x.s.b
    tied: Numbers | None = None  # by tie, the parameters that its stages share; None: not known
    freed: Numbers | None = None  # of `saved`, what BWD_I frees and `half` leaves out; None: what is below 0 of `half`

    def outputs(self, header: Header) -> Numbers:
        """Bytes of x and g by stage and then by edge, shape (S + E,): see `StageGraph.size_columns`."""
        producers = np.array(header.graph.edges, np.int64).reshape(-1, 2)[:, 0]
        by_edge = self.activation[producers]
        if self.edge_activation is not None:
            by_edge = np.where(header.graph.is_per_consumer[producers], self.edge_activation, by_edge)
        return np.concatenate([self.activation, by_edge])

    def by_kind(self, header: Header) -> Numbers:
        """Bytes by kind of `Memory` (rows); columns are as in `outputs`, but units for weights and their gradients.

        A last row has `half` where what is saved leaves the device after BWD_I, and with it what BWD_I has freed of it.
        """
        x, (w, _) = self.outputs(header), self.by_unit(header.weight_shards)
        dw, partial = self.by_unit(header.gradient_units)
        state, _ = self.state_by_unit(header.weight_shards)
        whole = np.maximum(self.half + (0 if self.freed is None else self.freed), 0)
        amounts = (x, x, w, dw, partial, self.saved, self.half, self.saved, state, whole)
        sizes = np.zeros((len(amounts), max(map(len, amounts))), np.int64)
        for row, amount in zip(sizes, amounts, strict=True):
            row[: len(amount)] = amount
        return sizes

    def by_unit(self, units: WeightShards) -> tuple[Numbers, Numbers]:
        """`weight` and `partial` of every unit: a stage, or a shard of its weights or gradient."""
        weight = units.sizes(self.weight)
        if not units:
            return weight, self.partial
        return weight, weight * np.repeat(self.partial // np.maximum(self.weight, 1), units.counts)

    def state_by_unit(self, units: WeightShards) -> tuple[Numbers, Numbers]:
        """What an owner holds of every unit besides its weights: bytes of the optimizer's state, and of bookkeeping.

        A shard has its share of whole copies of the weights. A remainder below 1/16 of the weights is bookkeeping, such
        as counts of steps: a few bytes a parameter, and all parameters may be in this shard.
        """
        size, weight, owned = units.sizes(self.weight), self.weight[units.stage_of], self.owned[units.stage_of]
        copies = np.maximum(weight, 1)
        remainder = np.minimum(owned % copies, weight - owned % copies)
        few = np.where(BOOKKEEPING * remainder < weight, remainder, 0)
        is_divided = np.repeat(units.counts > 1, units.counts)
        whole = np.where(is_divided, -(-owned * size // copies) + few, owned)
        return np.maximum(whole - few - size, 0), np.minimum(few, np.maximum(whole - size, 0))


def buffer_sizes(machine: Machine, stages: int, edges: int = 0) -> BufferSizes:
    """The sizes for this many stages and edges, from the machine's amounts, rounded up to whole numbers.

    Unless `owned` is given, it is the weights without optimizer state.
    UsageError if an amount is below 0, unless it is `half`, or does not fit into 64 bits.
    """

    def count(amount: Amount, length: int = stages, least: float = 0) -> Numbers:
        if not (amounts := np.ceil(by_stage(amount, length))).max(initial=0) < 2**63:
            raise UsageError(f"sizes of {amounts.max():g} bytes are too large")
        if amounts.min(initial=0) < least:
            raise UsageError(f"sizes of {amounts.min():g} bytes are below 0")
        return amounts.astype(np.int64)

    weight, by_edge = count(machine.weight), machine.edge_activation
    return BufferSizes(
        activation=count(machine.activation),
        weight=weight,
        partial=weight,
        saved=count(machine.saved),
        half=count(machine.half, least=-math.inf),
        workspace={direction: count(amount) for direction, amount in workspaces(machine).items()},
        owned=weight if machine.owned is None else count(machine.owned),
        edge_activation=None if by_edge is None else count(by_edge, edges),
        freed=None if machine.freed is None else count(machine.freed),
        tied=None if machine.tied is None else count(machine.tied, len(machine.tied)),
    )


def message_bytes(program: Program, sizes: BufferSizes, rows: Numbers) -> Numbers:
    """Bytes of the buffer that each of these rows of messages and copies names; a received dw counts as its partial."""
    header, table = program.header, program.rows
    column, piece, kind = table.stage[rows], table.piece[rows], table.kind[rows]
    for units, kinds in ((header.weight_shards, (Kind.W, Kind.OPT)), (header.gradient_units, (Kind.DW,))):
        if units:
            of = np.flatnonzero(np.isin(kind, kinds))
            column[of] = units.first_unit[column[of]] + np.maximum(piece[of], 0)
    of = np.flatnonzero((piece >= 0) & np.isin(kind, EXCHANGED))
    column[of] = header.graph.size_columns(column[of], piece[of])
    kind[(kind == Kind.DW) & (table.op[rows] == Op.RECV)] += 1
    x, g, w, dw, partial, saved, *_, state, _ = sizes.by_kind(header)
    by_kind: Numbers = np.stack([0 * x, x, g, w, dw, partial, saved, state])  # partial: for t, which is not sent
    return by_kind[kind, column]


def summed_bytes(program: Program, sizes: BufferSizes) -> Numbers:
    """By row: the bytes that an ALLREDUCE sums; 0 for other rows.

    If it is not known how much tied stages share, a tie counts as all weights of the smallest of its stages, the most
    that they can share. Slices of one stage share next to nothing, and count as sharing nothing.
    """
    table, header = program.rows, program.header
    tied = [
        0 if header.ties_slices(tie) else sizes.weight[list(stages)].min() for tie, stages in enumerate(header.tied)
    ]
    by_tie = np.array(tied, np.int64) if sizes.tied is None else sizes.tied
    summed = np.zeros(len(program), np.int64)
    sums = program.rows_of(Op.ALLREDUCE)
    for kind, by_number in ((Kind.DW, sizes.weight), (Kind.T, by_tie)):
        rows = sums[table.kind[sums] == kind]
        summed[rows] = by_number[table.stage[rows]]
    rows = program.exchanges()
    summed[rows] = sizes.outputs(header)[header.graph.size_columns(table.stage[rows], table.consumer[rows])]
    return summed


def bytes_under_way(program: Program, sizes: BufferSizes) -> Numbers:
    """By row of a rank's list, shape (rows,): the bytes of messages and of sums of gradients in flight."""
    touched, rows = analyse(program).accesses, program.rows
    in_order = np.lexsort((touched.number, touched.buffer))  # by buffer, and then in the order of the list
    row, effect, place = touched.row[in_order], touched.effect[in_order], np.arange(len(in_order))
    name = np.stack([touched.buffer, touched.number])[:, in_order]

    def until(waits: np.ndarray) -> Numbers:
        """By access: the row of the buffer's next access for which `waits` holds, or the number of rows if none."""
        at = np.append(np.where(waits, place, len(place)), len(place))
        following = np.minimum.accumulate(at[::-1])[::-1][1:]
        same = (following < len(place)) & (name[:, np.minimum(following, len(place) - 1)] == name).all(axis=0)
        return np.where(same, np.append(row, 0)[following], len(program))

    is_sum = (rows.op[row] == Op.ALLREDUCE) & (rows.kind[row] == Kind.DW)
    sent, received = effect == Effect.SEND, effect == Effect.RECEIVE
    waited = np.where(sent, until((effect == Effect.CHANGE) | (effect == Effect.END)), until(np.full(len(row), True)))
    messages = row[sent | received]
    size = summed_bytes(program, sizes)
    size[messages] = message_bytes(program, sizes, messages)
    change = np.zeros(len(program) + 2, np.int64)
    starts = sent | received | is_sum
    np.add.at(change, row[starts] + 1, size[row[starts]])
    np.add.at(change, waited[starts], -size[row[starts]])
    return np.cumsum(change)[: len(program)]
