"""What a run did: the losses, gradients and parameters of one rank, and of all ranks gathered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.data.values import digest_of, raw_bytes
from mpirun.engine.stage import LocalStage
from mpirun.engine.weight_shards import pieces
from mpirun.model.stage_shape import StageShape
from schedgen.ir.header import Header

Parameters = dict[tuple[int, str], Tensor]  # by stage and name
Pieces = dict[tuple[int, str, int], Tensor]  # by stage, name and where in the flat parameter it begins
Packed = dict[tuple[int, str, int], tuple[torch.dtype, torch.Size, np.ndarray]]


class Record(NamedTuple):
    """What a run did, or the reference that it is compared with: enough to compare the two."""

    losses: list[list[float]]  # by step and microbatch
    gradients: list[Parameters]  # by step, before clipping; without skipped steps
    parameters: Parameters  # after the last step
    start: Parameters | None = None  # a reference's parameters before the first step
    buffers: Mapping[tuple[int, str], Tensor] = {}  # after the last step: those that forwards change


class RankRecord(NamedTuple):
    """One rank's part of a record, filled while it runs."""

    losses: list[list[float]]
    gradients: list[Pieces]
    parameters: Pieces
    buffers: Parameters


def on_host(tensors: Mapping[tuple[int, str], Tensor]) -> Parameters:
    """Copies in host memory, where records of all devices are compared."""
    return {key: value.detach().to("cpu", copy=True) for key, value in tensors.items()}


def copy_pieces(stage: LocalStage, shard: int, flat: Tensor) -> Pieces:
    """Copies of the parameters' pieces in a shard of a stage's weights; `flat`: laid out as that shard is."""
    if shard < 0:
        return {(stage.index, name, 0): view.clone() for name, view in zip(stage.names, stage.views(flat), strict=True)}
    return {
        (stage.index, stage.names[piece.parameter], piece.begin): piece.of_shard(flat).clone()
        for piece in pieces(stage.layout, stage.shard_spans[shard])
    }


def gather_record(
    comm: MPI.Intracomm, header: Header, shapes: Sequence[StageShape], record: RankRecord
) -> Record | str | None:
    """The record of all stages on rank 0, or a sentence if owners of a stage differ; None elsewhere. Collective.

    Each rank gives the parameters it owns; gradients come from the first owner.
    """
    hashes = {key: digest_of([value]) for key, value in record.parameters.items()}
    of_first_owner = {
        key: value
        for key, value in record.parameters.items()
        if header.is_sharded(key[0]) or header.owners[key[0]][0] == comm.rank
    }
    packed_gradients = [_packed(gradients) for gradients in record.gradients]
    of_ranks = comm.gather((hashes, packed_gradients, _packed(of_first_owner), record.buffers))
    if of_ranks is None:
        return None
    parameters: Pieces = {}
    gradients: list[Pieces] = [{} for _ in record.gradients]
    buffers: Parameters = {}
    for _, of_steps, of_rank, own_buffers in of_ranks:
        parameters |= _unpacked(of_rank)
        buffers |= own_buffers
        for merged, packed in zip(gradients, of_steps, strict=True):
            merged |= _unpacked(packed)
    for rank, (digests, _, _, _) in enumerate(of_ranks):
        for key, digest in digests.items():
            if digest_of([parameters[key]]) != digest:
                return f"rank {rank} ends with another {key[1]} of stage {key[0]} than the stage's first owner"
    joined = [_joined(shapes, step) for step in gradients]
    return Record(record.losses, joined, _joined(shapes, parameters), buffers=buffers)


def _joined(shapes: Sequence[StageShape], pieces: Pieces) -> Parameters:
    """Whole parameters, joined from their pieces, in the order of the model."""
    by_parameter: dict[tuple[int, str], list[tuple[int, Tensor]]] = {}
    for (stage, name, begin), piece in pieces.items():
        by_parameter.setdefault((stage, name), []).append((begin, piece.reshape(-1)))
    joined = {}
    for stage, shape in enumerate(shapes):
        for name, place in zip(shape.parameter_names, shape.layout, strict=True):
            ordered = sorted(by_parameter.get((stage, name), []), key=lambda piece: piece[0])
            if ordered or not place.size.numel():
                joined[stage, name] = torch.cat([piece for _, piece in ordered] or [torch.zeros(0)]).view(place.size)
    return joined


def tensor_bytes(value: Tensor) -> bytes:
    """The bytes of a tensor's elements, one after the other."""
    return raw_bytes(value).tobytes()


def _packed(values: Pieces) -> Packed:
    """Tensors as bytes, which pickle quickly and may be of types that numpy lacks."""
    return {key: (value.dtype, value.shape, raw_bytes(value)) for key, value in values.items()}


def _unpacked(values: Packed) -> Pieces:
    return {key: torch.from_numpy(data).view(dtype).view(shape) for key, (dtype, shape, data) in values.items()}
