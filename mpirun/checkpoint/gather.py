"""What each rank writes, by entry: the weights that it owns, and those that ranks divide, which it gathers.

An entry is a parameter's or buffer's name in the model, which depends on no stage or rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from mpirun.comm.fail_together import together
from mpirun.engine.core.stage import LocalStage
from mpirun.engine.setup import RankPart
from mpirun.model.build_stage import unused_names, weight_names
from mpirun.model.contract import Model
from mpirun.model.parallel_layers import Slice
from mpirun.model.stage_shape import Unit, pieces
from schedgen.ir.header import Header
from schedgen.util.errors import UsageError


def parameter_entries(model: Model, stage: LocalStage) -> list[str | None]:
    """The entry of each of a stage's parameters; None for one that is written with another stage."""
    firsts = {key: tie[0][0] for tie in model.tied for key in tie}
    entries: list[str | None] = []
    for name in stage.names:
        entry = model.entry_name(stage.index, name)
        if is_share(model, stage, name):
            entries.append(slice_entry(entry, model.slice_of(stage.index)))
        else:
            entries.append(entry if firsts.get((stage.index, name), stage.index) == stage.index else None)
    return entries


def slice_entry(entry: str, slice: Slice) -> str:
    """What a tensor slice's share of a parameter is called until the shares are joined."""
    return f"{entry}@{slice.index}/{slice.count}"


def is_share(model: Model, stage: LocalStage, name: str) -> bool:
    """Whether a stage's tensor of this name is a tensor slice's share."""
    return model.slice_of(stage.index).count > 1 and name in stage.shape.sliced_dims


def known_names(model: Model, stages: Mapping[int, LocalStage]) -> list[list[str]]:
    """The names of each parameter and saved buffer of these stages, or of no stage, its entry first."""
    names = [known for index, stage in stages.items() for known in weight_names(model, index, stage.module).values()]
    return names + list(unused_names(model).values())


def untrained_tensors(stage: LocalStage) -> dict[str, Tensor]:
    """The frozen parameters and buffers of a stage's module by name: the tensors themselves.

    UsageError if the module has other state.
    """
    module = stage.module
    # Not by requires_grad, which a script may have changed since, as to train a generator through its discriminator.
    trained = {parameter.data_ptr() for name, parameter in module.named_parameters() if name in stage.names}
    own = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    untrained: dict[str, Tensor] = {}
    for name in module.state_dict():
        if name not in own:
            raise UsageError(f"stage {stage.index} has {name}: only parameters and buffers are saved")
        if own[name].data_ptr() not in trained:
            untrained[name] = own[name].detach()
    return untrained


def written_untrained(model: Model, stage: LocalStage) -> dict[str, Tensor]:
    """The untrained tensors that are written, by entry: every share, and the first slice's copy of others."""
    entries: dict[str, Tensor] = {}
    for name, value in untrained_tensors(stage).items():
        entry = model.entry_name(stage.index, name)
        if is_share(model, stage, name):
            entries[slice_entry(entry, model.slice_of(stage.index))] = value
        elif model.is_first_slice(stage.index):
            entries[entry] = value
    return entries


PARAMETER = ""  # the key of a parameter's own value
Values = dict[str, Any]  # a parameter's value, and its optimizer state (tensors, numbers) by torch's names
State = Callable[[Unit], Sequence[Values]]  # the optimizer state of each parameter, or piece of one; may be empty


def writing_rank(header: Header, stage: int) -> int:
    """The owner that writes a stage."""
    owners = header.owners[stage]
    return owners[stage % len(owners)]


def written_entries(part: RankPart, state: State) -> tuple[dict[str, Tensor], Values]:
    """The weights and the optimizer state that this rank writes, by entry. Collective.

    `state`: returns nothing if only the weights are wanted. Stop if a module has state other than tensors.
    """
    values: dict[str, Values] = {}
    for index, of_stage in dict(_written_values(part, state)).items():
        entries = parameter_entries(part.setup.model, part.stages[index])
        values |= {entry: each for entry, each in zip(entries, of_stage, strict=True) if entry is not None}
    for entry, value in untrained_entries(part)[0].items():
        # The format takes no views, nor tensors that share memory.
        values[entry] = {PARAMETER: value.clone(memory_format=torch.contiguous_format)}
    _join_slices(part, values)
    weights = {entry: each.pop(PARAMETER).detach() for entry, each in values.items()}
    return weights, {f"{entry}.{key}": value for entry, each in values.items() for key, value in each.items()}


