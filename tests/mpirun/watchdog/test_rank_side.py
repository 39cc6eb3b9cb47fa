"""The file in which ranks show what they do."""

from __future__ import annotations

import errno
import os

import pytest

from mpirun.watchdog.rank_side import _mapped, _shared_file
from schedgen.util.errors import RefusedFile


def test_a_full_dev_shm_is_found_before_it_is_a_bus_error(monkeypatch):
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RefusedFile, match=r"the watchdog \(timeout\): .*: No space left on device"):
        _shared_file(2)


def test_a_rank_that_does_not_see_the_file_says_so(tmp_path):
    with pytest.raises(RefusedFile, match="ranks of one host should have one /dev/shm"):
        _mapped(str(tmp_path / "elsewhere"))
