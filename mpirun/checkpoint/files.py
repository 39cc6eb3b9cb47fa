"""Checkpoints on disk.

    DIR/step-00000010/
        weights-0.safetensors     parameters, frozen ones and buffers by their names in the model
        optimizer-0.safetensors   what the optimizer keeps, as <parameter>.<name>
        ...                       two files for every rank that had something to write
        manifest.json             what belongs together, with sizes and hashes

Nothing in a name depends on stages, ranks or the scheme. A checkpoint is
written aside, in a folder of another name; its files reach the disk, the
folder gets its name, and the manifest is last: what lacks it, or differs from
it, is no checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from schedgen.util.errors import RefusedFile

VERSION = 1
MANIFEST = "manifest.json"
_ASIDE, _OLD = ".writing-", ".old-"
_PART = re.compile(r"(weights|optimizer)-[0-9]+\.safetensors")


class Part(NamedTuple):
    """A file of a checkpoint."""

    name: str
    bytes: int
    sha256: str
    entries: list[str]


class Manifest(NamedTuple):
    folder: Path
    step: int  # how many are done
    seed: int
    facts: dict[str, Any]  # optimizer and its options, data, schedule, what was changed on the way, and the above
    parts: list[Part]

    def files(self, kind: str) -> dict[str, Path]:
        """Which file has an entry; `kind`: weights or optimizer."""
        parts = [part for part in self.parts if part.name.startswith(kind)]
        return {entry: self.folder / part.name for part in parts for entry in part.entries}


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """What goes wrong with a file, as a sentence."""
    try:
        yield
    except OSError as error:
        raise RefusedFile(f"{path}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise RefusedFile(f"{path}: {error}") from None


def _sync(path: Path) -> None:
    """What is in a file, or which names are in a folder, reaches the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def folder_of(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def aside(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step is written."""
    return directory / f"{_ASIDE}{step:08d}"


def begin(directory: Path, step: int) -> None:
    """An empty folder to write to."""
    folder = aside(directory, step)
    with _told(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)


def write_part(directory: Path, step: int, kind: str, rank: int, entries: Mapping[str, Tensor]) -> Part:
    """One file, on the disk."""
    file = aside(directory, step) / f"{kind}-{rank}.safetensors"
    with _told(file):
        try:
            save_file(dict(entries), file)
        except (KeyError, ValueError) as error:  # a type or layout that the format lacks
            raise RefusedFile(f"{file}: {error}") from None
        _sync(file)
        return Part(file.name, file.stat().st_size, _hash(file), list(entries))


def publish(directory: Path, step: int, facts: Mapping[str, Any], parts: Sequence[Part]) -> Path:
    """All parts are written: make a checkpoint of them."""
    folder = folder_of(directory, step)
    with _told(folder):
        _sync(aside(directory, step))
        _away(folder)  # what is there already is no checkpoint
        aside(directory, step).rename(folder)
        _sync(directory)
        record = {"checkpoint": VERSION, **facts, "parts": [part._asdict() for part in parts]}
        draft = folder / f"{MANIFEST}.part"
        draft.write_text(json.dumps(record, indent=1) + "\n")
        _sync(draft)
        draft.rename(folder / MANIFEST)
        _sync(folder)
    return folder


def abandon(directory: Path, step: int) -> None:
    """Remove what was written of a checkpoint that did not come about."""
    shutil.rmtree(aside(directory, step), ignore_errors=True)
    if not (folder_of(directory, step) / MANIFEST).exists():
        shutil.rmtree(folder_of(directory, step), ignore_errors=True)


def prune(directory: Path, step: int, keep: int) -> None:
    """After the checkpoint of a step: remove all before it but the newest `keep`, and what unfinished ones have left.

    Later ones are of a run before this, which could not resume from them. What
    cannot be removed stays.
    """
    before = [folder for folder in folders(directory) if _step(folder) <= step and (folder / MANIFEST).exists()]
    for folder in before[keep:]:
        with contextlib.suppress(OSError):
            _away(folder)
    tidy(directory)


def tidy(directory: Path) -> None:
    """Remove what unfinished checkpoints have left."""
    for pattern in (_ASIDE, _OLD):
        for rest in directory.glob(f"{pattern}*"):
            shutil.rmtree(rest, ignore_errors=True)


def _away(folder: Path) -> None:
    """Remove a folder, at once as far as its name goes: half a checkpoint never bears the name of a whole one."""
    if folder.exists():
        old = folder.with_name(f"{_OLD}{folder.name}")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        shutil.rmtree(old, ignore_errors=True)


def folders(directory: Path) -> list[Path]:
    """What may be checkpoints, the newest first; or the folder itself if it is one."""
    with _told(directory):
        if (directory / MANIFEST).exists():
            return [directory]
        named = (one for one in directory.glob("step-*") if re.fullmatch("step-[0-9]+", one.name))
        return sorted((one for one in named if one.is_dir()), key=_step, reverse=True)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def manifest(folder: Path) -> Manifest:
    """RefusedFile where the folder is no checkpoint that this version reads. Its parts are not looked at."""
    file = folder / MANIFEST
    try:
        facts = {"optimizer": None, "options": {}, "changed": [], **json.loads(file.read_bytes())}
        if facts.pop("checkpoint") != VERSION:
            raise RefusedFile(f"{file}: of another version")
        parts = [Part(**part) for part in facts.pop("parts")]
        numbers = [facts["step"], facts["seed"], *(part.bytes for part in parts)]
        sound = all(type(one) is int and one >= 0 for one in numbers) and max(numbers[:2]) < 2**31
        sound &= all(isinstance(name, str) for part in parts for name in part.entries)
        sound &= isinstance(facts["options"], dict) and all(isinstance(one, str) for one in list(facts["changed"]))
        sound &= facts["data"].keys() >= {"text", "microbatches"}
        if not sound or not all(_PART.fullmatch(part.name) for part in parts):
            raise RefusedFile(f"{file}: damaged")
    except FileNotFoundError:
        raise RefusedFile(f"{folder}: incomplete: it has no manifest") from None
    except OSError as error:
        raise RefusedFile(f"{file}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise RefusedFile(f"{file}: damaged") from None
    return Manifest(folder, facts["step"], facts["seed"], facts, parts)


def verify_part(folder: Path, part: Part) -> None:
    """RefusedFile where a file is not what the manifest says."""
    file = folder / part.name
    with _told(file):
        if file.stat().st_size != part.bytes or _hash(file) != part.sha256:
            raise RefusedFile(f"{file}: damaged")


def read(files: Mapping[str, Path], names: Sequence[str]) -> dict[str, Tensor]:
    """Entries, each opened where it is; those that no file has are left out."""
    found: dict[str, Tensor] = {}
    for file in sorted({files[name] for name in names if name in files}):
        with _told(file), safe_open(file, framework="pt") as source:
            found |= {name: source.get_tensor(name).clone() for name in names if files.get(name) == file}
    return found


def _hash(file: Path) -> str:
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
