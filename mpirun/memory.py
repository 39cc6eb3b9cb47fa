"""Where everything that a rank receives or gathers lies: planned from the list, taken before the first step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.device import Device
from mpirun.model import Shape
from mpirun.stage import Stage
from schedgen.places import Bytes, places
from schedgen.program import Instruction, Op, Program


class Memory:
    def __init__(
        self,
        comm: MPI.Intracomm,
        program: Program,
        instructions: Sequence[Instruction],
        shapes: Sequence[Shape],
        device: Device,
        canonical: bool,
    ) -> None:
        """`program`: this rank's part. Collective."""
        self.device, self.shapes, self.rank, self.canonical = device, shapes, comm.rank, canonical
        self.keys = row_keys(comm, instructions, len(shapes), canonical)
        weight = np.array([shape.weights for shape in shapes], np.int64)
        activation = np.array([shape.bytes for shape in shapes], np.int64)
        # In canonical mode gradients have more rows than one: room for the most that anybody sends or gathers.
        most = [max(len(self.keys[rank, s]) for rank in range(comm.size)) for s in range(len(shapes))]
        rows = np.array([max(1, one) for one in most], np.int64)
        zero = np.zeros(len(shapes), np.int64)
        planned = places(program, Bytes(activation, weight, weight * rows, zero, zero, {}, zero))
        sizes = planned.sizes[comm.rank].tolist()
        table = program.rows
        fills = np.flatnonzero(planned.row >= 0)
        # Gradients of other ranks' weights: the places that neither a RECV nor a FETCH_W fills.
        begins = fills[~np.isin(table.op[fills], (Op.RECV, Op.FETCH_W))]
        self.gathers = {int(table.stage[row]): int(planned.row[row]) for row in begins}
        for stage, place in self.gathers.items():
            sizes[place] = max(sizes[place], int(weight[stage] * rows[stage]))
        self.blocks = [torch.empty(size, dtype=torch.uint8, device=device.torch) for size in sizes]
        self.of = {i: place for i, place in zip(instructions, planned.row.tolist(), strict=True) if place >= 0}
        self.fetched = {i.stage: self.of[i] for i in instructions if i.op == Op.FETCH_W}

    def row(self, mb: int) -> int:
        """The key of the row of dw that a microbatch's backward adds to."""
        return mb if self.canonical else self.rank

    def place(self, i: Instruction, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What a receive of this rank fills."""
        count = math.prod(size)
        return self.blocks[self.of[i]][: count * dtype.itemsize].view(dtype).view(*size)

    def weights(self, stage: int) -> Tensor | None:
        """Where fetched weights of a stage come to lie; None for stages that are not fetched."""
        if stage not in self.fetched:
            return None
        size = self.shapes[stage].weights
        return self.blocks[self.fetched[stage]][:size]

    def gradient(self, stage: Stage) -> tuple[list[int], Tensor]:
        """The keys of the rows of dw.s, and memory for them."""
        keys = self.keys[self.rank, stage.index] or [-1]
        count = len(keys) * stage.size
        if stage.index not in self.gathers:
            return keys, torch.zeros(count, dtype=stage.dtype, device=self.device.torch)
        block = self.blocks[self.gathers[stage.index]]
        return keys, block[: count * stage.dtype.itemsize].view(stage.dtype)


def row_keys(
    comm: MPI.Intracomm, instructions: Sequence[Instruction], stages: int, canonical: bool
) -> dict[tuple[int, int], list[int]]:
    """The rows of dw.s that each rank has once it has added all it receives, by (rank, stage).

    In canonical mode a row a microbatch; otherwise one row, its key the rank.
    """
    own: dict[int, list[int]] = {}
    for i in instructions:
        if i.op in (Op.BWD, Op.BWD_W):
            own.setdefault(i.stage, []).append(i.mb)
    adds = [(i.stage, i.peer) for i in instructions if i.op == Op.ADD]
    parts = comm.allgather((own, adds))

    def rows(rank: int, stage: int) -> list[int]:
        own, adds = parts[rank]
        found = own.get(stage, []) + [row for s, peer in adds if s == stage for row in rows(peer, stage)]
        return sorted(found) if canonical else [rank]

    return {(rank, stage): rows(rank, stage) for rank in range(len(parts)) for stage in range(stages)}
