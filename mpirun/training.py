"""What is trained and how, and one rank's interpreter for it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor

import mpirun.data
import mpirun.model
from mpirun.device import Device, device
from mpirun.errors import on_rank_0, together
from mpirun.interpreter import Interpreter
from mpirun.memory import Memory
from mpirun.model import Model, Shape
from mpirun.optimizer import Optimizer, Recipe
from mpirun.stage import Stage
from mpirun.ties import check_ties
from mpirun.transport import transport
from schedgen.program import COMPUTE, Header, Instruction, Kind, Program


class Training(NamedTuple):
    """All that does not depend on who computes what."""

    model: Model
    shapes: Sequence[Shape]  # by stage
    text: Tensor
    seed: int
    recipe: Recipe
    walks: int  # through the list, a step
    canonical: bool
    device: Device
    mixed: torch.dtype | None  # the type that autocast computes in
    crowded: bool  # there are more ranks here than cores

    @property
    def tokens(self) -> int:
        """Targets of a microbatch."""
        return mpirun.model.microbatch(self.model, self.text, 0, 0, 0)[1].numel()


def training(comm: MPI.Intracomm, options: argparse.Namespace, header: Header) -> Training:
    """From the options. Collective."""
    cores = _cores(comm)
    torch.set_num_threads(options.threads or max(1, int(cores)))
    where = together(comm, lambda: device(comm, options.device))
    mixed = torch.bfloat16 if options.autocast else None
    model = together(comm, lambda: mpirun.model.load(options.model, header.stages, options.seed))
    text = mpirun.data.load(comm, options.text, model.length)
    recipe = Recipe(
        options.optimizer, options.lr, options.momentum, options.weight_decay, options.lr_schedule, options.warmup,
        options.steps, options.clip,
    )  # fmt: skip
    shapes = comm.bcast(on_rank_0(comm, lambda: mpirun.model.shapes(model, header.producers, text, mixed)))
    return Training(
        model, shapes, text, options.seed, recipe, options.accumulate, options.canonical, where, mixed, cores < 1
    )


def interpreter(
    comm: MPI.Intracomm, program: Program, instructions: Sequence[Instruction], of: Training
) -> Interpreter:
    """One rank's, with everything it needs in place. `program`: the rank's rows. Collective."""
    header = program.header
    together(comm, lambda: check_ties(of.model, header))
    memory = Memory(comm, program, instructions, of.shapes, of.device, of.canonical)
    stages = together(comm, lambda: _stages(comm.rank, header, instructions, memory, of))
    owned = {stage: one for stage, one in stages.items() if comm.rank in header.owners[stage]}
    link = transport(comm, header.groups, of.device, of.crowded)
    return Interpreter(
        header, instructions, stages, memory, link, of.model, of.text, of.seed,
        Optimizer(of.recipe, owned), of.walks,
    )  # fmt: skip


def _stages(
    rank: int, header: Header, instructions: Sequence[Instruction], memory: Memory, of: Training
) -> dict[int, Stage]:
    """The stages this rank owns, computes or adds gradients of."""
    owned = {stage for stage, owners in enumerate(header.owners) if rank in owners}
    needed = owned | {i.stage for i in instructions if i.op in COMPUTE or i.kind in (Kind.W, Kind.DW)}
    stages = {}
    for stage in sorted(needed):
        module = mpirun.model.build(of.model, stage, of.seed)
        place = None if stage in owned else memory.weights(stage)
        stages[stage] = Stage(module, stage, of.shapes[stage], of.device, stage in owned, place, of.mixed)
        stages[stage].shared = mpirun.model.shared_before(of.model, stage)
    return stages


def _cores(comm: MPI.Intracomm) -> float:
    """A rank's share of its host's cores."""
    here = comm.Split_type(MPI.COMM_TYPE_SHARED)
    ranks = here.size
    here.Free()
    return len(os.sched_getaffinity(0)) / ranks
