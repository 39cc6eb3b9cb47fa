"""Open files by the names that users give, where - is standard input or output.

Input that is read whole is limited in size; JSON may be written by hand. A regular file that is written appears
complete or not at all.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from schedgen.util.errors import RefusedFile, UsageError, clip

BLOCK = 2**20  # bytes read at a time
READ_LIMIT = 2**28  # bytes of a file that is read at once

AnyPath = str | os.PathLike[str]


def prepare_streams() -> None:
    """Make a command's standard streams take any text."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file name may hold anything


def display_name(name: AnyPath) -> str:
    """What messages call the input file `name`."""
    return "standard input" if name == "-" else os.fspath(name)


def open_input(name: AnyPath) -> contextlib.AbstractContextManager[BinaryIO]:
    """The file `name`, opened for reading; OSError if it cannot be."""
    return contextlib.nullcontext(sys.stdin.buffer) if name == "-" else Path(name).open("rb")


def read_text(name: AnyPath, limit: int = READ_LIMIT) -> str:
    """The file `name` as UTF-8, with undecodable bytes replaced by U+FFFD and a byte-order mark left out.

    RefusedFile if it has more than `limit` bytes, OSError if it cannot be opened.
    """
    data = bytearray()
    with open_input(name) as source:
        while block := source.read(BLOCK):
            data += block
            if len(data) > limit:
                too_long = f"it has more than {limit >> 20} MiB: too long to be read at once"
                raise RefusedFile(f"{display_name(name)}: {too_long}")
    return data.decode("utf-8-sig", errors="replace")


@contextlib.contextmanager
def open_output(name: str) -> Iterator[BinaryIO]:
    """The file `name`, opened for writing; an older regular file is replaced only once everything is written.

    OSError names the file, also if it is raised inside, as on a full disk, or if nothing may be written to the file.
    """
    streams = {"-": sys.stdout, "/dev/stdout": sys.stdout, "/dev/stderr": sys.stderr}
    if (stream := streams.get(name)) is not None:
        yield stream.buffer
        stream.buffer.flush()
        return
    path, temporary = Path(os.path.realpath(name)), None
    try:
        if path.exists():
            os.close(os.open(path, os.O_WRONLY))  # a rename would replace it even if it is write-protected
        if path.exists() and not path.is_file():  # /dev/null or a pipe cannot be replaced by renaming
            with path.open("wb") as out:
                yield out
            return
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".schedgen-")
        with os.fdopen(handle, "wb") as out:
            yield out
        Path(temporary).chmod(path.stat().st_mode & 0o777 if path.exists() else new_file_mode())
        Path(temporary).replace(path)
    except BaseException as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = name
        raise


def check_writable(option: str, path: str | None) -> None:
    """UsageError if a file cannot be written there; "-" is standard output, None no file."""
    if path is None or is_standard_output(path):
        return
    file = Path(os.path.realpath(path))
    folder = file.parent  # a file is written beside the old one, and renamed
    if not folder.is_dir() or file.is_dir():
        raise UsageError(f"{option} {path}: {'Is a directory' if file.is_dir() else 'No such file or directory'}")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise UsageError(f"{option} {path}: Permission denied")


def new_file_mode() -> int:
    """The permissions of a new file: what the umask allows."""
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def is_standard_output(name: str | None) -> bool:
    """Whether the file `name` is standard output."""
    return name in ("-", "/dev/stdout")


def parse_json(text: str) -> Any:
    """Like `json.loads`, but a key that an object has twice is a ValueError, too (JSON would take the last value)."""
    return json.loads(text, object_pairs_hook=_distinct)


def read_json(text: str, name: str) -> Any:
    """`parse_json` of the content of the file `name`; its errors become RefusedFile, with the line if it is known."""
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:  # such as a number of thousands of digits, or deep nesting
        where = f"{name}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else name
        raise RefusedFile(f"{where}: not JSON: {getattr(error, 'msg', error)}") from None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"an object has {clip(repr(key))} twice")
    return entries
