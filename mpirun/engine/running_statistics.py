"""Buffers that forwards change, such as running statistics: each rank's copy reflects the microbatches it has seen.

The copy on the rank that computes a stage's first microbatch is the model's: evaluation and checkpoints use it. A
backward that needs a buffer as it was before later forwards changed it fails, and the error names the buffer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mpi4py import MPI
from torch import Tensor

from mpirun.engine.core.stage import LocalStage
from mpirun.model.contract import Model
from mpirun.model.frozen_statistics import buffer_copies, set_buffers
from mpirun.model.module_tensors import shared_buffers
from mpirun.model.stage_shape import StageShape
from schedgen.ir.header import Header
from schedgen.ir.instructions import F
from schedgen.util.errors import UsageError

# Torch's message when a backward needs a tensor that no operation made and that has changed since it was saved.
# It names the tensor's type as torch.FloatTensor, torch.cuda.FloatTensor or CPUBFloat16Type.
CHANGED = re.compile(
    r"modified by an inplace operation: \[\S*?(?:\.|CPU|CUDA)(\w+)(?:Tensor|Type) (\[[\d, ]*\])\] is at version (\d+)"
)


def statistics_rank(header: Header, stage: int) -> int:
    """The rank whose copies of a stage's buffers are the model's, where forwards change them."""
    return int(header.compute[F, stage, 0])


def check_shared_buffers(model: Model, shapes: Sequence[StageShape]) -> None:
    """UsageError if stages share a buffer that forwards change: each stage has a copy, and the copies would diverge."""
    changed = {(shape.model_stage, name) for shape in shapes for name in shape.changed_buffers}
    for places in shared_buffers(model.stages):
        if not changed.isdisjoint(places):
            (stage, name), (other, its_name), *_ = places
            raise UsageError(
                f"{name} of stage {stage} and {its_name} of stage {other} are one buffer, and forwards would change a "
                "copy in each: split puts it into one stage"
            )


@contextmanager
def buffers_shared(
    comm: MPI.Intracomm, header: Header, shapes: Sequence[StageShape], stages: Mapping[int, LocalStage]
) -> Iterator[None]:
    """As `share_buffers`, inside the block; afterwards each rank continues with its own buffers."""
    other = [s for s in stages if shapes[s].overwrites_buffers and statistics_rank(header, s) != comm.rank]
    before = [(stages[s].module, buffer_copies(stages[s].module)) for s in other]
    share_buffers(comm, header, shapes, stages)
    try:
        yield
    finally:
        for module, buffers in before:
            set_buffers(module, buffers)


def share_buffers(
    comm: MPI.Intracomm, header: Header, shapes: Sequence[StageShape], stages: Mapping[int, LocalStage]
) -> None:
    """Copy the model's buffers of stages whose forwards change some to every rank that has the stage. Collective."""
    for index in [index for index, shape in enumerate(shapes) if shape.overwrites_buffers]:
        own = dict(stages[index].module.named_buffers()) if index in stages else {}
        root = statistics_rank(header, index)
        sent = {name: buffer.cpu() for name, buffer in own.items()} if comm.rank == root else None
        values = comm.bcast(sent, root)
        if comm.rank != root:
            for name, buffer in own.items():
                buffer.copy_(values[name])


def naming_buffers(stage: LocalStage, job: Callable[..., Any], *arguments: Any) -> Any:
    """Run a job. If its backward needs buffers that later forwards have changed, the RuntimeError names them."""
    try:
        return job(*arguments)
    except RuntimeError as error:
        found = CHANGED.search(str(error))
        names = [name for name, x in stage.module.named_buffers() if found and _as_torch_says(x) == found.groups()]
        if not names:
            raise
        raise RuntimeError(
            f"stage {stage.index} changes {' or '.join(names)} in place in every forward, but the backward of an "
            "earlier forward still needs the buffer as it was: compute with a clone of it"
        ) from None


def _as_torch_says(x: Tensor) -> tuple[str, ...]:
    """The type, the shape and the version of a tensor, as `CHANGED` finds them."""
    return x.type().rpartition(".")[2].removesuffix("Tensor"), str(list(x.shape)), str(x._version)
