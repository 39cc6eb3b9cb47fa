"""What a run, or the reference that it is held against, did: gathered from all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.engine.setup import Training
from mpirun.engine.stage import Stage
from mpirun.engine.weight_shards import pieces
from mpirun.model.shapes import StageShape
from schedgen.ir.header import Header

Parameters = dict[tuple[int, str], Tensor]  # by stage and name
Pieces = dict[tuple[int, str, int], Tensor]  # by stage, name and where in the parameter it begins


class Record(NamedTuple):
    """What a run, or a reference, did: enough to compare the two."""

    losses: list[list[float]]  # by step and microbatch
    gradients: list[Parameters]  # by step, before clipping; not of steps that changed nothing
    parameters: Parameters  # in the end
    start: Parameters | None = None  # those of a reference


class Mine(NamedTuple):
    """One rank's part of it."""

    losses: list[list[float]]
    gradients: list[Pieces]
    parameters: Pieces


def named(stage: Stage, via: int, flat: Tensor) -> Pieces:
    """What of a stage's parameters lies in a part by name, as copies; `flat`: laid out as the part is."""
    if via < 0:
        return {(stage.index, name, 0): view.clone() for name, view in zip(stage.names, stage.views(flat), strict=True)}
    return {
        (stage.index, stage.names[piece.parameter], piece.begin): piece.within(flat).clone()
        for piece in pieces(stage.layout, stage.spans[via])
    }


def gather(comm: MPI.Intracomm, header: Header, shapes: Sequence[StageShape], record: Mine) -> Record | str | None:
    """On rank 0: the record of all stages, or a sentence where owners of a stage differ; None elsewhere.

    Each rank gives the parameters it owns; gradients come from the first owner.
    """
    hashes = {key: hashlib.sha256(_bytes(value)).hexdigest() for key, value in record.parameters.items()}
    firsts = {
        key: value
        for key, value in record.parameters.items()
        if header.weight_shards.parts(key[0]) != (-1,) or header.owners[key[0]][0] == comm.rank
    }
    everything = comm.gather((hashes, [_numpy(gradients) for gradients in record.gradients], _numpy(firsts)))
    if everything is None:
        return None
    parameters: Pieces = {}
    gradients: list[Pieces] = [{} for _ in record.gradients]
    for _, of_steps, final in everything:
        parameters |= _torch(final)
        for merged, one in zip(gradients, of_steps, strict=True):
            merged |= _torch(one)
    for rank, (digests, _, _) in enumerate(everything):
        for key, digest in digests.items():
            if hashlib.sha256(_bytes(parameters[key])).hexdigest() != digest:
                return f"rank {rank} ends with another {key[1]} of stage {key[0]} than the stage's first owner"
    return Record(record.losses, [_joined(shapes, one) for one in gradients], _joined(shapes, parameters))


def _joined(shapes: Sequence[StageShape], pieces: Pieces) -> Parameters:
    """Whole parameters, in the order of the model."""
    found: dict[tuple[int, str], list[tuple[int, Tensor]]] = {}
    for (stage, name, begin), piece in pieces.items():
        found.setdefault((stage, name), []).append((begin, piece.reshape(-1)))
    whole = {}
    for stage, shape in enumerate(shapes):
        for name, (_, size) in zip(shape.parameter_names, shape.layout, strict=True):
            of_one = sorted(found.get((stage, name), []), key=lambda piece: piece[0])
            if of_one or not size.numel():
                whole[stage, name] = torch.cat([piece for _, piece in of_one] or [torch.zeros(0)]).view(size)
    return whole


def put_together(of: Training, header: Header, record: Record) -> Record | str:
    """The record of the model that a schedule has shards of; a sentence where what should be copies differs."""
    T = header.tensor_parallel.degree
    wrong: list[str] = []

    def whole(values: Parameters) -> Parameters:
        found: Parameters = {}
        for (stage, name), value in values.items():
            key, cut = (
                (stage // T, name),
                of.shapes[stage].sharded_dims.get(name) if header.tensor_parallel.split[stage] else None,
            )
            if cut is not None:
                found.setdefault(
                    key, cut.join([values[shard, name] for shard in header.tensor_parallel.siblings(stage)])
                )
            elif _bytes(found.setdefault(key, value)) != _bytes(value):
                wrong.append(f"{name} of stage {key[0]} is another in shard {stage % T} than in the first that has it")
        return found

    found = Record(record.losses, [whole(gradients) for gradients in record.gradients], whole(record.parameters))
    return wrong[0] if wrong else found


def _bytes(value: Tensor) -> bytes:
    return value.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()


def _numpy(values: Pieces) -> dict[tuple[int, str, int], tuple[torch.dtype, torch.Size, np.ndarray]]:
    """Tensors as bytes: pickled quickly, and of types that numpy lacks."""
    return {
        key: (v.dtype, v.shape, v.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy())
        for key, v in values.items()
    }


def _torch(values: dict[tuple[int, str, int], tuple[torch.dtype, torch.Size, np.ndarray]]) -> Pieces:
    return {key: torch.from_numpy(data).view(dtype).view(shape) for key, (dtype, shape, data) in values.items()}
