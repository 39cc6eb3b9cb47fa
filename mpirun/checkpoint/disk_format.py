"""The format of checkpoints on disk: reads and writes their folders, files and manifests.

    DIR/step-00000010/
        weights-0.safetensors     parameters, frozen ones and buffers by their names in the model
        optimizer-0.safetensors   what the optimizer keeps, as <parameter>.<name>
        ...                       two files for every rank that had something to write
        state-0.pt                what the script saves besides, by torch.save; from every rank if ranks' differ
        manifest.json             step, seed and settings of the run; the files with their sizes and hashes

Nothing in a name depends on stages, ranks or the scheme. A checkpoint appears whole or not at all:

1. Ranks write its files to a draft, a folder of another name, and sync them to the disk.
2. The manifest is written to it. A folder that lacks one, or differs from it, is no checkpoint.
3. The draft gets the checkpoint's name. An older checkpoint of the same step is first renamed, and counts until then.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from schedgen.util.errors import RefusedFile, UsageError, clip
from schedgen.util.files import new_file_mode

VERSION = 5
MANIFEST = "manifest.json"
_DRAFT = ".writing-"  # prefix of a folder that is no checkpoint yet, or no longer
_REPLACED = ".replaced-"  # prefix of a step's older checkpoint, which counts until the new one has its name
_FOLDER_NAME = re.compile(rf"({re.escape(_REPLACED)})?step-[0-9]+")
_UNFINISHED = re.compile(rf"{re.escape(_DRAFT)}[0-9]{{8,}}")
_FILE_NAME = re.compile(r"(weights|optimizer)-[0-9]+\.safetensors|state-[0-9]+\.pt")


class CheckpointFile(NamedTuple):
    """A file of a checkpoint, as the manifest lists it."""

    name: str
    bytes: int
    sha256: str
    entries: list[str]


class Manifest(NamedTuple):
    """The contents of a checkpoint's manifest."""

    folder: Path
    step: int  # steps done
    seed: int
    settings: dict[str, Any]  # of the run, and where it is in its data
    files: list[CheckpointFile]
    directory: Path | None = None  # where a run that resumes looked for it: `folder`, or the directory that it lies in

    def entry_files(self, kind: str) -> dict[str, Path]:
        """The file of every entry; `kind`: weights or optimizer."""
        return {entry: self.folder / f.name for f in self.files if f.name.startswith(kind) for entry in f.entries}


@contextlib.contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Turn errors of the file system and of the format into a RefusedFile that names the path."""
    try:
        yield
    except OSError as error:
        raise RefusedFile(f"{path}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise RefusedFile(f"{path}: {error}") from None


def sync(path: Path) -> None:
    """Wait until a file's contents, or the names in a folder, are on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def save_tensors(entries: Mapping[str, Tensor], file: Path, metadata: dict[str, str] | None) -> None:
    """Write a safetensors file, and wait until it is on the disk. RefusedFile if that fails."""
    with refusing(file):
        try:
            save_file(dict(entries), file, metadata)
        except (KeyError, ValueError) as error:  # a type or layout that the format lacks
            raise RefusedFile(f"{file}: {error}") from None
        file.chmod(new_file_mode())  # safetensors makes it private
        sync(file)


