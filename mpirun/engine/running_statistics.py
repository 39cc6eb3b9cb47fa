"""Buffers that forwards change, such as running statistics: each rank's copy reflects the microbatches it has seen.

The copy on the rank that computes a stage's first microbatch is the model's: evaluation and checkpoints use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from mpirun.engine.core.stage import LocalStage
from mpirun.engine.setup import RankPart
from mpirun.model.module_tensors import buffer_copies, frozen_statistics, set_buffers
from schedgen.ir.header import Header
from schedgen.ir.instructions import F, Instruction, Op

Job = Callable[..., Any]  # computes a job


def statistics_rank(header: Header, stage: int) -> int:
    """The rank whose copies of a stage's buffers are the model's, where forwards change them."""
    return int(header.compute[F, stage, 0])


@contextmanager
def buffers_shared(part: RankPart) -> Iterator[None]:
    """As `share_buffers`, inside the block; afterwards each rank continues with its own buffers."""
    changed = [stage for stage in part.stages.values() if stage.shape.overwrites_buffers]
    modules = [stage.module for stage in changed if statistics_rank(part.header, stage.index) != part.comm.rank]
    before = [(module, buffer_copies(module)) for module in modules]
    share_buffers(part)
    try:
        yield
    finally:
        for module, buffers in before:
            set_buffers(module, buffers)


def share_buffers(part: RankPart) -> None:
    """Copy the model's buffers of stages whose forwards change some to every rank that has the stage. Collective."""
    comm = part.comm
    for index in [index for index, shape in enumerate(part.setup.shapes) if shape.overwrites_buffers]:
        own = dict(part.stages[index].module.named_buffers()) if index in part.stages else {}
        root = statistics_rank(part.header, index)
        sent = {name: buffer.cpu() for name, buffer in own.items()} if comm.rank == root else None
        values = comm.bcast(sent, root)
        if comm.rank != root:
            for name, buffer in own.items():
                buffer.copy_(values[name])


class KeptBuffers:
    """A forward that changes buffers and is recomputed: the RECOMPUTE changes none.

    It reads their values from before the FWD, or their current ones if another rank did the FWD.
    """

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self.redone = {(i.stage, i.mb) for i in instructions if i.op == Op.RECOMPUTE}
        self.before: dict[tuple[int, int], dict[str, Tensor]] = {}  # by stage and microbatch: from before the FWD

    def around(self, i: Instruction, stage: LocalStage, compute: Job, captured: Callable[[Job], Job]) -> Job:
        """What computes a job; `captured` of its own part, copies among it, can be a graph."""
        key = i.stage, i.mb
        if i.op not in (Op.FWD, Op.RECOMPUTE) or not stage.shape.overwrites_buffers or key not in self.redone:
            return captured(compute)

        def noting(*inputs: Any) -> tuple[Any, dict[str, Tensor]]:
            kept = buffer_copies(stage.module, every_name=True)
            return compute(*inputs), kept

        def frozen(before: dict[str, Tensor], *inputs: Any) -> Any:
            with frozen_statistics(stage.module, before):
                return compute(*inputs)

        job = captured(noting if i.op == Op.FWD else frozen)

        def first(*inputs: Any) -> Any:
            result, self.before[key] = job(*inputs)
            return result

        def again(*inputs: Any) -> Any:
            return job(self.before.pop(key, {}), *inputs)

        return first if i.op == Op.FWD else again
