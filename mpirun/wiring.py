"""Where a stage's arguments come from."""

from __future__ import annotations

from typing import NamedTuple


class Input(NamedTuple):
    """Leaf `index` of the microbatch's input, flattened as a pytree."""

    index: int  # type: ignore[assignment]  # in place of tuple.index


class Value(NamedTuple):
    """Output `index` of an earlier stage."""

    stage: int
    index: int  # type: ignore[assignment]


Source = Input | Value