def step_folder(directory: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return directory / f"step-{step:08d}"


def draft_folder(directory: Path, step: int) -> Path:
    """The folder that a step's checkpoint is written to."""
    return directory / f"{_DRAFT}{step:08d}"


def begin(directory: Path, step: int) -> None:
    """Make an empty draft."""
    folder = draft_folder(directory, step)
    with refusing(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)


def write_file(directory: Path, step: int, kind: str, rank: int, entries: Mapping[str, Any]) -> CheckpointFile:
    """Write a rank's file of one kind, weights or optimizer, to the draft and to the disk.

    The file's metadata name the entries that are Python numbers, not tensors.
    """
    file = draft_folder(directory, step) / f"{kind}-{rank}.safetensors"
    numbers = {name: value for name, value in entries.items() if not isinstance(value, Tensor)}
    tensors = {
        name: torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        for name, value in numbers.items()
    }
    with refusing(file):
        save_tensors({**entries, **tensors}, file, dict.fromkeys(numbers, "number") or None)
        return CheckpointFile(file.name, file.stat().st_size, _hash(file), list(entries))


def state_bytes(state: Mapping[str, Any]) -> bytes:
    """A script's state as torch.save writes it; nothing if it is empty. UsageError if it could not be read again."""
    if not state:
        return b""
    saved = io.BytesIO()
    try:
        torch.save(dict(state), saved)
        torch.load(io.BytesIO(saved.getvalue()), weights_only=True)
    except Exception as error:  # pickle's, and whatever a value's own methods raise
        other = re.search(r"GLOBAL (\S+)", str(error))  # torch.load says which class it does not read
        what = clip(str(error)) if other is None else f"torch.load would not read {other[1]}"
        raise UsageError(f"state: give numbers, strings and tensors, in lists and dicts: {what}") from None
    return saved.getvalue()


def write_state(directory: Path, step: int, rank: int, state: bytes) -> CheckpointFile:
    """Write a rank's state to the draft and to the disk."""
    file = draft_folder(directory, step) / f"state-{rank}.pt"
    with refusing(file):
        file.write_bytes(state)
        sync(file)
        return CheckpointFile(file.name, len(state), _hash(file), [])


def read_state(manifest: Manifest, rank: int, ranks: int) -> dict[str, Any]:
    """A rank's state, with its tensors on the CPU; UsageError if it is not known which of several states it is."""
    files = sorted((file.name for file in manifest.files if file.name.startswith("state")), key=lambda n: (len(n), n))
    if len(files) > 1 and len(files) != ranks:
        raise UsageError(
            f"{manifest.folder}: the states of its {len(files)} ranks differ, and there are {ranks} ranks: resume "
            f"with {len(files)}"
        )
    file = manifest.folder / files[rank if len(files) > 1 else 0] if files else None
    if file is None or not file.stat().st_size:
        return {}
    return torch.load(file, map_location="cpu", weights_only=True)


def publish(directory: Path, step: int, settings: Mapping[str, Any], files: Sequence[CheckpointFile]) -> Path:
    """Make a checkpoint of a draft that has all its files; returns its folder. `settings`: as in a `Manifest`."""
    folder, draft = step_folder(directory, step), draft_folder(directory, step)
    manifest = {"checkpoint": VERSION, "step": step, **settings, "files": [file._asdict() for file in files]}
    with refusing(folder):
        (draft / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        sync(draft / MANIFEST)
        sync(draft)
        if folder.exists():
            replaced = folder.with_name(f"{_REPLACED}{folder.name}")
            shutil.rmtree(replaced, ignore_errors=True)
            folder.rename(replaced)
        draft.rename(folder)
        sync(directory)
    return folder


def prune(directory: Path, step: int, keep: int) -> None:
    """Keep the newest `keep` checkpoints up to a step; remove older ones, and unfinished ones.

    Checkpoints of later steps stay: this run could not resume from them. Those that cannot be removed stay, too.
    """
    folders = [folder for folder in step_folders(directory) if step_of(folder) <= step and (folder / MANIFEST).exists()]
    for folder in folders[keep:]:
        with contextlib.suppress(OSError):  # half a checkpoint never has the name of a whole one
            folder.rename(draft_folder(directory, step_of(folder)))
    remove_unfinished(directory)


def remove_unfinished(directory: Path) -> None:
    """Remove drafts, and checkpoints that have been replaced; no others."""
    for folder in directory.glob(".*"):
        replaced = _FOLDER_NAME.fullmatch(folder.name) and _has_other(folder)
        if replaced or _UNFINISHED.fullmatch(folder.name):
            shutil.rmtree(folder, ignore_errors=True)


def step_folders(directory: Path) -> list[Path]:
    """The folders that may be checkpoints, the newest first; or `directory` itself if it is one."""
    with refusing(directory):
        if (directory / MANIFEST).exists():
            return [directory]
        inside = directory.iterdir() if directory.exists() else ()
        named = (path for path in inside if _FOLDER_NAME.fullmatch(path.name))
        return sorted((path for path in named if path.is_dir() and not _has_other(path)), key=step_of, reverse=True)


def _has_other(folder: Path) -> bool:
    name = folder.name.removeprefix(_REPLACED)
    return name != folder.name and folder.with_name(name).exists()


def step_of(folder: Path) -> int:
    """The step of a checkpoint, by the name of its folder."""
    return int(folder.name.rpartition("-")[2])


def read_manifest(folder: Path) -> Manifest:
    """The manifest in a checkpoint's folder; RefusedFile if this version cannot read it. Reads no other file."""
    path = folder / MANIFEST
    try:
        settings = json.loads(path.read_bytes())
        if settings.pop("checkpoint") != VERSION:
            raise RefusedFile(f"{path}: its format version is not {VERSION}, which this mpirun reads")
        files = [CheckpointFile(**file) for file in settings.pop("files")]
        numbers = step, seed = settings.pop("step"), settings["options"]["seed"]
        sound = all(type(number) is int and 0 <= number < 2**31 for number in numbers)
        sound &= all(_FILE_NAME.fullmatch(file.name) is not None and type(file.bytes) is int for file in files)
        sound &= all(isinstance(entry, str) for file in files for entry in file.entries)
        sound &= isinstance(settings["optimizer"], str)
        if not sound:
            raise RefusedFile(f"{path}: damaged")
    except FileNotFoundError:
        raise RefusedFile(f"{folder}: incomplete: it has no manifest") from None
    except OSError as error:
        raise RefusedFile(f"{path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise RefusedFile(f"{path}: damaged") from None
    return Manifest(folder, step, seed, settings, files)


def verify_file(folder: Path, file: CheckpointFile) -> None:
    """RefusedFile if a file is not what the manifest says."""
    path = folder / file.name
    with refusing(path):
        if path.stat().st_size != file.bytes or _hash(path) != file.sha256:
            raise RefusedFile(f"{path}: damaged")


def read_entries(files: Mapping[str, Path], names: Sequence[str]) -> dict[str, Any]:
    """Tensors and numbers by entry, from the file of each entry; those that no file has are left out."""
    values: dict[str, Any] = {}
    for file in sorted({files[name] for name in names if name in files}):
        with refusing(file), safe_open(file, framework="pt") as source:
            numbers = source.metadata() or {}
            for name in [name for name in names if files.get(name) == file]:
                value = source.get_tensor(name)
                values[name] = value.item() if name in numbers else value.clone()
    return values


def _hash(file: Path) -> str:
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
