"""ALLREDUCE of an x or a g: the sum, over the shards of a tensor-parallel stage, of what each shard has computed.

Outputs are summed after forwards, gradients of inputs after backwards, in the order of the shards: the bits are the
same on all shards and in every run. A sum goes on while other instructions run; the first that reads it waits.
Transfers need memory with a fixed address, so the summands are copied there. Sums over the same ranks, of the same
size and type, share this memory: each begins when the one before is done.
"""

from __future__ import annotations

import torch

from mpirun.comm.ordered_allreduce import SHARD_TAGS, OrderedAllreduce
from mpirun.comm.sections import Section
from mpirun.comm.transport import NO_ROW
from mpirun.engine.act import Act
from mpirun.engine.buffers import LocalBuffer
from mpirun.engine.context import Context
from schedgen.ir.instructions import B, F, Instruction, Kind


class ShardAllreduce:
    """Prepares the sums over shards that a rank takes part in."""

    def __init__(self, context: Context) -> None:
        """Sums are prepared as they are asked for."""
        self.context = context
        # By the ranks of the shards in their order, number of bytes, type.
        self.shared: dict[tuple[tuple[int, ...], int, torch.dtype], OrderedAllreduce] = {}
        self.latest: dict[OrderedAllreduce, LocalBuffer] = {}  # the buffer that each of them summed last

    def allreduce(self, row: int, i: Instruction) -> Act:
        """ALLREDUCE: start the sum, which will replace the summand of this rank's shard in the buffer."""
        header, transport = self.context.header, self.context.transport
        if i.kind == Kind.G:
            consumer = header.graph.consumers[i.stage][0] if i.consumer < 0 else i.consumer
            direction, shards = B, header.shards_of(consumer)
        else:
            direction, shards = F, header.shards_of(i.stage)
        ranks = tuple(header.compute[direction, list(shards), i.mb].tolist())
        spec = self.context.setup.dataflows[i.mb].bundle(i.kind, i.stage, i.consumer).spec
        key = ranks, spec.bytes, spec.dtype
        if key not in self.shared:
            rows = torch.empty((1, spec.bytes), dtype=torch.uint8, device=self.context.slots.device)
            keys, sections = [[ranks.index(rank)] for rank in header.groups[i.group]], [Section(0, *key[1:])]
            group = transport.group(i.group)
            self.shared[key] = OrderedAllreduce(transport, group, rows, keys, sections, tags=SHARD_TAGS)
        buffer, allreduce, allreduces = self.context.buffers.named_by(i), self.shared[key], self.context.allreduces
        total, wait_value, latest = allreduce.total.view(spec.dtype), self.context.buffers.wait_value, self.latest

        def done() -> bool:
            allreduces.advance()
            if not allreduce.done:  # look only once: another thread may end it before a second look
                return False
            allreduce.arrive()
            buffer.value = total.clone().view(spec.size)  # autograd may have saved the summand
            return True

        def act() -> None:
            if allreduce in latest:
                wait_value(latest[allreduce])
            total.copy_(buffer.value.view(-1))
            allreduces.start(allreduce)
            buffer.arriving, buffer.receive_row, latest[allreduce] = done, NO_ROW, buffer

        return act
