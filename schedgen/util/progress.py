"""Progress bars on stderr for commands that take longer than two seconds.

Before `allow` is called no bar is shown, and reporting costs nothing. A bar disappears when its work is done.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 2.0  # seconds that a command may take without a bar

_earliest: float | None = None  # when bars may appear (time.monotonic); None: never


def allow(quiet: bool) -> None:
    """Let bars appear PATIENCE seconds from now, if stderr is a terminal and `quiet` is not set."""
    global _earliest
    _earliest = None if quiet or not sys.stderr.isatty() else time.monotonic() + PATIENCE


def over(items: Iterable[T], label: str, total: int) -> Iterable[T]:
    """Iterate over the `total` items, with one step of a bar for each."""
    if _earliest is None:
        return items
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # no thread
    delay = max(0.0, _earliest - time.monotonic())
    bar: Iterable[T] = tqdm(items, desc=label, total=total, unit="step", delay=delay, miniters=1, leave=False)
    return bar
