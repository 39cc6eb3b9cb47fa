"""The training text: one file, or by default Python's own standard library."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.comm.fail_together import on_rank_0
from schedgen.util.errors import UsageError


def load(comm: MPI.Comm, path: str | None, length: int) -> Tensor:
    """The text's bytes on every rank, uint8, shape (bytes,). Rank 0 reads; at least `length` bytes or an error."""
    data = on_rank_0(comm, lambda: _read(path, length))
    size = comm.bcast(None if data is None else len(data))
    text = np.empty(size, np.uint8) if data is None else np.frombuffer(data, np.uint8).copy()
    for start in range(0, size, 2**30):  # counts that every MPI takes
        comm.Bcast([text[start : start + 2**30], MPI.BYTE])
    return torch.from_numpy(text)


def _read(path: str | None, length: int) -> bytes:
    name = path or "the standard library's sources"
    try:
        data = Path(path).read_bytes() if path else standard_library()
    except OSError as error:
        raise UsageError(f"--text {path}: {error.strerror}") from None
    if len(data) < length:
        raise UsageError(f"{name}: {len(data)} bytes are too short a text, the model needs {length}")
    return data


def standard_library() -> bytes:
    """The .py sources of the running interpreter's standard library, in sorted order."""
    files: list[Path] = []
    for folder, inside, names in os.walk(sysconfig.get_paths()["stdlib"]):
        inside[:] = [name for name in inside if name != "site-packages"]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return b"".join(path.read_bytes() for path in sorted(files))
