"""ALLREDUCE t.k: the gradients of the parameters that the stages of tie k share, summed in the order of the stages.

Tied stages each have a copy of these parameters. The sum replaces the gradients of every copy, so all copies get the
same step.
"""

from __future__ import annotations

import torch

from mpirun.comm.ordered_allreduce import OrderedAllreduce
from mpirun.engine.core.context import Act, Context
from mpirun.engine.core.weight_layout import sections
from mpirun.model.contract import Model
from mpirun.model.stage_shape import flat_layout
from schedgen.ir.instructions import Instruction


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