def _join_slices(part: RankPart, values: dict[str, Values]) -> None:
    """Replace the shares that tensor slices have of parameters by the whole, where the first slice is written."""
    comm, header, model = part.comm, part.header, part.setup.model
    for index in header.first_slices:
        first, root = model.slice_of(index), writing_rank(header, index)
        for name, dim in part.setup.shapes[index].sliced_dims.items() if first.count > 1 else ():
            whole = model.entry_name(index, name)
            names = [slice_entry(whole, Slice(number, first.count)) for number in range(first.count)]
            own = {entry: tree_map_only(Tensor, _on_host, values.pop(entry)) for entry in names if entry in values}
            if (of_ranks := comm.gather(own, root=root)) is not None:
                shares = {entry: share for of_rank in of_ranks for entry, share in of_rank.items()}
                values[whole] = _joined([shares[entry] for entry in names], dim.join)
            part.beat()


def _joined(parts: Sequence[Values], join: Callable[[list[Tensor]], Tensor]) -> Values:
    """The values of a parameter, from those of its parts in their order; numbers are those of the first."""
    return {
        key: join([part[key] for part in parts]) if isinstance(value, Tensor) and value.dim() else value
        for key, value in parts[0].items()
    }


def _on_host(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)


def untrained_entries(part: RankPart) -> tuple[dict[str, Tensor], list[str]]:
    """The frozen parameters and buffers that this rank writes, by entry; and the entries of all ranks. Collective.

    An entry that several stages have is written with the first, but listed once for each.
    """
    comm, model = part.comm, part.setup.model
    here = [stage for index, stage in part.stages.items() if writing_rank(part.header, index) == comm.rank]
    own = together(comm, lambda: [(stage.index, written_untrained(model, stage)) for stage in here])
    pairs = [(entry, index) for index, named in own for entry in named]
    of_all = [pair for of_rank in comm.allgather(pairs) for pair in of_rank]
    first = dict(sorted(of_all, key=lambda pair: pair[1], reverse=True))
    entries = {entry: x for index, named in own for entry, x in named.items() if first[entry] == index}
    return entries, [entry for entry, _ in of_all]


def _written_values(part: RankPart, state: State) -> Iterator[tuple[int, list[Values]]]:
    """Each stage that this rank writes, and the values of its parameters. All ranks go through all stages."""
    comm = part.comm
    for index, shape in enumerate(part.setup.shapes):
        if part.setup.model.is_replica(index):
            continue
        root, stage, values = writing_rank(part.header, index), part.stages.get(index), list[Values]()
        if part.header.is_sharded(index):
            for of_parameter, place in zip(_own_pieces(stage, len(shape.layout), state), shape.layout, strict=True):
                of_ranks = comm.gather(of_parameter, root=root)
                if of_ranks is not None:
                    fragments = sorted((piece for of_rank in of_ranks for piece in of_rank), key=lambda piece: piece[0])
                    ordered = [values for _, values in fragments] or [{PARAMETER: torch.empty(0, dtype=place.dtype)}]
                    values.append(_joined(ordered, lambda parts: torch.cat(parts).view(place.size)))
                part.beat()
        elif stage is not None and root == comm.rank:
            kept = state((index, -1)) or [{} for _ in stage.names]
            views = stage.views(stage.weights)
            values = [{PARAMETER: view, **more} for view, more in zip(views, kept, strict=True)]
        if root == comm.rank:
            yield index, values


def _own_pieces(stage: LocalStage | None, parameters: int, state: State) -> list[list[tuple[int, Values]]]:
    """By parameter of a stage: where each piece that this rank owns begins, and copies of its values."""
    own: list[list[tuple[int, Values]]] = [[] for _ in range(parameters)]
    if stage is None:
        return own
    for shard, flat in stage.owned.items():
        of_pieces = state((stage.index, shard))
        for number, piece in enumerate(pieces(stage.layout, stage.shard_spans[shard])):
            values = {PARAMETER: piece.of_shard(flat), **(of_pieces[number] if of_pieces else {})}
            own[piece.parameter].append((piece.begin, tree_map_only(Tensor, _on_host, values)))
    return own
