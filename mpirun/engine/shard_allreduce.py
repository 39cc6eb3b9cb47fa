"""ALLREDUCE of an x or a g: the sum over the shards of a tensor-parallel stage of what each of them has computed.

Summed are outputs after forwards and the gradients of inputs after backwards, in the order of the shards: the same
bits on all of them and in every run. Messages need memory that stays where it is, so what is summed is copied there.
Sums over the same ranks, of the same size and type, share it, because a rank waits for each sum before the next.
"""

from __future__ import annotations

import math

import torch

from mpirun.comm.ordered_allreduce import SHARD_TAGS, OrderedAllreduce
from mpirun.comm.transport import Transport
from mpirun.engine.act import Act
from mpirun.engine.buffers import Buffer
from mpirun.model.dataflow import TensorSpec
from schedgen.ir.header import Header
from schedgen.ir.instructions import B, F, Instruction, Kind


class ShardAllreduce:
    """Prepares the sums over shards that a rank takes part in."""

    def __init__(self, header: Header, transport: Transport) -> None:
        """`transport`: carries the sums, and waits for them."""
        self.header, self.transport = header, transport
        # By the ranks of the shards in their order, number of elements, type.
        self.shared: dict[tuple[tuple[int, ...], int, torch.dtype], OrderedAllreduce] = {}

    def allreduce(self, i: Instruction, buffer: Buffer, spec: TensorSpec, device: torch.device) -> Act:
        """ALLREDUCE: replace the summand of this rank's shard in `buffer`, a tensor like `spec`, by the sum."""
        siblings = self.header.tensor_parallel.siblings
        if i.kind == Kind.G:
            consumer = self.header.graph.consumers[i.stage][0] if i.consumer < 0 else i.consumer
            direction, shards = B, siblings(consumer)
        else:
            direction, shards = F, siblings(i.stage)
        ranks = tuple(self.header.compute[direction, list(shards), i.mb].tolist())
        key = ranks, math.prod(spec.size), spec.dtype
        if key not in self.shared:
            rows = torch.empty((1, key[1]), dtype=spec.dtype, device=device)
            keys = [[ranks.index(rank)] for rank in self.header.groups[i.group]]
            group = self.transport.group(i.group)
            self.shared[key] = OrderedAllreduce(self.transport, group, rows, keys, tags=SHARD_TAGS)
        allreduce, wait = self.shared[key], self.transport.wait

        def done() -> bool:
            allreduce.advance()
            return allreduce.done

        def act() -> None:
            summand = buffer.value
            allreduce.total.copy_(summand.view(-1))
            allreduce.start()
            wait(done)
            buffer.value = allreduce.total.clone().view(summand.shape)  # autograd may have saved the summand

        return act
