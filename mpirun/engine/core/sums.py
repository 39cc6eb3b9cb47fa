"""ADD and ALLREDUCE: sums over ranks.

dw.s  A stage's weight gradient, over the ranks that compute or own the stage. A rank that does not own the stage sends
      its partial sum to an owner, whose ADD adds the rows. If a stage has several owners, their ALLREDUCE starts the
      sum over them. The sum overlaps other instructions; NORM, or a STEP to a version, waits for it.
x, g  The partial results of the slices of a stage (tensor parallelism). Outputs are summed after forwards, gradients of
      inputs after backwards, in the order of the slices: the bits are the same on all ranks and in every run. The sum
      overlaps other instructions; the first instruction that reads it waits for it.
t.k   The gradients of the parameters that the stages of tie k share: `engine.tied_sums`.
"""

from __future__ import annotations

import torch

from mpirun.comm.ordered_allreduce import SHARD_TAGS, OrderedAllreduce
from mpirun.comm.sections import Section
from mpirun.comm.transport import NO_ROW
from mpirun.engine.core.buffers import LocalBuffer
from mpirun.engine.core.context import Act, Context
from schedgen.ir.instructions import B, F, Instruction, Kind


class Sums:
    """Prepares ADD and ALLREDUCE, by methods with the signature of those of `Transfers`.

    Transfers need memory with a fixed address, so the summands of slices are copied into such memory. Sums over the
    same ranks, of the same size and type, share it: each begins when the previous one is done.
    """

    def __init__(self, context: Context) -> None:
        """No sum is prepared yet."""
        self.context = context
        self.by_stage: dict[int, OrderedAllreduce] = {}  # of a dw over its owners
        # By the ranks of the slices, in the order of the slices, the number of bytes and the type.
        self.shared: dict[tuple[tuple[int, ...], int, torch.dtype], OrderedAllreduce] = {}
        self.latest: dict[OrderedAllreduce, LocalBuffer] = {}  # the buffer that each of `shared` summed last

    def add(self, row: int, i: Instruction) -> Act:
        """ADD: add the partial sum that another rank has sent."""
        gradient = self.context.grad_buffers.of_unit((i.stage, i.part))
        buffers = self.context.buffers
        received, wait_value = buffers.partial_sums[i.stage, i.part, i.peer], buffers.wait_value
        keys = self.context.slots.keys(i.peer, i.stage, i.part)

        def act() -> None:
            gradient.add_rows(keys, wait_value(received))

        return act

    def allreduce(self, row: int, i: Instruction) -> Act:
        """ALLREDUCE: of a dw over the owners of a stage, of a t over tied stages, of an x or g over slices."""
        if i.kind == Kind.DW:
            return self._over_owners(i)
        return self.context.tied_sum(self.context, i) if i.kind == Kind.T else self._over_slices(i)

    def _over_owners(self, i: Instruction) -> Act:
        """ALLREDUCE dw: start the sum of a stage's gradient over its owners."""
        context = self.context
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

    def _over_slices(self, i: Instruction) -> Act:
        """ALLREDUCE x or g: start the sum, which will replace the summand of this rank's slice in the buffer."""
        header, transport = self.context.header, self.context.transport
        if i.kind == Kind.G:
            consumer = header.graph.consumers[i.stage][0] if i.consumer < 0 else i.consumer
            direction, shards = B, header.shards_of(consumer)
        else:
            direction, shards = F, header.shards_of(i.stage)
        ranks = tuple(header.compute[direction, list(shards), i.mb].tolist())
        spec = self.context.dataflows[i.mb].bundle(i.kind, i.stage, i.consumer).spec
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
