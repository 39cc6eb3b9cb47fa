"""The errors and notes a user may see, each one sentence, and how foreign text is quoted in them."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterable
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_NOT_THE_USERS = (
    *(f"{_ROOT / package}{os.sep}" for package in ("schedgen", "mpirun")),
    *{sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")},
    "<",
)


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
    """An exception as "Type: message" and its notes, on one line."""
    return f"{type(error).__name__}: {'; '.join(map(one_line, (error, *getattr(error, '__notes__', ()))))}"


def raised_at(error: BaseException) -> str:
    """Where an error was raised, with the source: the innermost line of the user's own code in the traceback.

    If there is none, the line of it that called the code in the traceback, and the innermost line of this code.
    """
    raised = traceback.extract_tb(error.__traceback__)
    return at(of_user(raised) or [*of_user(traceback.extract_stack()), *raised[-1:]])


def of_user(frames: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The innermost frame of the user's own code, as a list; empty: there is none."""
    return [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)][-1:]


def at(frames: Iterable[traceback.FrameSummary]) -> str:
    """Files, lines and their source, for the end of a sentence."""
    places = [
        f"{frame.filename}:{frame.lineno}" + (f": `{clip(frame.line)}`" if frame.line else "") for frame in frames
    ]
    return f" (at {', in '.join(places)})" if places else ""
