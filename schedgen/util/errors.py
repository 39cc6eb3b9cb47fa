"""The errors a user may see: one sentence each, and the exit code that goes with it."""

from __future__ import annotations


class UsageError(Exception):
    """Wrong arguments, a scheme or a model that does not fit. Exit code 2."""

    code = 2


class RefusedFile(Exception):
    """A schedule file that may not be used. Exit code 1."""

    code = 1


class SlowScheme(UserWarning):
    """A scheme's function could be called once and is called for every job."""


def clip(text: str) -> str:
    """Something a file or a user said, short and printable."""
    text = text.strip()
    short = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:81])
    return short if len(short) <= 80 else short[:77] + "..."


def one_line(error: object) -> str:
    """What an error says, on one line and without anything a terminal would obey."""
    text = " ".join(str(error).split())
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def raised(error: BaseException) -> str:
    """The name of an error, and what it says."""
    return f"{type(error).__name__}: {one_line(error)}"
