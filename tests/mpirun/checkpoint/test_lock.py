"""The lock on a folder of checkpoints, without ranks."""

from __future__ import annotations

import os

from mpirun.checkpoint.writer import lock_folder


def test_a_folder_that_was_moved_is_unlocked_too(tmp_path):
    (tmp_path / "before").mkdir()
    lock = lock_folder(tmp_path / "before")
    (tmp_path / "before").rename(tmp_path / "after")
    os.close(lock)
    os.close(lock_folder(tmp_path / "after"))
