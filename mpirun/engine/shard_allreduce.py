"""Sums over the shards of a stage, of an output or of the gradient of an input: each rank gives one and gets the sum.

The sum is that of `reduction`, in the order of the shards: the same bits on all
of them and in every run. Its messages need memory that stays where it is, so
what is summed is copied there; jobs whose sums have the same ranks and size
share it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from mpirun.comm.ordered_allreduce import SHARD_TAGS, OrderedAllreduce
from mpirun.comm.transport import Transport
from mpirun.engine.buffers import Buffer
from mpirun.model.dataflow import TensorSpec
from schedgen.ir.header import Header
from schedgen.ir.instructions import B, F, Instruction, Kind


class Exchanges:
    """All of a rank's."""

    def __init__(self, transport: Transport, header: Header) -> None:
        self.transport, self.header = transport, header
        self.sums: dict[tuple[tuple[int, ...], int, torch.dtype], OrderedAllreduce] = {}

    def act(self, i: Instruction, buffer: Buffer, like: TensorSpec, device: torch.device) -> Callable[[], None]:
        """What replaces the rank's part in `buffer`, of an x or g like that, by the sum."""
        shards = self.header.tensor_parallel.siblings(i.stage)
        if i.kind == Kind.G:
            shards = self.header.tensor_parallel.siblings(
                self.header.graph.consumers[i.stage][0] if i.via < 0 else i.via
            )
        ranks = tuple(self.header.compute[B if i.kind == Kind.G else F, list(shards), i.mb].tolist())
        key = ranks, math.prod(like.size), like.dtype
        if key not in self.sums:
            rows = torch.empty((1, key[1]), dtype=like.dtype, device=device)
            keys = [[ranks.index(rank)] for rank in self.header.groups[i.peer]]
            self.sums[key] = OrderedAllreduce(self.transport, self.transport.group(i.peer), rows, keys, tags=SHARD_TAGS)
        one, wait = self.sums[key], self.transport.wait

        def done() -> bool:
            one.advance()
            return one.done

        def act() -> None:
            part = buffer.value
            one.total.copy_(part.view(-1))
            one.start()
            wait(done)
            buffer.value = one.total.clone().view(part.shape)  # not in place: autograd may have saved the part

        return act
