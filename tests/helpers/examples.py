"""How much the tests try: chosen cases and a quarter of the random ones in `make test`, all in `make test-all`."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")

ASKED = int(os.environ.get("SCHEDGEN_EXAMPLES", "0"))


def further(*cases: T) -> tuple[T, ...]:
    """The cases if SCHEDGEN_EXAMPLES is set, else none: others of the same kind are tested always."""
    return cases if ASKED else ()


def examples(full: int, as_asked: bool = False) -> int:
    """`full` if SCHEDGEN_EXAMPLES is set, or its value if that is more and `as_asked`; else a quarter of `full`."""
    if not ASKED:
        return max(10, full // 4)
    return max(full, ASKED) if as_asked else full
