"""What the terminal on standard output can show."""

from __future__ import annotations

import os
import sys


def has_colours() -> bool:
    """Whether standard output is a terminal with colours, and NO_COLOR is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") not in (None, "dumb")
