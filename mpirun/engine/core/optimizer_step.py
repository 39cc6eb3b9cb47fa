"""NORM and STEP, the end of a step: all ranks learn the losses and the gradient's norm, then weights are stepped.

NORM waits for the sums of gradients, and tells all ranks the loss of every microbatch, the norm of every parameter's
gradient, and whether some rank wants to leave. Metrics go with these numbers; in the first step, and where the loss
returns others, they are gathered after them. STEP steps weights, if all these numbers are finite. A STEP that makes a
version of the weights is in `engine.weight_versions`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpirun.engine.core.context import Act, Context
from mpirun.model.stage_shape import Unit
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

    def __init__(self, context: Context) -> None:
        self.context = context
        self.leave_requested: Callable[[], bool] = lambda: False  # by this rank: all ranks learn it at the next NORM
        self.finite = True  # whether all losses and norms of the step are
        # The rank that reports the learning rate: the first owner of the first stage with parameters.
        with_parameters = [stage for stage, shape in enumerate(context.shapes) if shape.parameter_names]
        self.rate_from = context.header.first_owner(with_parameters[0]) if with_parameters else -1
        self.result = StepResult([], 0.0, [], False, [], 0.0)
        self.metric_names: Sequence[str] = ()  # of the first metrics
        self.numbers = self._numbers()
        self.on_gradients: Callable[[dict[Unit, Tensor]], None] = lambda totals: None  # --verify records them

    def _numbers(self) -> np.dtype[Any]:
        """What NORM exchanges; the last number says whether there are metrics of other names."""
        count = self.context.header.microbatches
        return np.dtype([
            ("norms", "f8", (self.context.norms.length,)), ("losses", "f8", (count,)), ("leave", "f8"), ("rate", "f8"),
            ("metrics", "f8", (count, len(self.metric_names))), ("other names", "f8"),
        ])  # fmt: skip

    def norm(self, row: int, i: Instruction) -> Act:
        """NORM: complete the gradients that this rank owns, and exchange the step's numbers with all ranks."""
        context = self.context
        owned = context.grad_buffers.owned()
        row_sums = context.grad_buffers.claim_row_sums(owned)
        totals = {unit: buffer.total for unit, buffer in owned.items()}
        parts = [(stage, part) for stage, _ in owned for part in context.header.gradient_units.of(stage)]
        sent = [context.buffers.get(Kind.DW, stage, piece=part) for stage, part in parts]  # to other owners
        stages = {unit: context.stages[unit[0]] for unit in owned}
        contributors = [
            context.norms.contributor(
                unit, stages[unit], stages[unit].views_of_shard(unit[1], total), context.versions.unsound.get(unit[0])
            )
            for unit, total in totals.items()
        ]

        def act() -> None:
            context.allreduces.finish()
            context.versions.copy_last_to_0()
            for total in sent:
                context.buffers.wait_sent(total)
            for buffer in row_sums:
                buffer.sum_rows()
            self._tell(i.group, contributors)
            if self.finite:
                self.on_gradients(totals)

        return act

    def _tell(self, group: int, contributors: Sequence[Callable[[np.ndarray], None]]) -> None:
        """Sum the step's numbers over all ranks; `contributors`: fill in this rank's numbers for the norms."""
        context, names, count = self.context, self.metric_names, self.context.header.microbatches
        # Each number comes from one rank, or is a whole number on all of them: the sums are exact.
        flat = np.zeros((2, self.numbers.itemsize // 8))
        mine, sums = flat.view(self.numbers)[:, 0]
        for contribute in contributors:
            contribute(mine["norms"])
        if context.losses:
            mine["losses"][list(context.losses)] = torch.stack(list(context.losses.values())).tolist()
        context.losses.clear()
        mine["leave"] = self.leave_requested()
        if context.transport.comm.rank == self.rate_from:
            mine["rate"] = context.optimizer.rate(context.position.step)
        metrics = {mb: {name: float(of_mb[name]) for name in sorted(of_mb)} for mb, of_mb in context.metrics.items()}
        context.metrics.clear()
        for mb, of_mb in metrics.items():
            mine["metrics"][mb] = [of_mb.get(name, 0.0) for name in names]
        mine["other names"] = any(of_mb.keys() != {*names} for of_mb in metrics.values())
        context.transport.wait(context.transport.group(group).Iallreduce(flat[0], flat[1]).Test)
        norms, losses = context.norms.norms(sums["norms"].tolist()), sums["losses"].tolist()
        by_mb = [dict(zip(names, of_mb, strict=True)) for of_mb in sums["metrics"].tolist()]
        if sums["other names"]:
            of_ranks = context.transport.group(group).allgather(metrics)
            metrics = {mb: of_mb for of_rank in of_ranks for mb, of_mb in of_rank.items()}
            by_mb = [metrics.get(mb, {}) for mb in range(count)]
            if not names:
                self.metric_names = sorted({name for of_mb in by_mb for name in of_mb})
                self.numbers = self._numbers()
        leave, rate = bool(sums["leave"] > 0), float(sums["rate"])
        self.result = StepResult(losses, math.hypot(*norms), norms, leave, by_mb, rate)
        norms_and_losses = flat[1, : context.norms.length + count]
        self.finite = bool(np.isfinite(norms_and_losses).all())

    def step(self, row: int, i: Instruction) -> Act:
        """STEP: step the weights of a unit that this rank owns."""
        if i.version >= 0:
            return self.context.versions.step(self.context, i)
        unit, context, position = (i.stage, i.shard), self.context, self.context.position
        weights, gradient = context.buffers.get(Kind.W, i.stage, piece=i.shard), context.grad_buffers.of_unit(unit)
        state = context.optimizer.on_host.get(unit)

        def act() -> None:
            context.buffers.wait_sent(weights)
            if self.finite:
                if state is not None:
                    state.wait()
                context.optimizer.step(unit, gradient, position.step, self.result.grad_norm)

        return act
