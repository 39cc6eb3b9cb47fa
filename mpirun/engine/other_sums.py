"""ALLREDUCE of other kinds than dw: sums over the slices of a stage (tensor parallelism), and over tied stages.

x, g  The partial results of slices. Outputs are summed after forwards, gradients of inputs after backwards, in the
      order of the slices: the bits are the same on all ranks and in every run. The sum overlaps other instructions; the
      first that reads it waits for it.
t.k   The gradients of the parameters that the stages of tie k share, in the order of the stages. Tied stages each have
      a copy of these parameters. The sum replaces the gradients of every copy, so all copies get the same step.
"""

from __future__ import annotations

import torch

from mpirun.comm.ordered_allreduce import SLICE_TAGS, OrderedAllreduce, Section
from mpirun.comm.transport import NO_ROW
from mpirun.engine.core.buffers import LocalBuffer
from mpirun.engine.core.context import Act, Context
from mpirun.engine.core.stage import sections
from mpirun.model.contract import Model
from mpirun.model.stage_shape import flat_layout
from schedgen.ir.instructions import B, F, Instruction, Kind


class SliceSums:
    """Prepares these sums.

    Transfers need memory with a fixed address, so the summands are copied into such memory. Sums over the same ranks,
    of the same size and type, share it: each begins when the previous one is done.
    """

    def __init__(self) -> None:
        # By the ranks of the slices, in the order of the slices, the number of bytes and the type.
        self.shared: dict[tuple[tuple[int, ...], int, torch.dtype], OrderedAllreduce] = {}
        self.latest: dict[OrderedAllreduce, LocalBuffer] = {}  # the buffer that each of them summed last

    def prepare(self, context: Context, i: Instruction) -> Act:
        """An act that starts the sum, which will replace the summand of this rank's slice in the buffer."""
        header, transport = context.header, context.transport
        if i.kind == Kind.G:
            consumer = header.graph.consumers[i.stage][0] if i.consumer < 0 else i.consumer
            direction, slices = B, header.tensor_parallel.slices_of(consumer)
        else:
            direction, slices = F, header.tensor_parallel.slices_of(i.stage)
        ranks = tuple(header.compute[direction, list(slices), i.mb].tolist())
        spec = context.dataflow.bundle(i.kind, i.stage, i.consumer).spec
        key = ranks, spec.bytes, spec.dtype
        if key not in self.shared:
            rows = torch.empty((1, spec.bytes), dtype=torch.uint8, device=context.slots.device)
            keys, sections = [[ranks.index(rank)] for rank in header.groups[i.group]], [Section(0, *key[1:])]
            group = transport.group(i.group)
            self.shared[key] = OrderedAllreduce(transport, group, rows, keys, sections, tags=SLICE_TAGS)
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


def parameters_of_tie(model: Model, stages: tuple[int, ...]) -> list[dict[int, list[str]]]:
    """The parameters that exactly these stages share, each as a dict of its names by stage."""
    ties = [{stage: [name for place, name in tie if place == stage] for stage, _ in tie} for tie in model.tied]
    return [tie for tie in ties if tuple(sorted(tie)) == stages]


def tied_sum(model: Model, context: Context, i: Instruction) -> Act:
    """ALLREDUCE: pack the gradients of shared parameters, sum them over the stages, copy the sum into each owned dw."""
    header, transport, allreduces = context.header, context.transport, context.allreduces
    stages, group = header.tied[i.tie], transport.group(i.group)
    rank, grad_buffers = transport.comm.rank, context.grad_buffers
    owned = {stage: grad_buffers.of_stage(stage) for stage in stages if rank in header.owners[stage]}
    row_sums = grad_buffers.claim_row_sums([(stage, -1) for stage in owned])
    shared = parameters_of_tie(model, stages)
    views = {  # by owned stage, into its dw, which has each trained parameter once, under the first of its names
        stage: [
            view
            for names in shared
            for name, view in zip(buffer.stage.names, buffer.stage.views(buffer.total), strict=True)
            if name in names[stage]
        ]
        for stage, buffer in owned.items()
    }
    first = next(iter(owned))
    layout, size = flat_layout(views[first])
    # Each stage counts once: its first owner contributes its gradient.
    members = header.sharers(i.tie)
    keys = [[stage for stage in stages if header.owners[stage][0] == member] for member in members]
    contributed = keys[group.rank]
    rows = owned[first].data.new_zeros((len(contributed), size))
    allreduce = OrderedAllreduce(transport, group, rows, keys, sections(layout), rows.new_zeros(size))
    packed = [[place.of(row) for place in layout] for row in rows]
    summed = [place.of(allreduce.total) for place in layout]

    def act() -> None:
        for buffer in row_sums:
            buffer.sum_rows()
        if not layout:
            return
        allreduces.finish()
        for row, stage in zip(packed, contributed, strict=True):
            torch._foreach_copy_(row, views[stage])
        allreduces.start(allreduce)
        allreduces.finish()
        for copies in views.values():
            torch._foreach_copy_(copies, summed)

    return act
