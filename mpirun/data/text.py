"""The training text: the bytes of one file, or by default modules of Python's own standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from schedgen.util.errors import UsageError


def training_text(path: str | None, length: int) -> bytes:
    """The bytes of the file, or of the standard library where `path` is None; UsageError if fewer than `length`."""
    name = path or "the standard library's modules"
    try:
        text = Path(path).read_bytes() if path else standard_library()
    except OSError as error:
        raise UsageError(f"--text {path}: {error.strerror}") from None
    if len(text) < length:
        raise UsageError(f"{name}: {len(text)} bytes are too short a text, the model needs {length}")
    return text


def standard_library() -> bytes:
    """The modules at the top level of the running interpreter's standard library, 5 MB, in sorted order."""
    return b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
