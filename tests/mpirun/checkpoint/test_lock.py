"""The lock on a folder of checkpoints, without ranks."""

from __future__ import annotations

import errno

import pytest

from mpirun.checkpoint.lock import FolderLock
from schedgen.util.errors import UsageError


def test_a_folder_that_was_moved_is_unlocked_too(tmp_path):
    """The file cannot be removed: it has another path by now."""
    (tmp_path / "before").mkdir()
    lock = FolderLock(tmp_path / "before", "a")
    (tmp_path / "before").rename(tmp_path / "after")
    lock.release()
    FolderLock(tmp_path / "after", "b").release()


def test_a_lock_of_another_run_in_a_folder_that_was_emptied_stays(tmp_path):
    lock = FolderLock(tmp_path, "a")
    (tmp_path / ".lock").unlink()
    other = FolderLock(tmp_path, "b")
    assert not lock.is_in(tmp_path) and other.is_in(tmp_path)
    lock.release()
    with pytest.raises(UsageError, match="run b on "):
        FolderLock(tmp_path, "c")
    other.release()


def test_a_full_disk_has_a_lock_too(tmp_path, monkeypatch):
    """It has no room for the name of the run that holds it."""

    def write(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("os.write", write)
        lock = FolderLock(tmp_path, "a")
    with pytest.raises(UsageError):
        FolderLock(tmp_path, "b")
    lock.release()
