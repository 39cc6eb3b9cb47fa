"""The file in which ranks show what they do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from mpirun.watchdog.rank_side import _mapped, _shared_file
from schedgen.util.errors import RefusedFile


def full(*folders: Path):
    """A posix_fallocate that finds no room in some folders."""
    fallocate = os.posix_fallocate

    def allocate(number: int, start: int, size: int) -> None:
        if Path(f"/proc/self/fd/{number}").resolve().parent in folders:
            raise OSError(errno.ENOSPC, "No space left on device")
        fallocate(number, start, size)

    return allocate


def test_a_full_dev_shm_is_found_before_it_is_a_bus_error(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", full(Path("/dev/shm")))
    with _shared_file(2) as file:
        assert Path(file.name).parent == tmp_path
    monkeypatch.setattr(os, "posix_fallocate", full(Path("/dev/shm"), tmp_path))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(RefusedFile, match="the watchdog"):
        _shared_file(2)
    assert sorted(tmp_path.iterdir()) == before


def test_a_rank_that_does_not_see_the_file_says_so(tmp_path):
    with pytest.raises(RefusedFile, match="ranks of one host should have one /dev/shm"):
        _mapped(str(tmp_path / "elsewhere"))
