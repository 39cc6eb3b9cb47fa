"""The lock on a folder of checkpoints, without ranks."""

from __future__ import annotations

import errno

import pytest

from mpirun.checkpoint.writer import FolderLock
from schedgen.util.errors import UsageError


def test_a_folder_that_was_moved_is_unlocked_too(tmp_path):
    (tmp_path / "before").mkdir()
    lock = FolderLock(tmp_path / "before")
    (tmp_path / "before").rename(tmp_path / "after")
    lock.release()
    FolderLock(tmp_path / "after").release()


def test_a_full_disk_has_a_lock_too(tmp_path, monkeypatch):
    """It has no room for the name of the run that holds it."""

    def write(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("os.write", write)
        lock = FolderLock(tmp_path)
    with pytest.raises(UsageError):
        FolderLock(tmp_path)
    lock.release()
    FolderLock(tmp_path).release()
