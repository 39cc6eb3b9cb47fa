"""ADD and ALLREDUCE of dw.s, a stage's weight gradient: sums over the ranks that compute or own the stage.

A rank that does not own the stage sends its partial sum to an owner, whose ADD adds the rows. If a stage has several
owners, they send and add, too, or their ALLREDUCE starts the sum over them. That overlaps other instructions; NORM, or
a STEP to a version, waits for it. Other kinds of sums are among the features around (`engine.other_sums`): x and g over
the slices of a stage, t.k over tied stages.
"""

from __future__ import annotations

from mpirun.comm.ordered_allreduce import OrderedAllreduce
from mpirun.engine.core.context import Act, Context
from schedgen.ir.instructions import Instruction, Kind


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
