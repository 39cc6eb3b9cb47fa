"""Planned memory: one block of bytes for every slot of a rank's memory plan.

`schedgen.simulator.memory_plan` assigns the slots: for received x, g and partial sums of dw, for fetched weights, for
dw that the rank does not own, and for weight versions. Here each slot is allocated as one block of bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.engine.core.stage import LocalStage
from mpirun.engine.setup import Setup
from mpirun.model.stage_shape import Unit
from schedgen.ir.header import Header
from schedgen.ir.instructions import Instruction, Kind, Op
from schedgen.ir.program import Program
from schedgen.simulator.buffer_sizes import BufferSizes
from schedgen.simulator.memory_plan import host_plan, memory_plan


class MemorySlots:
    """The memory slots of a rank, and the keys of the rows of its grad buffers."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        program: Program,
        instructions: Sequence[Instruction],
        setup: Setup,
        others: Sequence[Tensor] = (),
    ) -> None:
        """Plan and allocate the slots. Collective.

        program, instructions  this rank's list, as a table and as single instructions
        others                 blocks that are never in use at the same time, reused where they are large enough
        """
        self.device, self.shapes, self.rank = setup.device.torch, setup.shapes, comm.rank
        self.header = program.header
        shapes, dataflow = setup.shapes, setup.dataflow
        self.row_keys: dict[tuple[int, int, int], list[int]] | None = None  # by rank, stage and shard
        rows = np.ones(len(shapes), np.int64)
        if setup.canonical and program.header.has_flush:  # else a rank contributes one microbatch to an update
            self.row_keys = _row_keys(comm, instructions, program.header)
            # By stage, the largest number of rows of its dw that this rank holds or any rank sends.
            for (_, stage, _), keys in self.row_keys.items():
                rows[stage] = max(rows[stage], len(keys))
            for stage in range(self.header.stages):  # rows of several shards may lie together
                own = (self.keys(self.rank, stage, shard) for shard in self.header.gradient_units.of(stage))
                rows[stage] = max(rows[stage], len({key for keys in own for key in keys}))
        weight = np.array([shape.weight_bytes for shape in shapes], np.int64)
        activation, zero = np.zeros((2, len(shapes)), np.int64)
        for s, c in {(p, self.header.graph.output_consumer(p, c)) for p, c in self.header.graph.edges}:
            activation[s] += dataflow.bundle(Kind.X, s, c).spec.bytes
        by_edge = np.array([dataflow.x(*edge).spec.bytes for edge in program.header.graph.edges], np.int64)
        self.bytes = BufferSizes(
            activation, weight, partial=weight * rows, saved=zero, half=zero, workspace={}, owned=zero,
            edge_activation=by_edge,
        )  # fmt: skip
        planned = memory_plan(program, self.bytes)
        sizes = planned.sizes[comm.rank].tolist()
        self.number = {i: slot for i, slot in zip(instructions, planned.slot.tolist(), strict=True) if slot >= 0}
        self.host_slot = host_plan(program).slot.tolist()  # by row: of an OFFLOAD
        self.fetched = {i.stage: self.number[i] for i in instructions if i.op == Op.FETCH_W}
        # The other instructions with a slot each begin a dw that the rank does not own.
        begun = [i for i in self.number if i.op not in (Op.RECV, Op.FETCH_W, Op.STEP)]
        self.foreign_dw = {i.stage: self.number[i] for i in begun}
        for stage, slot in self.foreign_dw.items():
            sizes[slot] = max(sizes[slot], int(weight[stage] * rows[stage]))
        self.blocks = [
            others[slot] if slot < len(others) and len(others[slot]) >= size
            else torch.empty(size, dtype=torch.uint8, device=self.device)
            for slot, size in enumerate(sizes)
        ]  # fmt: skip

    def row_key(self, mb: int) -> int:
        """The key of the row of dw that a microbatch's backward adds to."""
        return self.rank if self.row_keys is None else mb

    def keys(self, rank: int, stage: int, shard: int = -1) -> list[int]:
        """The keys of a rank's rows of dw.stage, or of a shard, once the rank has added all that it receives.

        With --canonical they are microbatches. Otherwise there is one row, and its key is the rank.
        """
        return [rank] if self.row_keys is None else self.row_keys[rank, stage, shard]

    def received(self, i: Instruction, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The tensor that a RECV fills."""
        count = math.prod(size)
        return self.blocks[self.number[i]][: count * dtype.itemsize].view(dtype).view(size)

    def weights(self, stage: int) -> Tensor | None:
        """Where the fetched weights of a stage lie, shape (bytes,); None if the rank does not fetch them."""
        if stage not in self.fetched:
            return None
        return self.blocks[self.fetched[stage]][: self.shapes[stage].weight_bytes]

    def version(self, i: Instruction) -> Tensor | None:
        """The memory of the version that a STEP makes, shape (bytes,); None: it lies in the owner's weights."""
        return self.blocks[self.number[i]][: self.shapes[i.stage].weight_bytes] if i in self.number else None

    def gradient(self, stage: LocalStage) -> tuple[list[int], Tensor]:
        """The keys of the rows of dw.s, ascending, and flat memory for them. Shards with separate rows add no keys."""
        separate: Sequence[int] = tuple(stage.owned) if stage.owns_separate_shards else ()
        shards = [shard for shard in self.header.gradient_units.of(stage.index) if shard not in separate]
        keys = sorted({key for shard in shards for key in self.keys(self.rank, stage.index, shard)}) or [-1]
        size = len(keys) * stage.size
        if stage.index not in self.foreign_dw:
            return keys, torch.zeros(size, dtype=torch.uint8, device=self.device)
        return keys, self.blocks[self.foreign_dw[stage.index]][:size]


def _row_keys(
    comm: MPI.Intracomm, instructions: Sequence[Instruction], header: Header
) -> dict[tuple[int, int, int], list[int]]:
    """By rank, stage and shard: the microbatches whose gradients a rank sums, computed or received. Collective.

    An owner that sums with others by messages has rows for all microbatches: some only once it has the total.
    """
    units, every = header.gradient_units, list(range(header.microbatches))
    computed: dict[int, list[int]] = {}
    for i in instructions:
        if i.op in (Op.BWD, Op.BWD_W):
            computed.setdefault(i.stage, []).append(i.mb)
    added = [((i.stage, i.shard), i.source) for i in instructions if i.op == Op.ADD]
    by_rank = comm.allgather((computed, added))

    def keys(rank: int, unit: Unit) -> list[int]:
        if header.sums_by_messages and rank in units.holders(*unit):
            return every
        computed, added = by_rank[rank]
        received = [key for added_unit, sender in added if added_unit == unit for key in keys(sender, unit)]
        return sorted(computed.get(unit[0], []) + received)

    return {(rank, *unit): keys(rank, unit) for rank in range(len(by_rank)) for unit in units.units}
