"""Values of options, as argparse reads them: numbers within bounds, and lists and tables of them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T", int, float)


def number(what: str, kind: type[T], lowest: float, highest: float) -> Callable[[str], T]:
    """What argparse reads a number with: from `lowest` on, below `highest`; `what` says which numbers these are."""

    def read(text: str) -> T:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not lowest <= value < highest:
            raise argparse.ArgumentTypeError(f"'{text}' is not {what}")
        return value

    return read


count = number("a whole number of at least 1", int, 1, 2**31)
natural = number("a whole number of at least 0", int, 0, 2**31)
time = number("a time of at least 0", float, 0, 1e18)
amount = number("a positive number", float, math.ulp(0.0), 1e18)


def amounts(text: str) -> list[float]:
    return [amount(part) for part in text.split(",")]


def topology(text: str) -> list[int]:
    return [count(part) for part in text.split("x")]


def stages(text: str) -> str | list[int]:
    return text if text == "all" else tie(text)


def tie(text: str) -> list[int]:
    return [natural(part) for part in text.split(",")]


def counts(text: str) -> tuple[int, ...]:
    return tuple(count(part) for part in text.split(","))
