"""Flat memory of bytes as numbers: where the numbers of each type lie in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Section(NamedTuple):
    """Bytes `begin` to `end` are numbers of one type."""

    begin: int
    end: int
    dtype: torch.dtype


def numbers(flat: Tensor, sections: Sequence[Section], first: int = 0) -> list[Tensor]:
    """The numbers in a tensor of bytes, one tensor per type; `first`: where `flat` begins in the sections' memory."""
    spans = [(max(begin - first, 0), min(end - first, len(flat)), dtype) for begin, end, dtype in sections]
    return [flat[begin:end].view(dtype) for begin, end, dtype in spans if begin < end]


def add(totals: Sequence[Tensor], summands: Sequence[Tensor]) -> None:
    """Add numbers to others with the same sections."""
    for total, summand in zip(totals, summands, strict=True):
        total += summand
