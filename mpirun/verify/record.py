"""What a run did: the losses, gradients and parameters of one rank, and of all ranks gathered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.comm.fail_together import first_difference
from mpirun.data.values import digest_of
from mpirun.engine.core.stage import LocalStage
from mpirun.engine.core.weight_layout import pieces
from mpirun.model.stage_shape import StageShape
from schedgen.ir.header import Header

Key = TypeVar("Key")
Parameters = dict[tuple[int, str], Tensor]  # by stage and name
Pieces = dict[tuple[int, str, int], Tensor]  # by stage, name and where in the flat parameter it begins


class Record(NamedTuple):
    """What a run did, or the reference that it is compared with: enough to compare the two."""

    losses: list[list[float]]  # by step and microbatch
    gradients: list[Parameters]  # by step, before clipping; without skipped steps
    parameters: Parameters  # after the last step
    buffers: Mapping[tuple[int, str], Tensor] = {}  # after the last step: those that forwards change


class RankRecord(NamedTuple):
    """One rank's part of a record, filled while it runs."""

    losses: list[list[float]]
    gradients: list[Pieces]
    parameters: Pieces
    buffers: Parameters


def on_host(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
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


def differing_copy(comm: MPI.Intracomm, header: Header, shapes: Sequence[StageShape], record: RankRecord) -> str | None:
    """A sentence, if two ranks end with different values of what should be one parameter. Collective."""
    digests: dict[tuple[bool, int, str, int], str] = {}
    for (stage, name, begin), value in record.parameters.items():
        is_slice = header.tensor_parallel.sliced[stage] and name in shapes[stage].sliced_dims
        digests[is_slice, stage if is_slice else header.model_stage(stage), name, begin] = digest_of([value])
    if (difference := first_difference(comm, digests)) is None:
        return None
    (_, stage, name, _), one, other, *_ = difference
    return f"ranks {one} and {other} end with different values of {name} of stage {stage}"


def gather_record(
    comm: MPI.Intracomm, header: Header, shapes: Sequence[StageShape], record: RankRecord
) -> Record | None:
    """The record of all stages on rank 0; None elsewhere. Collective.

    Gradients and parameters come from the first owner.
    """
    of_first_owner = {
        key: value
        for key, value in record.parameters.items()
        if header.is_sharded(key[0]) or header.owners[key[0]][0] == comm.rank
    }
    gradients_on_host = [on_host(gradients) for gradients in record.gradients]
    of_ranks = comm.gather((gradients_on_host, on_host(of_first_owner), record.buffers))
    if of_ranks is None:
        return None
    parameters: Pieces = {}
    gradients: list[Pieces] = [{} for _ in record.gradients]
    buffers: Parameters = {}
    for of_steps, of_rank, own_buffers in of_ranks:
        parameters |= of_rank
        buffers |= own_buffers
        for merged, of_step in zip(gradients, of_steps, strict=True):
            merged |= of_step
    joined = [_joined(shapes, step) for step in gradients]
    return Record(record.losses, joined, _joined(shapes, parameters), buffers)


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
