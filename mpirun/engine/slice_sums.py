"""ALLREDUCE x or g: the partial results of the slices of a stage (tensor parallelism).

Outputs are summed after forwards, gradients of inputs after backwards, in the order of the slices: the bits are the
same on all ranks and in every run. The sum overlaps other instructions; the first that reads it waits for it.
"""

from __future__ import annotations

import torch

from mpirun.comm.ordered_allreduce import SHARD_TAGS, OrderedAllreduce
from mpirun.comm.sections import Section
from mpirun.comm.transport import NO_ROW
from mpirun.engine.core.buffers import LocalBuffer
from mpirun.engine.core.context import Act, Context
from schedgen.ir.instructions import B, F, Instruction, Kind


class SliceSums:
    """Prepares these sums.

    Transfers need memory with a fixed address, so the summands are copied into such memory. Sums over the same ranks,
    of the same size and type, share it: each begins when the previous one is done.
    """

    def __init__(self) -> None:
        """No sum is prepared yet."""
        # By the ranks of the slices, in the order of the slices, the number of bytes and the type.
        self.shared: dict[tuple[tuple[int, ...], int, torch.dtype], OrderedAllreduce] = {}
        self.latest: dict[OrderedAllreduce, LocalBuffer] = {}  # the buffer that each of them summed last

    def prepare(self, context: Context, i: Instruction) -> Act:
        """An act that starts the sum, which will replace the summand of this rank's slice in the buffer."""
        header, transport = context.header, context.transport
        if i.kind == Kind.G:
            consumer = header.graph.consumers[i.stage][0] if i.consumer < 0 else i.consumer
            direction, shards = B, header.shards_of(consumer)
        else:
            direction, shards = F, header.shards_of(i.stage)
        ranks = tuple(header.compute[direction, list(shards), i.mb].tolist())
        spec = context.dataflows[i.mb].bundle(i.kind, i.stage, i.consumer).spec
        key = ranks, spec.bytes, spec.dtype
        if key not in self.shared:
            rows = torch.empty((1, spec.bytes), dtype=torch.uint8, device=context.slots.device)
            keys, sections = [[ranks.index(rank)] for rank in header.groups[i.group]], [Section(0, *key[1:])]
            group = transport.group(i.group)
            self.shared[key] = OrderedAllreduce(transport, group, rows, keys, sections, tags=SHARD_TAGS)
        buffer, allreduce, allreduces = context.buffers.named_by(i), self.shared[key], context.allreduces
        total, wait_value, latest = allreduce.total.view(spec.dtype), context.buffers.wait_value, self.latest

        def done() -> bool:
            allreduces.advance()
            if not allreduce.done:  # read once: another thread may complete the sum meanwhile
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
