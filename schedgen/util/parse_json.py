"""JSON that people write."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from schedgen.util.errors import clip


def parse_json(text: str) -> Any:
    """As `json.loads`; ValueError also where an object has an entry twice, of which JSON would take the last."""
    return json.loads(text, object_pairs_hook=_distinct)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"an object has {clip(repr(key))} twice")
    return entries
