"""`type=` functions for argparse, which read numbers within limits, or lists of them, from an option's text.

Each raises argparse.ArgumentTypeError, which argparse prints as the command's error.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T", int, float)


def number(what: str, kind: type[T], lowest: float, limit: float) -> Callable[[str], T]:
    """A type for numbers from `lowest` to below `limit`; the error says that a text "is not `what`"."""

    def parse(text: str) -> T:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not lowest <= value < limit:
            too_much = f" and below {limit}" if value is not None and value >= limit else ""
            raise argparse.ArgumentTypeError(f"'{text}' is not {what}{too_much}")
        return value

    return parse


def listed(parse: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """A type for tuples of what `parse` reads."""
    return lambda text: tuple(parse(part) for part in text.split(","))


count = number("a whole number of at least 1", int, 1, 2**31)
natural = number("a whole number of at least 0", int, 0, 2**31)
time = number("a time of at least 0", float, 0, 1e18)
amount = number("a positive number", float, math.ulp(0.0), 1e18)
bandwidth = number("a bandwidth of at least 1e-18 bytes a second", float, 1e-18, 1e18)
counts = listed(count)  # 3,3,2


def redone(text: str) -> str | list[int | tuple[int, int]]:
    """Forwards to redo: stages, or stages and microbatches, as in 0,3.1, or one of the words all and except-last."""
    if text in ("all", "except-last"):
        return text
    named: list[int | tuple[int, int]] = []
    for part in text.split(","):
        stage, dot, mb = part.partition(".")
        named.append((natural(stage), natural(mb)) if dot else natural(stage))
    return named
