"""The values of parameters, on the rank that writes them: of divided weights, gathered from their owners."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.engine.setup import Setup
from mpirun.engine.stage import LocalStage
from mpirun.engine.weight_shards import Unit, pieces
from mpirun.model.stage_shape import Place
from schedgen.ir.header import Header

PARAMETER = ""  # the key of a parameter's own value
Values = dict[str, Any]  # a parameter's value, and its optimizer state (tensors, numbers) by torch's names
State = Callable[[Unit], Sequence[Values]]  # the optimizer state of each parameter, or piece of one; may be empty


def writing_rank(header: Header, stage: int) -> int:
    """The owner that writes a stage."""
    owners = header.owners[stage]
    return owners[stage % len(owners)]


def written_values(
    comm: MPI.Intracomm,
    header: Header,
    setup: Setup,
    stages: Mapping[int, LocalStage],
    state: State,
    beat: Callable[[], None],
) -> Iterator[tuple[int, list[Values]]]:
    """Each stage that this rank writes, and the values of its parameters. Collective: all ranks go through all stages.

    `stages`: this rank's; `state`: returns nothing if only the parameters are wanted; `beat` is called after each
    parameter that is gathered.
    """
    for index, shape in enumerate(setup.shapes):
        if setup.model.is_replica(index):
            continue
        root, stage, values = writing_rank(header, index), stages.get(index), list[Values]()
        if header.is_divided(index):
            for of_parameter, place in zip(_own_pieces(stage, len(shape.layout), state), shape.layout, strict=True):
                of_ranks = comm.gather(of_parameter, root=root)
                if of_ranks is not None:
                    values.append(_assembled([piece for of_rank in of_ranks for piece in of_rank], place))
                beat()
        elif stage is not None and root == comm.rank:
            kept = state((index, -1)) or [{} for _ in stage.names]
            views = stage.views(stage.weights)
            values = [{PARAMETER: view.detach(), **more} for view, more in zip(views, kept, strict=True)]
        if root == comm.rank:
            yield index, values


def _own_pieces(stage: LocalStage | None, parameters: int, state: State) -> list[list[tuple[int, Values]]]:
    """By parameter of a stage: where each piece that this rank owns begins, and copies of its values."""
    own: list[list[tuple[int, Values]]] = [[] for _ in range(parameters)]
    if stage is None:
        return own
    for part, flat in stage.owned.items():
        of_pieces = state((stage.index, part))
        for number, piece in enumerate(pieces(stage.layout, stage.part_slices[part])):
            values = {PARAMETER: piece.of_part(flat), **(of_pieces[number] if of_pieces else {})}
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
