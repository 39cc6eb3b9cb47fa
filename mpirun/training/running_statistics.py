"""Buffers that forwards change, as running statistics: each rank's are of the microbatches that it has seen.

Those of the rank that computes a stage's first microbatch are the model's: evaluation and checkpoints have them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from mpi4py import MPI
from torch import Tensor

from mpirun.engine.stage import LocalStage
from mpirun.verify.record import tensor_bytes
from schedgen.ir.header import Header
from schedgen.ir.instructions import F


def share_buffers(comm: MPI.Intracomm, header: Header, stages: Mapping[int, LocalStage]) -> None:
    """Every rank that has a stage gets the model's buffers, where they differ. Collective."""
    for index in range(header.stages):
        own = dict(stages[index].module.named_buffers()) if index in stages else {}
        hashes = comm.allgather(_hash(own) if own else None)
        if len({value for value in hashes if value is not None}) < 2:
            continue
        root = int(header.compute[F, index, 0])
        values = comm.bcast({name: buffer.cpu() for name, buffer in own.items()} if comm.rank == root else None)
        for name, buffer in own.items():
            buffer.copy_(values[name])


def _hash(buffers: Mapping[str, Tensor]) -> bytes:
    found = hashlib.sha256()
    for name, buffer in buffers.items():
        found.update(name.encode() + tensor_bytes(buffer))
    return found.digest()
