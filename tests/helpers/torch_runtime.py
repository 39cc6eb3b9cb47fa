"""One rank that trains a step by mpirun and by torch's pipeline runtime, with the same stages and samples.

mpiexec -n R python -m mpi4py torch_runtime.py MEET SCHEDULE=LIST ...     LIST: what torch loads in place of SCHEDULE

A list whose name ends in -jobs.csv is loaded as compute_only, any other as compute_comms. Rank 0 prints as JSON, for
each list, the greatest difference of a gradient, relative to its greatest entry.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

import mpirun
from schedgen.ir.file import read
from schedgen.ir.header import Header

WIDTH, ROWS = 8, 2  # of the model; of a microbatch


class Task:
    """Stages, each a small MLP of its own seed, and the samples and targets of a step."""

    def __init__(self, schedule: str) -> None:
        with Path(schedule).open("rb") as source:
            self.header: Header = read(source, schedule)[0].header
        self.stages = []
        for stage in range(self.header.stages):
            torch.manual_seed(stage)
            self.stages.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        samples = torch.randn(self.header.microbatches * ROWS, WIDTH)
        self.data = samples, samples.flip(1)

    def torch_stages(self) -> list[PipelineStage]:
        """torch's stages for this rank, with modules of their own."""
        own = [s for s, ranks in enumerate(self.header.owners) if ranks == (dist.get_rank(),)]
        device = torch.device("cpu")
        return [PipelineStage(copy.deepcopy(self.stages[s]), s, self.header.stages, device) for s in own]


def of_torch(task: Task, path: str) -> dict[str, Tensor]:
    """The gradients of this rank's stages after a step, by mpirun's names."""
    form, stages = "compute_only" if path.endswith("-jobs.csv") else "compute_comms", task.torch_stages()
    runtime = schedules._PipelineScheduleRuntime(stages, task.header.microbatches, nn.functional.mse_loss)
    runtime._load_csv(path, format=form)
    samples, targets = task.data  # the rank of the first stage has the samples, that of the last the targets
    inputs = (samples,) if any(stage.is_first for stage in stages) else ()
    runtime.step(*inputs, target=targets if any(stage.is_last for stage in stages) else None, losses=[])
    named = {f"stage{s.stage_index}.{name}": p.grad for s in stages for name, p in s.submod.named_parameters()}
    return {name: gradient for name, gradient in named.items() if gradient is not None}


class Recorder(torch.optim.SGD):
    """An optimizer that keeps the gradients, by name, and steps nothing."""

    def __init__(self, named: list[mpirun.NamedParameter], kept: dict[str, Tensor]) -> None:
        super().__init__([each.parameter for each in named], lr=1.0)
        self.named, self.kept = named, kept

    def step(self, closure: Callable[[], float] | None = None) -> None:
        for each in self.named:
            if each.parameter.grad is not None:
                self.kept[each.name] = each.parameter.grad.clone()


def of_mpirun(task: Task, schedule: str) -> dict[str, Tensor]:
    """The gradients of this rank's stages in a step."""
    kept: dict[str, Tensor] = {}
    loss = nn.functional.mse_loss
    run = mpirun.Engine(schedule, task.stages, loss=loss, optimizer=lambda named: Recorder(named, kept))
    run.step(task.data)
    return kept


def difference(comm: MPI.Intracomm, task: Task, schedule: str, path: str) -> float:
    """The greatest difference of a gradient on any rank, relative to its greatest entry; 0: all bits are equal."""
    theirs, ours = of_torch(task, path), of_mpirun(task, schedule)
    assert theirs and theirs.keys() == ours.keys()
    differences = [(theirs[name] - ours[name]).abs().max() / ours[name].abs().max() for name in ours]
    return max(comm.allgather(float(max(differences))))


def main(meet: str, *pairs: str) -> None:
    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    logging.disable()
    dist.init_process_group("gloo", f"file://{meet}", rank=comm.rank, world_size=comm.size)
    worst = {}
    for schedule, _, path in (pair.partition("=") for pair in pairs):
        worst[Path(path).name] = difference(comm, Task(schedule), schedule, path)
    if comm.rank == 0:
        print(json.dumps(worst))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
