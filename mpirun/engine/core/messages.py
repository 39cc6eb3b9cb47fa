"""FETCH_W, RECV, SEND and FREE: transfers of buffers between ranks; ADD and ALLREDUCE: sums of dw.s over ranks.

Each is prepared once. A rank that does not own a stage sends its partial sum of dw.s to an owner, whose ADD adds the
rows. If a stage has several owners, they send and add, too, or their ALLREDUCE starts the sum over them. That overlaps
other instructions; NORM, or a STEP to a version, waits for it. Other kinds of sums are among the features around
(`engine.other_sums`): x and g over the slices of a stage, t.k over tied stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpirun.comm.ordered_allreduce import OrderedAllreduce
from mpirun.engine.core.buffers import LocalBuffer
from mpirun.engine.core.context import Act, Context, in_order
from schedgen.ir.instructions import Instruction, Kind, Op


class Transfers:
    """Prepares the instructions that start transfers, and FREE, which waits for them.

    Each method takes the row of an instruction and the instruction, and returns the act.
    """

    def __init__(self, context: Context) -> None:
        self.context, self.buffers, self.transport = context, context.buffers, context.transport
        self.first_fetches = first_fetches(context.instructions)

    def fetch_w(self, row: int, i: Instruction) -> Act:
        """FETCH_W: start receiving a shard of the weights; a copy's first FETCH_W also copies in the rank's shards."""
        stage = self.context.stages[i.stage]
        weights = stage.weights[stage.shard_spans[i.shard]]
        act = self._receive(row, i, Kind.W, self.buffers.get(Kind.W, i.stage, piece=i.shard), weights, weights)
        if row not in self.first_fetches or not stage.owned:
            return act
        # Copied through `data`: autograd does not see it, as it sees no message.
        copies = [(stage.weights.data[stage.shard_spans[shard]], owned) for shard, owned in stage.owned.items()]
        return in_order(lambda: [target.copy_(owned) for target, owned in copies], act)

    def recv(self, row: int, i: Instruction) -> Act:
        """RECV: start receiving an x, a g or another rank's partial sum of a dw into its memory slot."""
        slots = self.context.slots
        if i.kind == Kind.DW:
            buffer = self.buffers.partial_sums[i.stage, i.shard, i.source] = LocalBuffer()
            gradient = self.context.grad_buffers.of_unit((i.stage, i.shard))
            size = len(slots.keys(i.source, i.stage, i.shard)), len(gradient.total)
            memory = slots.received(i, size, torch.uint8)
            return self._receive(row, i, i.kind, buffer, memory, [gradient.as_numbers(sent) for sent in memory])
        buffer = self.buffers.named_by(i)
        spec = self.context.dataflow.bundle(i.kind, i.stage, i.consumer).spec
        memory = slots.received(i, spec.size, spec.dtype)
        return self._receive(row, i, i.kind, buffer, memory, memory)

    def _receive(self, row: int, i: Instruction, tag: int, buffer: LocalBuffer, memory: Tensor, value: Any) -> Act:
        """An act that starts receiving into `memory`; `value`: what becomes the buffer's value."""
        start, done = self.transport.receive(memory, i.source, tag)

        def act() -> None:
            start()
            buffer.value, buffer.arriving, buffer.receive_row = value, done, row

        return act

    def send(self, row: int, i: Instruction) -> Act:
        """SEND: start sending a buffer; if it is still being received, first wait until it has arrived."""
        buffer, to, kind = self.buffers.named_by(i), i.to, i.kind
        send, wait_value = self.transport.send, self.buffers.wait_value
        if kind == Kind.DW:
            message, pack = self.context.grad_buffers.of_unit((i.stage, i.shard)).message()

            def send_gradient() -> None:
                buffer.sends.append((send(message, to, kind), row))

            return send_gradient if pack is None else in_order(pack, send_gradient)
        if kind == Kind.W:
            stage = self.context.stages[i.stage]
            buffer.value = stage.owned[i.shard] if i.shard in stage.owned else stage.weights[stage.shard_spans[i.shard]]

        def act() -> None:
            value = buffer.value if buffer.arriving is None else wait_value(buffer)
            buffer.sends.append((send(value, to, kind), row))

        return act

    def free(self, row: int, i: Instruction) -> Act:
        """FREE: wait until the buffer's transfers are done, then drop the value of an x or g."""
        buffer, keep = self.buffers.named_by(i), i.kind in (Kind.W, Kind.DW)
        wait_sent, wait_value = self.buffers.wait_sent, self.buffers.wait_value

        def act() -> None:
            if buffer.sends:
                wait_sent(buffer)
            if buffer.arriving is not None:  # it has been received without being used
                wait_value(buffer)
            if not keep:
                buffer.value = None

        return act


class Sums:
    """Prepares ADD and ALLREDUCE, by methods with the signature of those of `Transfers`."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.by_stage: dict[int, OrderedAllreduce] = {}  # of a dw over its owners

    def add(self, row: int, i: Instruction) -> Act:
        """ADD: add the partial sum that another rank has sent."""
        gradient = self.context.grad_buffers.of_unit((i.stage, i.shard))
        buffers = self.context.buffers
        received, wait_value = buffers.partial_sums[i.stage, i.shard, i.source], buffers.wait_value
        keys = self.context.slots.keys(i.source, i.stage, i.shard)

        def act() -> None:
            gradient.add_rows(keys, wait_value(received))

        return act

    def allreduce(self, row: int, i: Instruction) -> Act:
        """ALLREDUCE: start the sum of dw.s over its owners, or what prepares a sum of another kind."""
        context = self.context
        if i.kind != Kind.DW:
            return context.other_sums[i.kind](context, i)
        if i.stage not in self.by_stage:
            keys = [context.slots.keys(rank, i.stage) for rank in context.header.groups[i.group]]
            gradient, group = context.grad_buffers.of_stage(i.stage), context.transport.group(i.group)
            rows = gradient.data[: len(keys[group.rank])]  # an owner without terms has a row for the sum alone
            sections = context.stages[i.stage].sections
            self.by_stage[i.stage] = OrderedAllreduce(context.transport, group, rows, keys, sections, gradient.total)
        allreduce, start = self.by_stage[i.stage], context.allreduces.start

        def act() -> None:
            start(allreduce)

        return act


def first_fetches(instructions: Sequence[Instruction]) -> set[int]:
    """The rows of the FETCH_Ws that begin a copy of a stage's weights: no other shard of the copy is live then."""
    live_shards: dict[int, set[int]] = {}  # by stage
    first = set()
    for row, i in enumerate(instructions):
        shards = live_shards.setdefault(i.stage, set())
        if i.op == Op.FETCH_W:
            if not shards:
                first.add(row)
            shards.add(i.shard)
        elif i.op == Op.FREE and i.kind == Kind.W:
            shards.discard(i.shard)
    return first
