"""Parameters of stages whose weights are divided among ranks, gathered by the rank that writes the stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.engine.stage import LocalStage
from mpirun.engine.weight_shards import Layout, pieces
from mpirun.model.stage_shape import Place
from schedgen.ir.header import Header

PARAMETER = ""  # the key of a parameter's own value
Values = dict[str, Any]  # a parameter's value, and its optimizer state (tensors, numbers) by torch's names
Kept = Callable[[int], Sequence[Values]]  # by shard of a stage: the optimizer state of each piece in it


def writing_rank(header: Header, stage: int) -> int:
    """The owner that writes a stage."""
    owners = header.owners[stage]
    return owners[stage % len(owners)]


def gather_parameters(
    comm: MPI.Intracomm, root: int, stage: LocalStage | None, layout: Layout, kept: Kept, beat: Callable[[], None]
) -> list[Values]:
    """The values of every parameter of a stage on `root`, an empty list elsewhere. Collective.

    `stage`: None on a rank that has nothing of it; `kept`: returns nothing if only the parameters are wanted; `beat` is
    called after each parameter.
    """
    gathered = []
    for of_parameter, place in zip(_own_pieces(stage, len(layout), kept), layout, strict=True):
        of_ranks = comm.gather(of_parameter, root=root)
        if of_ranks is not None:
            gathered.append(_assembled([piece for of_rank in of_ranks for piece in of_rank], place))
        beat()
    return gathered


def _own_pieces(stage: LocalStage | None, parameters: int, kept: Kept) -> list[list[tuple[int, Values]]]:
    """By parameter of a stage: where each piece that this rank owns begins, and copies of its values."""
    own: list[list[tuple[int, Values]]] = [[] for _ in range(parameters)]
    if stage is None:
        return own
    for shard, flat in stage.owned.items():
        of_pieces = kept(shard)
        for number, piece in enumerate(pieces(stage.layout, stage.shard_spans[shard])):
            values = {PARAMETER: piece.of_shard(flat), **(of_pieces[number] if of_pieces else {})}
            copies = {
                key: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
                for key, value in values.items()
            }
            own[piece.parameter].append((piece.begin, copies))
    return own


def _assembled(fragments: list[tuple[int, Values]], place: Place) -> Values:
    """A parameter's values from those of its pieces, each with the element at which it begins."""
    ordered = [values for _, values in sorted(fragments, key=lambda fragment: fragment[0])]
    if not ordered:
        return {PARAMETER: torch.zeros(place.size, dtype=place.dtype)}
    return {
        key: torch.cat([values[key] for values in ordered]).view(place.size)
        if isinstance(value, Tensor) and value.dim()
        else value
        for key, value in ordered[0].items()
    }
