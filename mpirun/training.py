"""What is trained and how: all that does not depend on who computes what."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor

import mpirun.data
import mpirun.model
from mpirun.device import Device, device
from mpirun.errors import from_rank_0, together
from mpirun.model import Model, Shape
from mpirun.optimizer import Recipe
from mpirun.ties import check_ties
from schedgen.errors import UsageError
from schedgen.program import Header


class Training(NamedTuple):
    """The same on all ranks, but for the memory it lies in."""

    model: Model
    plain: Model  # the same without shards
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
    plain = together(comm, lambda: _model(options, header))
    model = together(comm, lambda: _sharded(plain, header))
    importlib.import_module("torch._dynamo")  # takes a second: fake tensors on rank 0, then torch.optim would do it
    text = mpirun.data.load(comm, options.text, model.length)
    recipe = Recipe(
        options.optimizer, options.lr, options.momentum, options.weight_decay, options.lr_schedule, options.warmup,
        options.steps, options.clip,
    )  # fmt: skip
    shapes = from_rank_0(comm, lambda: mpirun.model.shapes(model, header.producers, text, mixed))
    return Training(
        model, plain, shapes, text, options.seed, recipe, options.accumulate, options.canonical, where, mixed, cores < 1
    )


def _model(options: argparse.Namespace, header: Header) -> Model:
    if header.versions:
        wrong = {"--clip": options.clip is not None, "--accumulate": options.accumulate > 1}
        for option in [option for option, given in wrong.items() if given]:
            raise UsageError(f"{option} needs the whole gradient, and this schedule updates stages one by one")
        if options.on_nan == "skip":
            raise UsageError("--on-nan skip: this schedule has updated stages before all losses are known")
    stages, layers = header.stages // header.tensor, header.scheme.get("layers")
    model = mpirun.model.load(options.model, stages, options.seed, layers)
    mpirun.model.check_shards(model, header)
    return model


def _sharded(plain: Model, header: Header) -> Model:
    model = mpirun.model.sharded(plain, header.tensor)
    check_ties(model, header)
    return model


def _cores(comm: MPI.Intracomm) -> float:
    """A rank's share of its host's cores."""
    here = comm.Split_type(MPI.COMM_TYPE_SHARED)
    ranks = here.size
    here.Free()
    return len(os.sched_getaffinity(0)) / ranks
