"""The training text: one file, or by default Python's own standard library."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from schedgen.util.errors import UsageError


def read_text(path: str | None, length: int) -> bytes:
    """The bytes of the file, or of the standard library where `path` is None; UsageError if fewer than `length`."""
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
