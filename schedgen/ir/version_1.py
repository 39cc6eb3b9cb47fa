"""Files of format version 1, from before its keys were renamed: they are read, but no longer written."""

from __future__ import annotations

import re

_KEYS = {"apart": "per_consumer", "parts": "substages", "whole": "replicated"}
_KEY = re.compile(r'(?<!\\)"(apart|parts|whole)"(?=\s*:)')  # a quote within a string has a backslash before it
_VERSION = re.compile(r'(?<!\\)("schedgen"\s*:\s*)1\b')


def from_version_1(text: str) -> str:
    """The JSON text of a schedule's header, a graph or a profile with today's keys and version."""
    return _VERSION.sub(r"\g<1>2", _KEY.sub(lambda key: f'"{_KEYS[key[1]]}"', text))
