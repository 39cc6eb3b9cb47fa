"""The steps of a run in one process, without any schedule: the reference that a run is compared with.

The reference is the usual loop: forward through all stages, loss / B, backward, microbatch after microbatch; then clip
and step. For schedules with weight versions it has the same delayed updates: each microbatch runs forward and backward
with the versions that the schedule names, and a stage steps when it has all gradients of an update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from mpi4py import MPI
from torch import Tensor

from mpirun.engine.grad_norm import clip_factor, tensor_norms
from mpirun.engine.setup import Setup
from mpirun.verify.microbatch import (
    ForwardPass,
    ReferenceStage,
    Start,
    backward_of_minibatch,
    changed_buffers,
    forward,
    forward_backward,
    optimizer_of,
)
from mpirun.verify.record import Parameters, Record, on_host
from schedgen.ir.header import Header
from schedgen.ir.instructions import F, Op
from schedgen.ir.program import Program


def run_in_one_process(setup: Setup, header: Header, start: Start, steps: int, beat: Callable[[], None]) -> Record:
    """The record of `steps` steps. `beat` is called after each microbatch."""
    model = _Model(setup, header, start, beat)
    losses: list[list[float]] = []
    gradients: list[Parameters] = []
    for step in range(steps):
        of_step, total = model.forward_backward(step)
        losses.append(of_step)
        sizes = zip(total, tensor_norms(list(total.values()), setup.canonical), strict=True)
        once = [0.0 if model.is_outside_norm(*key) else size for key, size in sizes]
        gradients.append(on_host(total))
        model.update(step, total, math.hypot(*once))
    return Record(losses, gradients, on_host(model.parameters), changed_buffers(model.stages))


class _Model:
    def __init__(self, setup: Setup, header: Header, start: Start, beat: Callable[[], None]) -> None:
        self.setup, self.header, self.beat = setup, header, beat
        self.stages: list[ReferenceStage] = []
        for stage in range(header.stages):
            self.stages.append(ReferenceStage(setup, stage, self.stages, start))
        self.parameters = {(stage.index, name): x for stage in self.stages for name, x in stage.parameters.items()}
        self.optimizer = optimizer_of(setup, self.stages)

    def is_outside_norm(self, stage: int, name: str) -> bool:
        """Whether a parameter's gradient is no part of the whole one: it is an earlier stage's, too, or not stepped."""
        model, left_out = self.setup.model, set() if self.optimizer is None else self.optimizer.left_out
        return name in model.tied_to_earlier(stage, [name]) or model.entry_name(stage, name) in left_out

    def forward_backward(self, step: int) -> tuple[list[float], dict[tuple[int, str], Tensor]]:
        """All microbatches of a step: their losses, and the gradient of every parameter."""
        losses: list[float] = []
        forwards: list[ForwardPass] = []
        for mb in range(self.header.microbatches):
            if self.setup.model.loss_of == "minibatch":
                forwards.append(forward(self.setup, self.header, self.stages, step, mb))
            else:
                losses.append(forward_backward(self.setup, self.header, self.stages, step, mb))
            self.beat()
        losses = backward_of_minibatch(self.setup, self.header, forwards, step) if forwards else losses
        return losses, self._take_gradients()

    def _take_gradients(self) -> Parameters:
        """Remove and return the parameters' gradients; those of tied ones are added in the order of the stages."""
        gradients = {(stage.index, name): x for stage in self.stages for name, x in stage.take_gradients().items()}
        for tie in self.setup.model.tied:
            copies = sorted({key for key in tie if key in gradients})  # none of a frozen parameter
            for key in copies[1:]:
                gradients[copies[0]] = gradients[copies[0]] + gradients[key]
            gradients |= {key: gradients[copies[0]].clone() for key in copies}
        return gradients

    def update(self, step: int, gradients: Parameters, norm: float) -> None:
        """Clip the gradients, and do the optimizer's step; `norm`: that of the whole gradient."""
        if self.setup.recipe.clip is not None:
            factor = clip_factor(norm, self.setup.recipe.clip)
            for gradient in gradients.values():
                gradient.mul_(factor)
        for key, parameter in self.parameters.items():
            parameter.grad = gradients[key]
        if self.optimizer is not None:
            self.optimizer.step(step, self.setup.device.seed)
            for parameter in self.parameters.values():
                parameter.grad = None


