"""Exports a model under its own names: a directory of safetensors files that transformers' `from_pretrained` loads.

    DIR/model.safetensors                 where one rank writes all, or else
        model-00001-of-00003.safetensors  one for every rank that has something to write
        model.safetensors.index.json      the file of each tensor
        config.json, tokenizer.json ...   the other files of the directory whose weights training started from

The directory appears whole or not at all: ranks write to a draft, a folder of another name, which is then renamed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.checkpoint.disk_format import refusing, save_tensors, sync
from mpirun.checkpoint.entry_names import first_stages, is_share, parameter_entries, untrained_tensors
from mpirun.checkpoint.gather import PARAMETER, gather_parameters, writing_rank
from mpirun.checkpoint.pretrained import INDEX, SINGLE, Pretrained
from mpirun.comm.fail_together import Stop, on_rank_0, together
from mpirun.comm.output import note
from mpirun.engine.setup import Setup
from mpirun.engine.stage import LocalStage
from mpirun.model.contract import Model
from mpirun.model.weight_names import unused_names, weight_names
from schedgen.ir.header import Header
from schedgen.util.errors import UsageError, listed

WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf")


def export(
    comm: MPI.Intracomm,
    header: Header,
    setup: Setup,
    stages: Mapping[int, LocalStage],
    directory: str | Path,
    source: str | Path | None = None,
    beat: Callable[[], None] = lambda: None,
) -> Path:
    """Write all parameters and saved buffers to a new or empty directory. Collective.

    `stages`: this rank's; `source`: a directory whose files, except weights, are copied; `beat` is called after each
    stage, and after each parameter that is gathered. Stop if the directory is not empty or cannot be written.
    """
    directory = Path(comm.bcast(os.path.realpath(directory)))
    draft = directory.with_name(f".exporting-{comm.bcast(secrets.token_hex(8))}")  # another run has another
    on_rank_0(comm, lambda: _begin(directory, draft, source))
    try:
        together(comm, lambda: _check_visible(draft))
        entries = _entries(comm, header, setup, stages, beat)
        names = comm.allgather(list(entries))
        writers = [rank for rank, of_rank in enumerate(names) if of_rank]
        files = {rank: _file_name(number, len(writers)) for number, rank in enumerate(writers)}
        sizes = comm.gather(together(comm, lambda: _write(draft, files.get(comm.rank), entries)))
        index = {name: files[rank] for rank, of_rank in enumerate(names) for name in of_rank}
        on_rank_0(comm, lambda: _publish(directory, draft, source, index, sum(sizes or ())))
    except Stop:
        if comm.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
        raise
    if source is not None:
        known = comm.gather({name for others in _known_names(setup.model, stages) for name in others})
        left_out = on_rank_0(comm, lambda: _left_out(Path(source), set().union(*known or ())))
        if left_out:
            note(comm, f"export {directory}: no stage has {listed(left_out)} of {source}: not written")
    return directory


def whole_state(
    comm: MPI.Intracomm, header: Header, setup: Setup, stages: Mapping[int, LocalStage], beat: Callable[[], None]
) -> dict[str, Tensor]:
    """On rank 0, copies of all that `export` writes, under every name that the model has for it; elsewhere none.

    Collective. The arguments are those of `export`.
    """
    entries = _entries(comm, header, setup, stages, beat)
    copies = {name: value.detach().to("cpu", copy=True) for name, value in entries.items()}
    names = _known_names(setup.model, stages)
    whole: dict[str, Tensor] = {}
    aliases: list[list[str]] = []
    for of_rank, names_of_rank in comm.gather((copies, names)) or ():
        whole |= of_rank
        aliases += names_of_rank
    return {alias: whole[known[0]] for known in aliases if known[0] in whole for alias in known} | whole


def _known_names(model: Model, stages: Mapping[int, LocalStage]) -> list[list[str]]:
    """The names of each parameter and saved buffer of these stages, or of no stage, its entry first."""
    names = [known for index, stage in stages.items() for known in weight_names(model, index, stage.module).values()]
    return names + list(unused_names(model).values())


def _entries(
    comm: MPI.Intracomm, header: Header, setup: Setup, stages: Mapping[int, LocalStage], beat: Callable[[], None]
) -> dict[str, Tensor]:
    """The tensors that this rank writes, by name in the whole model. Collective."""
    model, entries = setup.model, dict[str, Tensor]()
    shares: dict[str, list[Tensor]] = {}
    for index, shape in enumerate(setup.shapes):
        if model.is_replica(index):
            continue
        root, stage, values = writing_rank(header, index), stages.get(index), list[Tensor]()
        if header.is_sharded(index):
            gathered = gather_parameters(comm, root, stage, shape.layout, lambda _: (), beat)
            values = [of_parameter[PARAMETER] for of_parameter in gathered]
        elif stage is not None and comm.rank == root:
            values = [view.detach().cpu() for view in stage.views(stage.weights)]
        slice = model.slice_of(index)
        cut = shape.sliced_dims if slice.count > 1 else {}
        held: dict[str, Tensor] = {}
        if stage is not None and comm.rank == root:
            held = untrained_tensors(stage) | dict(zip(stage.names, values, strict=True))
            for name, entry in zip(stage.names, parameter_entries(model, stage), strict=True):
                if entry is not None and name not in cut:
                    entries[entry] = held[name]
        for name, dim in cut.items():  # the slices' shares, to the rank that writes the first slice
            whole, to = model.entry_name(index, name), writing_rank(header, index - slice.index)
            of_ranks = comm.gather(held[name].cpu() if name in held else None, root=to)
            shares.setdefault(whole, []).extend(share for share in of_ranks or () if share is not None)
            if comm.rank == to and slice.index == slice.count - 1:
                entries[whole] = dim.join(shares.pop(whole))
        beat()
    unused = on_rank_0(comm, lambda: _unused(setup.model)) or {}
    if without := [entry for entry, value in unused.items() if value.is_meta]:
        why = "the forward does not use them, and on the meta device they have no values"
        note(comm, f"not written: {listed(without)}: {why}")
    return entries | _untrained(comm, header, setup, stages) | {e: x for e, x in unused.items() if not x.is_meta}


def _unused(model: Model) -> dict[str, Tensor]:
    """By entry, what is in no stage: as `Model.weights` has it or, if it lacks it, as the module has it."""
    names = unused_names(model)
    given = model.weights([name for known in names.values() for name in known]) if model.weights and names else {}
    found: dict[str, Tensor] = {}
    for name, known in names.items():
        tensor = model.origin.unused[name]
        values = [given[other] for other in known if other in given and given[other].shape == tensor.shape]
        found[known[0]] = values[0].to(tensor.dtype) if values else tensor
    return found


def _untrained(
    comm: MPI.Intracomm, header: Header, setup: Setup, stages: Mapping[int, LocalStage]
) -> dict[str, Tensor]:
    """The frozen parameters and buffers that this rank writes: of those in several stages, the first's. Collective."""
    own = together(comm, lambda: _own_untrained(comm.rank, header, setup, stages))
    of_ranks = comm.allgather([(entry, index) for entry, (index, _) in own.items()])
    first = first_stages(pair for of_rank in of_ranks for pair in of_rank)
    return {entry: value for entry, (index, value) in own.items() if first[entry] == index}


