"""Files by the names that users give them: what is read is bounded and proved, what is written appears whole."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from schedgen.util.errors import RefusedFile

BLOCK = 2**22  # bytes read at a time
WHOLE = 2**28  # bytes of a file that is read at once


def called(name: str) -> str:
    """A file to read, in messages."""
    return "standard input" if name == "-" else name


@contextlib.contextmanager
def opened(name: str) -> Iterator[BinaryIO]:
    """A file to read; -: standard input."""
    if name == "-":
        yield sys.stdin.buffer
        return
    with Path(name).open("rb") as source:
        yield source


def read_bytes(name: str, most: int = WHOLE) -> bytes:
    """All of a file that is read at once, RefusedFile if it has more bytes than `most`; -: standard input."""
    with opened(name) as source:
        return whole(source, called(name), most)


@contextlib.contextmanager
def output(name: str) -> Iterator[BinaryIO]:
    """Standard output for '-', else a file that appears whole or not at all."""
    if name == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(name)
    if path.exists() and not path.is_file():  # /dev/null, a pipe: nothing to rename over
        with path.open("wb") as out:
            yield out
        return
    path = path.resolve()
    try:
        handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise OSError(error.errno, error.strerror, name) from None
    try:
        with os.fdopen(handle, "wb") as out:
            yield out
        umask = os.umask(0)
        os.umask(umask)
        Path(aside).chmod(path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~umask)
        Path(aside).replace(path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


def whole(source: BinaryIO, name: str, most: int = WHOLE) -> bytes:
    """The bytes of a file that is read at once; RefusedFile if they are more than `most`."""
    data = bytearray()
    while more := source.read(BLOCK):
        data += more
        if len(data) > most:
            raise RefusedFile(f"{name}: it has more than {most >> 20} MiB: too long to be read at once")
    return bytes(data)
