"""The reference where a schedule has versions of weights: the same late updates in one process.

Microbatch after microbatch goes forward and back with the versions that the
schedule names, and a stage steps when it has the gradients of an update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from mpi4py import MPI
from torch import Tensor
from torch.func import functional_call

from mpirun.engine.setup import Training
from mpirun.model.build_stage import build_stage
from mpirun.model.rng import LayerRng
from mpirun.verify.one_process import forward_backward
from mpirun.verify.record import Parameters, Record
from schedgen.ir.header import Header
from schedgen.ir.instructions import F, Op
from schedgen.ir.program import Program

Versions = Mapping[tuple[int, int], int]  # by stage and microbatch
Weights = dict[str, Tensor]


def versions(comm: MPI.Intracomm, program: Program) -> Versions:
    """Those of all ranks; `program`: this rank's part."""
    mine = {(i.stage, i.mb): i.peer for i in program.instructions(comm.rank) if i.op == Op.FWD}
    return {job: version for of_rank in comm.allgather(mine) for job, version in of_rank.items()}


def reference(of: Training, header: Header, used: Versions, begun: int, steps: int, beat: Callable[[], None]) -> Record:
    """All steps from the first; recorded from step `begun` on: of every stage the gradient of its last update."""
    stages = [_Stage(of, header, stage) for stage in range(header.stages)]
    start: Parameters = {(one.index, name): weight.detach() for one in stages for name, weight in one.kept[0].items()}
    losses, gradients = [], []
    for step in range(steps):
        losses.append([_microbatch(of, header, stages, used, step, mb, beat) for mb in range(header.microbatches)])
        gradients.append({(one.index, name): grad for one in stages for name, grad in one.gradient.items()})
        for one in stages:
            one.kept = one.kept[-1:]
    parameters: Parameters = {
        (one.index, name): weight.detach() for one in stages for name, weight in one.newest.items()
    }
    return Record(losses[begun:], gradients[begun:], parameters, start)


def _microbatch(
    of: Training, header: Header, stages: list[_Stage], used: Versions, step: int, mb: int, beat: Callable[[], None]
) -> float:
    weights = [one.kept[used[one.index, mb]] for one in stages]
    for one in stages:
        one.layer_rng.at = (of.seed, step, mb)
    calls = [partial(functional_call, one.module, given) for one, given in zip(stages, weights, strict=True)]
    loss = forward_backward(of, header, [lambda *x, call=call: call(x) for call in calls], step, mb, parts=1)
    for one, given in zip(stages, weights, strict=True):
        one.shares.append((int(header.compute[F, one.index, mb]), _taken(given)))
        if len(one.shares) == header.weight_versions.round(one.index) or mb + 1 == header.microbatches:
            one.update(step)
    beat()
    return loss


class _Stage:
    def __init__(self, of: Training, header: Header, index: int) -> None:
        self.of, self.index = of, index
        self.module = build_stage(of.model, index, of.seed).to(of.device.torch)
        self.layer_rng = LayerRng(self.module, index, of.shapes[index].random_layers, of.device.seed)
        self.newest = {name: one for name, one in self.module.named_parameters() if one.requires_grad}
        self.optimizer = of.recipe.make(list(self.newest.values())) if self.newest else None
        self.kept = [self._copy()]  # every version of this step
        self.shares: list[tuple[int, Weights]] = []  # of an update: rank and gradient
        self.gradient: Weights = {}  # of the last update

    def _copy(self) -> Weights:
        return {name: one.detach().clone().requires_grad_() for name, one in self.newest.items()}

    def update(self, step: int) -> None:
        """From the mean of the shares, which owners add in the order of their ranks."""
        self.shares.sort(key=lambda share: share[0])
        for name, parameter in self.newest.items():
            total = self.shares[0][1][name]
            for _, share in self.shares[1:]:
                total = total + share[name]
            self.gradient[name] = parameter.grad = total / len(self.shares) if len(self.shares) > 1 else total
        self.shares.clear()
        if self.optimizer is not None:
            self.of.recipe.step(self.optimizer, step)
        self.kept.append(self._copy())


def _taken(weights: Weights) -> Weights:
    """Their gradients, taken off them: zero where there is none."""
    found = {name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in weights.items()}
    for one in weights.values():
        one.grad = None
    return found
