"""Bars on stderr for commands that take longer than two seconds; none unless `allow` was called, and then at no cost.

Work is reported where it comes in pieces: chunks of a file, passes, rules. A bar goes when its work is done.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE = 2.0  # seconds that a command may take without a bar

_after: float | None = None  # when bars may be shown (time.monotonic); None: never


def allow(quiet: bool) -> None:
    """From now on bars may be shown, if stderr is a terminal and `quiet` is not set."""
    global _after
    _after = None if quiet or not sys.stderr.isatty() else time.monotonic() + PATIENCE


@contextmanager
def counted(words: str, total: int | None, unit: str) -> Iterator[Callable[[int], object]]:
    """Within it, what to call with how much more is done, of `total` (None: not known)."""
    if _after is None:
        yield _nothing
        return
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # no thread
    delay = max(0.0, _after - time.monotonic())
    with tqdm(
        desc=words, total=total, unit=unit, unit_scale=unit != "step", delay=delay, miniters=1, leave=False
    ) as bar:
        yield bar.update


class Steps:
    """step(f, ...) is f(...), and a step done."""

    def __init__(self, done: Callable[[int], object]) -> None:
        self.done = done

    def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        result = function(*args, **kwargs)
        self.done(1)
        return result


@contextmanager
def steps(words: str, total: int) -> Iterator[Steps]:
    """Within it, what to call so many functions by."""
    with counted(words, total, "step") as done:
        yield Steps(done)


def over(items: Iterable[T], words: str, total: int) -> Iterable[T]:
    """The items, of which there are `total`; each is a step."""
    return items if _after is None else _each(items, words, total)


def _each(items: Iterable[T], words: str, total: int) -> Iterator[T]:
    with counted(words, total, "step") as done:
        for item in items:
            yield item
            done(1)


def _nothing(_: int) -> None:
    pass
