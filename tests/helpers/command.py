"""`schedgen ARGUMENTS` in this process."""

from __future__ import annotations

import contextlib
import io
from typing import NamedTuple

import schedgen.cli.main


class Result(NamedTuple):
    """How a command ended."""

    code: object
    out: str
    err: str


def run(*arguments: object) -> Result:
    """Run a command with the streams that a terminal would give it."""
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True)
    code: object
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = schedgen.cli.main.main([str(argument) for argument in arguments])
        except SystemExit as exit:
            code = exit.code
    return Result(code, out.buffer.getvalue().decode(), err.buffer.getvalue().decode())


def refused(result: Result, code: int) -> str:
    """Assert that a command ended with `code`, nothing on stdout and one line on stderr; return that line."""
    assert (result.code, result.out) == (code, ""), result
    assert result.err.endswith("\n") and result.err[:-1].isprintable(), repr(result.err)
    return result.err[:-1]
