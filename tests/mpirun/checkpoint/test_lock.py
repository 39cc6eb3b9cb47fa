"""The lock on a folder of checkpoints, without ranks."""

from __future__ import annotations

from mpirun.checkpoint.writer import FolderLock


def test_a_folder_that_was_moved_is_unlocked_too(tmp_path):
    (tmp_path / "before").mkdir()
    lock = FolderLock(tmp_path / "before")
    (tmp_path / "before").rename(tmp_path / "after")
    lock.release()
    FolderLock(tmp_path / "after").release()
