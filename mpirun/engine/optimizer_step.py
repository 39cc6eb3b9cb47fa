"""NORM and STEP, the end of a step: all ranks learn the losses and the gradient's norm, then weights are stepped.

NORM waits for the sums of gradients, and tells all ranks the loss of every microbatch, the norm of every parameter's
gradient, and whether some rank wants to leave. The metrics of the trial's names go with these numbers; in a step in
which the loss returns others, they are gathered after them. STEP steps weights after the last accumulation pass, if all
these numbers are finite. A STEP that makes a version of the weights is in `weight_versions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpirun.engine.act import Act
from mpirun.engine.context import Context
from mpirun.engine.grad_norm import GradNorms, total_norm
from mpirun.engine.weight_shards import Unit
from mpirun.engine.weight_versions import StageVersions
from mpirun.model.stage_shape import StageShape
from schedgen.ir.header import Header
from schedgen.ir.instructions import Instruction, Kind


class StepResult(NamedTuple):
    """The result of a step, the same on all ranks."""

    losses: list[float]  # by microbatch
    grad_norm: float
    parameter_norms: list[float]  # of every parameter's gradient, in the order of the model
    leave: bool  # some rank wants to leave
    metrics: list[dict[str, float]]  # by microbatch, what the loss returned besides its value; {} may be padding
    rate: float  # the learning rate; 0 where no rank has parameters


class OptimizerStep:
    """Prepares NORM and STEP, by methods with the signature of those of `Transfers`, and keeps the result of NORM."""

    def __init__(
        self,
        context: Context,
        versions: StageVersions,
        losses: dict[int, Tensor],
        metrics: dict[int, dict[str, Tensor]],
    ) -> None:
        """`losses`, `metrics`: by microbatch, where the forwards of this rank put them; NORM takes them out."""
        self.context, self.versions, self.losses, self.metrics = context, versions, losses, metrics
        setup = context.setup
        self.grad_norms = GradNorms(context.header, setup.shapes, context.transport.comm.rank, setup.canonical)
        self.leave_requested: Callable[[], bool] = lambda: False  # by this rank: all ranks learn it at the next NORM
        self.finite = True  # whether all losses and norms of the step so far are
        facts = setup.shapes[-1].loss
        self.metric_names = () if facts is None else facts.metrics
        self.rate_from = _first_with_parameters(context.header, setup.shapes)
        self.result = StepResult([], 0.0, [], False, [], 0.0)
        # The layout of the numbers that NORM exchanges: those of the norms, a loss for every microbatch, whether a rank
        # wants to leave, the learning rate, the metrics of every microbatch, and whether those of a rank have other
        # names.
        count = context.header.microbatches
        sizes = [self.grad_norms.length, count, 1, 1, count * len(self.metric_names), 1]
        self.ends = list(accumulate(sizes, initial=0))
        (
            self.norms_at, self.losses_at, self.leave_at, self.rate_at, self.metrics_at, self.others_at,
        ) = (slice(*ends) for ends in pairwise(self.ends))  # fmt: skip
        self.on_gradients: Callable[[dict[Unit, Tensor]], None] = lambda totals: None  # --verify records them

    def norm(self, row: int, i: Instruction) -> Act:
        """NORM: complete the gradients that this rank owns, and exchange the step's numbers with all ranks."""
        context, position = self.context, self.context.position
        owned = context.grad_buffers.owned()
        row_sums = context.grad_buffers.claim_row_sums(owned)
        totals = {unit: buffer.total for unit, buffer in owned.items()}
        stages = {unit: context.stages[unit[0]] for unit in owned}
        contributors = [
            self.grad_norms.contributor(
                unit, stages[unit], stages[unit].views_of_shard(unit[1], total), self.versions.unsound.get(unit[0])
            )
            for unit, total in totals.items()
        ]

        def act() -> None:
            context.allreduces.finish()
            self.versions.copy_last_to_0()
            for buffer in row_sums:
                buffer.sum_rows()
            if position.passes > 1:
                context.optimizer.accumulate(owned, first=position.accumulation_pass == 0, last=position.in_last_pass)
            self._tell(i.group, contributors)
            if position.in_last_pass and self.finite:
                self.on_gradients(totals)

        return act

    def _tell(self, group: int, contributors: Sequence[Callable[[np.ndarray], None]]) -> None:
        """Sum the step's numbers over all ranks; `contributors`: fill in this rank's numbers for the norms."""
        context, names = self.context, self.metric_names
        # Each number comes from one rank, or is a whole number on all of them: the sums are exact.
        values, sums = np.zeros(self.ends[-1]), np.empty(self.ends[-1])
        metrics, sums_of_metrics = (
            numbers[self.metrics_at].reshape(context.header.microbatches, len(names)) for numbers in (values, sums)
        )
        for contribute in contributors:
            contribute(values)
        if self.losses:
            values[self.losses_at][list(self.losses)] = torch.stack(list(self.losses.values())).tolist()
        self.losses.clear()
        values[self.leave_at] = self.leave_requested()
        if context.transport.comm.rank == self.rate_from:
            values[self.rate_at] = context.optimizer.rate(context.position.step)
        own = {mb: {name: float(found[name]) for name in sorted(found)} for mb, found in self.metrics.items()}
        self.metrics.clear()
        for mb, found in own.items():
            metrics[mb] = [found.get(name, 0.0) for name in names]
        values[self.others_at] = any(found.keys() != {*names} for found in own.values())
        context.transport.wait(context.transport.group(group).Iallreduce(values, sums).Test)
        norms, losses = self.grad_norms.norms(sums[self.norms_at].tolist()), sums[self.losses_at].tolist()
        (leave,), (rate,) = sums[self.leave_at].tolist(), sums[self.rate_at].tolist()
        by_name = [dict(zip(names, of_mb, strict=True)) for of_mb in sums_of_metrics.tolist()]
        if sums[self.others_at].any():
            of_ranks = context.transport.group(group).allgather(own)
            own = {mb: of_mb for of_rank in of_ranks for mb, of_mb in of_rank.items()}
            by_name = [own.get(mb, {}) for mb in range(context.header.microbatches)]
        self.result = StepResult(losses, total_norm(norms), norms, leave > 0, by_name, rate)
        begins = context.position.accumulation_pass == 0
        self.finite = (self.finite or begins) and bool(np.isfinite(sums[: self.losses_at.stop]).all())

    def step(self, row: int, i: Instruction) -> Act:
        """STEP: step the weights of a unit that this rank owns."""
        if i.version >= 0:
            return self.versions.step(i)
        unit, context, position = (i.stage, i.shard), self.context, self.context.position
        weights, gradient = context.buffers.get(Kind.W, i.stage, piece=i.shard), context.grad_buffers.of_unit(unit)

        def act() -> None:
            context.buffers.wait_sent(weights)
            if position.in_last_pass and self.finite:
                context.optimizer.step(unit, gradient, position.step, self.result.grad_norm)

        return act


def _first_with_parameters(header: Header, shapes: Sequence[StageShape]) -> int:
    """The rank that reports the learning rate: the first owner of the first stage with parameters; -1: none has any."""
    owners = (header.first_owner(stage) for stage, shape in enumerate(shapes) if shape.parameter_names)
    return next(owners, -1)