UsedVersions = Mapping[tuple[int, int], int]  # by stage and microbatch
Weights = dict[str, Tensor]  # of a stage, by name


def used_versions(comm: MPI.Intracomm, program: Program) -> UsedVersions | None:
    """The versions that the jobs of all ranks use; None: weights have none. `program`: this rank's part. Collective."""
    if program.header.has_flush:
        return None
    own = {(i.stage, i.mb): i.version for i in program.instructions(comm.rank) if i.op == Op.FWD}
    return {job: version for of_rank in comm.allgather(own) for job, version in of_rank.items()}


def run_with_delayed_updates(
    setup: Setup, header: Header, used: UsedVersions, start: Start, steps: int, beat: Callable[[], None]
) -> Record:
    """The record of `steps` steps; gradients are those of each stage's last update."""
    stages: list[_Versions] = []
    for index in range(header.stages):
        stages.append(_Versions(setup, index, stages, start))
    losses: list[list[float]] = []
    gradients: list[Parameters] = []
    for step in range(steps):
        losses.append([])
        for mb in range(header.microbatches):
            for stage in stages:
                stage.use(used[stage.index, mb])
            losses[-1].append(forward_backward(setup, header, stages, step, mb, divisor=1))
            for stage in stages:
                stage.gradients.append((int(header.compute[F, stage.index, mb]), stage.take_gradients()))
                complete = len(stage.gradients) == header.weight_versions.round(stage.index)
                if complete or mb + 1 == header.microbatches:
                    stage.update(step)
            beat()
        gradients.append(_by_key({stage.index: stage.gradient for stage in stages}))
        for stage in stages:
            stage.kept = stage.kept[-1:]
    parameters = _by_key({stage.index: stage.kept[-1] for stage in stages})
    return Record(losses, gradients, parameters, changed_buffers(stages))


class _Versions(ReferenceStage):
    def __init__(self, setup: Setup, index: int, earlier: Iterable[ReferenceStage], start: Start) -> None:
        super().__init__(setup, index, earlier, start)
        self.setup, self.optimizer = setup, optimizer_of(setup, [self])
        self.kept = [{name: weight.detach() for name, weight in self.parameters.items()}]  # the versions of this step
        self.gradients: list[tuple[int, Weights]] = []  # of the next update so far: a rank, and what it computed
        self.gradient: Weights = {}  # of the last update

    def use(self, version: int) -> None:
        """Point the module to this version of its weights until the next call: the backward uses them, too."""
        for name, parameter in self.parameters.items():
            parameter.data = self.kept[version][name]

    def update(self, step: int) -> None:
        """Step with the mean of the gradients: each rank's are summed first, and these sums are added in rank order."""
        count = len(self.gradients)
        self.kept.append({name: weight.clone() for name, weight in self.kept[-1].items()})
        self.use(-1)
        for name, parameter in self.parameters.items():
            sums: dict[int, Tensor] = {}
            for rank, gradient in self.gradients:
                sums[rank] = sums[rank] + gradient[name] if rank in sums else gradient[name]
            first, *others = (sums[rank] for rank in sorted(sums))
            total = sum(others, start=first)
            self.gradient[name] = parameter.grad = total / count if count > 1 else total
        self.gradients.clear()
        if self.optimizer is not None:
            self.optimizer.step(step, self.setup.device.seed, len(self.kept) - 1)
            # The step may have put other tensors in the place of the weights.
            self.kept[-1] = {name: weight.detach() for name, weight in self.parameters.items()}
        self.module.zero_grad()


def _by_key(stages: Mapping[int, Mapping[str, Tensor]]) -> Parameters:
    return on_host({(stage, name): x for stage, tensors in stages.items() for name, x in tensors.items()})
