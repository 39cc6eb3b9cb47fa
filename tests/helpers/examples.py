"""How many random cases a test draws: a quarter of them in `make test`, all in `make test-check`."""

from __future__ import annotations

import os

ASKED = int(os.environ.get("SCHEDGEN_EXAMPLES", "0"))


def examples(full: int, as_asked: bool = False) -> int:
    """`full` if SCHEDGEN_EXAMPLES is set, or its value if that is more and `as_asked`; else a quarter of `full`."""
    if not ASKED:
        return max(10, full // 4)
    return max(full, ASKED) if as_asked else full
