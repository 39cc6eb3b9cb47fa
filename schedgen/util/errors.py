"""The errors and notes a user may see, each one sentence, and how foreign text is quoted in them."""

from __future__ import annotations

import sys
from collections.abc import Collection


class UsageError(Exception):
    """Wrong arguments, or a scheme or a model that does not fit. Exit code 2."""

    code = 2


class NeedsOption(UsageError):
    """A scheme that needs an option of `schedgen compile`, which the message names."""


class RefusedFile(Exception):
    """A file that may not be used: a schedule, a profile, a trace, a checkpoint. Exit code 1.

    `rule` is the number of the checker's rule that a schedule breaks (see `schedgen.checker`), None for other reasons.
    """

    code = 1

    def __init__(self, message: str, rule: int | None = None) -> None:
        """`message` is one sentence that begins with the file and, where there is one, the line."""
        super().__init__(message)
        self.rule = rule


class MpirunWarning(UserWarning):
    """What a user of mpirun should know about a model, though nothing is wrong."""


class SlowScheme(UserWarning):
    """A scheme's w or n fails on arrays, so it is called for every job."""


def note(sentence: object) -> None:
    """Print on stderr what a user of schedgen should know, though nothing is wrong."""
    print(f"schedgen: note: {sentence}", file=sys.stderr)


def number_of(count: int, one: str) -> str:
    """A count with its word for one of them, as in "1 stage" or "2 microbatches"."""
    return f"{count} {one}{'' if count == 1 else 'es' if one.endswith('ch') else 's'}"


def clip(text: str) -> str:
    """Text from a file or a user for a message: without blanks around it, printable, at most 80 characters."""
    text = text.strip()
    short = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:81])
    return short if len(short) <= 80 else short[:77] + "..."


def listed(names: Collection[str]) -> str:
    """The first four names, clipped, and how many more there are, as text."""
    shown, more = list(names)[:4], len(names) - 4
    return ", ".join(map(clip, shown)) + (f" and {more} more" if more > 0 else "")


def one_line(error: object) -> str:
    """`str(error)` on one line, with control characters escaped so that a terminal does not obey them."""
    text = " ".join(str(error).split())
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def raised(error: BaseException) -> str:
    """An exception as "Type: message", on one line."""
    return f"{type(error).__name__}: {one_line(error)}"
