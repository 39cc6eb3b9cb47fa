"""The format of checkpoints on disk, without ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mpirun.checkpoint import disk_format
from schedgen.util.errors import RefusedFile

SETTINGS: dict[str, Any] = {"optimizer": "adamw", "options": {"seed": 0, "microbatches": 1}}


def write(directory: Path, step: int) -> Path:
    """A checkpoint of one parameter."""
    disk_format.begin(directory, step)
    part = disk_format.write_file(directory, step, "weights", 0, {"a": torch.full((2,), float(step))})
    return disk_format.publish(directory, step, SETTINGS, [part])


def test_what_is_written_is_read(tmp_path):
    found = disk_format.read_manifest(write(tmp_path, 7))
    for part in found.files:
        disk_format.verify_file(found.folder, part)
    assert (found.step, found.seed) == (7, 0)
    assert disk_format.read_entries(found.entry_files("weights"), ["a", "b"])["a"].tolist() == [7, 7]
    assert len({file.stat().st_mode for file in found.folder.iterdir()}) == 1  # the manifest's: as the umask allows


def test_the_newest_is_that_of_the_highest_step(tmp_path):
    """Names grow longer after 99,999,999 steps; copies that users have made are left alone, and files too."""
    steps = [99_999_999, 100_000_000, 3]
    for step in steps:
        write(tmp_path, step)
    write(tmp_path, 4).rename(tmp_path / "step-00000004-best")
    (tmp_path / "step-00000005").write_bytes(b"")
    names = [folder.name for folder in disk_format.step_folders(tmp_path)]
    assert names == [f"step-{step:08d}" for step in sorted(steps, reverse=True)]
    disk_format.prune(tmp_path, 100_000_000, keep=1)
    assert {one.name for one in tmp_path.iterdir()} == {"step-100000000", "step-00000004-best", "step-00000005"}


def test_folders_of_other_names_are_never_removed(tmp_path):
    """Such as a user's own, or the draft of an export."""
    own = [".writing-00000001", ".replaced-step-00000002"]
    others = [".exporting-00000001", ".writing-model", ".writing-1", ".replaced-notes", "notes"]
    for name in [*own, *others]:
        (tmp_path / name).mkdir()
    write(tmp_path, 2)
    disk_format.prune(tmp_path, 2, keep=1)
    assert {one.name for one in tmp_path.iterdir()} == {*others, "step-00000002"}


FILE = {"name": "weights-0.safetensors", "bytes": 1, "sha256": "", "entries": ["a"]}


@pytest.mark.parametrize(
    "changed",
    [
        {"checkpoint": 3},
        {"step": -1},
        {"options": {"seed": None}},
        {"optimizer": None},
        {"files": [{"name": "weights-0.safetensors"}]},
        {"files": [{**FILE, "name": "../step-00000002/weights-0.safetensors"}]},
        {"files": [{**FILE, "name": "weights-0.safetensors\0"}]},
        {"files": [{**FILE, "bytes": "1"}]},
        {"files": [{**FILE, "entries": [["a"]]}]},
    ],
)
def test_a_manifest_that_says_something_else_is_refused(tmp_path, changed: dict[str, Any]):
    file = write(tmp_path, 1) / disk_format.MANIFEST
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    with pytest.raises(
        RefusedFile, match=r"manifest\.json: (damaged|its format version is not 5, which this mpirun reads)$"
    ):
        disk_format.read_manifest(file.parent)


def test_what_the_format_has_no_type_for_is_refused(tmp_path):
    disk_format.begin(tmp_path, 1)
    with pytest.raises(RefusedFile, match=r"weights-0\.safetensors: .*complex128"):
        disk_format.write_file(tmp_path, 1, "weights", 0, {"a": torch.ones(1, dtype=torch.complex128)})
