"""Where everything that a rank receives or gathers lies: planned from the list, taken before the first step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.engine.setup import Training
from mpirun.engine.stage import Stage
from schedgen.ir.header import Header
from schedgen.ir.instructions import Instruction, Op
from schedgen.ir.program import Program
from schedgen.simulator.memory_plan import Bytes, places


class Memory:
    def __init__(
        self, comm: MPI.Intracomm, program: Program, instructions: Sequence[Instruction], of: Training
    ) -> None:
        """`program`: this rank's part. Collective."""
        self.device, self.shapes, self.rank = of.device.torch, of.shapes, comm.rank
        weight = np.array([shape.weight_bytes for shape in of.shapes], np.int64)
        # The last stage's x is the loss.
        activation = np.array([of.dataflows[0].activation_bytes(s) for s in range(len(of.shapes))], np.int64)
        activation[-1] = of.shapes[-1].loss_bytes or sum(one.bytes for one in of.shapes[-1].outputs)
        parts = np.array([of.dataflows[0].x(*edge).spec.bytes for edge in program.header.graph.edges], np.int64)
        rows = np.ones(len(of.shapes), np.int64)
        # By rank, stage and part; None: one, its key the rank.
        self.rows: dict[tuple[int, int, int], list[int]] | None = None
        if of.canonical and not program.header.weight_versions.count:  # there a rank has one microbatch in an update
            self.rows = _rows(comm, instructions, program.header)
            for (_, stage, _), keys in self.rows.items():  # room for the most that anybody sends or gathers
                rows[stage] = max(rows[stage], len(keys))
            for stage in range(len(of.shapes)):  # here the rows of several parts may lie together
                together = {
                    key for via in program.header.weight_shards.parts(stage) for key in self.rows[self.rank, stage, via]
                }
                rows[stage] = max(rows[stage], len(together))
        zero = np.zeros(len(of.shapes), np.int64)
        planned = places(program, Bytes(activation, weight, weight * rows, zero, zero, {}, zero, parts))
        sizes = planned.sizes[comm.rank].tolist()
        table = program.rows
        fills = np.flatnonzero(planned.row >= 0)
        # Gradients of other ranks' weights: the places that neither a RECV nor a FETCH_W fills.
        begins = fills[~np.isin(table.op[fills], (Op.RECV, Op.FETCH_W, Op.STEP))]
        self.gathers = {int(table.stage[row]): int(planned.row[row]) for row in begins}
        for stage, place in self.gathers.items():
            sizes[place] = max(sizes[place], int(weight[stage] * rows[stage]))
        self.blocks = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]
        self.of = {i: place for i, place in zip(instructions, planned.row.tolist(), strict=True) if place >= 0}
        self.fetched = {i.stage: self.of[i] for i in instructions if i.op == Op.FETCH_W}

    def row(self, mb: int) -> int:
        """The key of the row of dw that a microbatch's backward adds to."""
        return self.rank if self.rows is None else mb

    def keys(self, rank: int, stage: int, via: int = -1) -> list[int]:
        """The keys of the rows of dw.stage, or of a part, that a rank has once it has added all it receives.

        In canonical mode a row a microbatch; otherwise one row, its key the rank.
        """
        return [rank] if self.rows is None else self.rows[rank, stage, via]

    def place(self, i: Instruction, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What a receive of this rank fills."""
        count = math.prod(size)
        return self.blocks[self.of[i]][: count * dtype.itemsize].view(dtype).view(*size)

    def weights(self, stage: int) -> Tensor | None:
        """Where fetched weights of a stage come to lie; None for stages that are not fetched."""
        if stage not in self.fetched:
            return None
        size = self.shapes[stage].weight_bytes
        return self.blocks[self.fetched[stage]][:size]

    def version(self, i: Instruction) -> Tensor | None:
        """Where the version of an owned stage's weights lies that a STEP makes; None: where the owner's weights do."""
        return self.blocks[self.of[i]][: self.shapes[i.stage].weight_bytes] if i in self.of else None

    def gradient(self, stage: Stage) -> tuple[list[int], Tensor]:
        """The keys of the rows of dw.s, and memory for them."""
        within = [via for via in stage.spans if not (stage.apart and via in stage.own)]
        keys = sorted({key for via in within for key in self.keys(self.rank, stage.index, via)}) or [-1]
        count = len(keys) * stage.size
        if stage.index not in self.gathers:
            return keys, torch.zeros(count, dtype=stage.dtype, device=self.device)
        block = self.blocks[self.gathers[stage.index]]
        return keys, block[: count * stage.dtype.itemsize].view(stage.dtype)


def _rows(
    comm: MPI.Intracomm, instructions: Sequence[Instruction], header: Header
) -> dict[tuple[int, int, int], list[int]]:
    """By rank, stage and part: the microbatches whose gradients a rank adds up, its own and those it receives."""
    own: dict[int, list[int]] = {}
    for i in instructions:
        if i.op in (Op.BWD, Op.BWD_W):
            own.setdefault(i.stage, []).append(i.mb)
    adds = [(i.stage, i.via, i.peer) for i in instructions if i.op == Op.ADD]
    parts = comm.allgather((own, adds))

    def rows(rank: int, unit: tuple[int, int]) -> list[int]:
        own, adds = parts[rank]
        return sorted(own.get(unit[0], []) + [row for *of, peer in adds if (*of,) == unit for row in rows(peer, unit)])

    return {(rank, *unit): rows(rank, unit) for rank in range(len(parts)) for unit in header.weight_shards.units}