def _own_untrained(
    rank: int, header: Header, setup: Setup, stages: Mapping[int, LocalStage]
) -> dict[str, tuple[int, Tensor]]:
    """Frozen parameters and buffers of the stages that a rank writes, each with the first such stage that has it."""
    own: dict[str, tuple[int, Tensor]] = {}
    for index, stage in sorted(stages.items()):
        if writing_rank(header, index) == rank and header.is_first_slice(index):
            seen: set[int] = set()  # addresses: a tensor is written under its first name
            for name, value in untrained_tensors(stage).items():
                if is_share(setup.model, stage, name):
                    continue
                entry = setup.model.entry_name(index, name)
                if entry.endswith("_extra_state"):
                    raise UsageError(f"the model has {entry}: only parameters and buffers are exported")
                if not value.numel() or value.data_ptr() not in seen:
                    own.setdefault(entry, (index, value))
                seen.add(value.data_ptr())
    return own


def _file_name(number: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _write(draft: Path, file: str | None, entries: Mapping[str, Tensor]) -> int:
    """Write this rank's file, if it has one; returns the bytes of its tensors."""
    if file is None:
        return 0
    # The format takes no views, nor tensors that share memory.
    values = {
        name: value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, value in entries.items()
    }
    save_tensors(values, draft / file, {"format": "pt"})
    return sum(value.nbytes for value in values.values())


def check_new(directory: Path) -> None:
    """UsageError if a directory cannot be exported to: there is something in it, or it cannot be made or replaced."""
    real, wrong = Path(os.path.realpath(directory)), ""  # of a link the directory that it points to
    with refusing(directory):
        parent = next(path for path in (*real.parents, real) if os.path.lexists(path))
        if os.path.lexists(real) and (not real.is_dir() or any(real.iterdir())):
            wrong = "it is not empty: export to a new directory"
        elif real.exists() and (real.samefile(".") or real.is_mount()):
            wrong = "it is the working directory or a mount point: export to a new directory in it"
        elif not parent.is_dir():
            wrong = f"{parent} is not a directory"
        elif not os.access(parent, os.W_OK | os.X_OK):
            wrong = f"{parent}: Permission denied"
    if wrong:
        raise UsageError(f"export {directory}: {wrong}")


def _begin(directory: Path, draft: Path, source: str | Path | None) -> None:
    if source is not None and not Path(source).is_dir():
        raise UsageError(f"export: {source} is no directory")
    check_new(directory)
    with refusing(directory):
        draft.mkdir(parents=True)


def _check_visible(draft: Path) -> None:
    if not draft.is_dir():
        raise UsageError(f"export {draft.parent}: not all hosts see the same folder")


def _publish(directory: Path, draft: Path, source: str | Path | None, index: Mapping[str, str], size: int) -> None:
    """Add the index and the files of `source`; give the draft its name."""
    with refusing(directory):
        if len(set(index.values())) > 1:
            weight_map = dict(sorted(index.items()))
            contents = {"metadata": {"total_size": size}, "weight_map": weight_map}
            (draft / INDEX).write_text(json.dumps(contents, indent=2) + "\n")
        for path in sorted(Path(source).iterdir()) if source is not None else ():
            if path.is_file() and not path.name.startswith(".") and not path.name.endswith(WEIGHTS):
                shutil.copyfile(path, draft / path.name)
        for path in (*draft.iterdir(), draft):
            sync(path)
        if directory.exists():
            directory.rmdir()
        draft.rename(directory)
        sync(directory.parent)


def _left_out(source: Path, known: Collection[str]) -> list[str]:
    """The source's tensors that no stage has under any name."""
    with contextlib.suppress(UsageError):  # it may have no weights
        return [name for name in Pretrained(source).names if name not in known]
    return []
