"""Which rows of two lists correspond, for a diff: patience matching [Bram Cohen], in O(n log n).

1. Rows that occur exactly once in each list are paired.
2. Of these pairs the longest sequence that ascends in both lists is kept; it cuts the lists into gaps.
3. In every gap the k-th of equal rows in one list is paired with the k-th in the other, and step 2 follows again.

Nearly all rows of a schedule occur only once, and no other matching pairs more of these.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from schedgen.util.arrays import Numbers
from schedgen.util.sort import places_in_runs


def patience_match(a: Numbers, b: Numbers) -> Numbers:
    """For each row of `a` its partner, a row of `b`, or -1; partners ascend. Rows are given as numbers."""
    partner, taken = np.full(len(a), -1), np.zeros(len(b), np.bool_)
    span = max(a.max(initial=0), b.max(initial=0)) + 1
    for count_equal in (False, True):
        rest = [np.flatnonzero(free) for free in (partner < 0, ~taken)]
        gaps = [np.cumsum(matched)[left] for matched, left in zip((partner >= 0, taken), rest, strict=True)]
        keys = [gap * span + rows[left] for gap, rows, left in zip(gaps, (a, b), rest, strict=True)]
        if count_equal:
            _, both = np.unique(np.concatenate(keys), return_inverse=True)
            keys = [_numbered(part) for part in np.split(both, [len(keys[0])])]
        (keys_a, index_a), (keys_b, index_b) = (_single(key) for key in keys)
        _, i, j = np.intersect1d(keys_a, keys_b, assume_unique=True, return_indices=True)
        order = np.argsort(index_a[i])
        rows_a, rows_b = rest[0][index_a[i][order]], rest[1][index_b[j][order]]
        kept = _longest_ascending(rows_b.tolist())
        partner[rows_a[kept]] = rows_b[kept]
        taken[rows_b[kept]] = True
    return partner


def _single(key: Numbers) -> tuple[Numbers, Numbers]:
    """The keys that occur once, and their places."""
    values, first, times = np.unique(key, return_index=True, return_counts=True)
    return values[times == 1], first[times == 1]


def _numbered(key: Numbers) -> Numbers:
    """One number for (key, how many equal keys come before it)."""
    order = np.argsort(key, kind="stable")
    ascending, numbered = key[order], np.empty_like(key)
    numbered[order] = ascending * 2**31 + places_in_runs(ascending)
    return numbered


def _longest_ascending(numbers: list[int]) -> list[int]:
    """The places of a longest ascending sequence, by patience sorting: each number goes on the first pile it can."""
    tops: list[int] = []  # the number on top of each pile; they ascend
    place_of_top: list[int] = []
    before: list[int] = []  # by number, the place of the top of the pile on its left when it was laid
    for place, number in enumerate(numbers):
        pile = bisect_left(tops, number)
        before.append(place_of_top[pile - 1] if pile else -1)
        tops[pile : pile + 1] = [number]
        place_of_top[pile : pile + 1] = [place]
    kept = []
    place = place_of_top[-1] if place_of_top else -1
    while place >= 0:
        kept.append(place)
        place = before[place]
    return kept[::-1]
