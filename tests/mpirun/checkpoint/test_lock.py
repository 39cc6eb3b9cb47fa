"""The lock on a folder of checkpoints, without ranks."""

from __future__ import annotations

from mpirun.checkpoint.lock import FolderLock


def test_a_folder_that_was_moved_is_unlocked_too(tmp_path):
    """The file cannot be removed: it has another path by now."""
    (tmp_path / "before").mkdir()
    lock = FolderLock(tmp_path / "before", "a")
    (tmp_path / "before").rename(tmp_path / "after")
    lock.release()
    FolderLock(tmp_path / "after", "b").release()
