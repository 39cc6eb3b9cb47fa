"""Read JSON that may be written by hand."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from schedgen.util.errors import RefusedFile, clip


def parse_json(text: str) -> Any:
    """Like `json.loads`, but a key that an object has twice is a ValueError, too (JSON would take the last value)."""
    return json.loads(text, object_pairs_hook=_distinct)


def read_json(text: str, name: str) -> Any:
    """`parse_json` of the content of the file `name`; its errors become RefusedFile, with the line if it is known."""
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:  # such as a number of thousands of digits, or deep nesting
        where = f"{name}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else name
        raise RefusedFile(f"{where}: not JSON: {getattr(error, 'msg', error)}") from None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"an object has {clip(repr(key))} twice")
    return entries
