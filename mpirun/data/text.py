"""The training text: the bytes of one file, or by default the sources of Python's own standard library."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from schedgen.util.errors import UsageError


def training_text(path: str | None, length: int) -> bytes:
    """The bytes of the file, or of the standard library where `path` is None; UsageError if fewer than `length`."""
    name = path or "the standard library's sources"
    try:
        text = Path(path).read_bytes() if path else standard_library()
    except OSError as error:
        raise UsageError(f"--text {path}: {error.strerror}") from None
    if len(text) < length:
        raise UsageError(f"{name}: {len(text)} bytes are too short a text, the model needs {length}")
    return text


def standard_library() -> bytes:
    """The .py sources of the running interpreter's standard library, in sorted order."""
    files: list[Path] = []
    for folder, subfolders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        subfolders[:] = [name for name in subfolders if name != "site-packages"]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return b"".join(path.read_bytes() for path in sorted(files))
