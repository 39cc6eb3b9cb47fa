"""Which rows of two lists correspond, for a diff: patience matching [Bram Cohen], in O(n log n).

1. Rows that occur exactly once in each list are matched.
2. Of these pairs the longest sequence that ascends in both lists is kept; it cuts the lists into gaps.
3. Equal rows next to a pair are matched, too.
4. The same is done in every gap, all gaps at once. If no gap has a row that occurs once, the k-th of equal rows in one
   list is matched with the k-th in the other.

Nearly all rows of a schedule occur only once, and no other matching pairs more of these.
"""

from __future__ import annotations

import numpy as np

from schedgen.util.arrays import Flags, Numbers
from schedgen.util.jit import kernel
from schedgen.util.sort import places_in_runs


def patience_match(a: Numbers, b: Numbers) -> Numbers:
    """For each row of `a` its partner, a row of `b`, or -1; partners ascend. Rows are given as numbers."""
    partner, taken = np.full(len(a), -1), np.zeros(len(b), np.bool_)
    grow, ascending = _grow.sized(len(a) + len(b)), _longest_ascending.sized(len(a) + len(b))
    span = max(a.max(initial=0), b.max(initial=0)) + 1
    grow(a, b, partner, taken)
    count = False  # whether equal rows are told apart by counting them
    while True:
        rest = [np.flatnonzero(free) for free in (partner < 0, ~taken)]
        gaps = [np.cumsum(matched)[left] for matched, left in zip((partner >= 0, taken), rest, strict=True)]
        keys = [gap * span + rows[left] for gap, rows, left in zip(gaps, (a, b), rest, strict=True)]
        if count:
            _, both = np.unique(np.concatenate(keys), return_inverse=True)
            keys = [_numbered(part) for part in np.split(both, [len(keys[0])])]
        (keys_a, index_a), (keys_b, index_b) = (_single(key) for key in keys)
        _, i, j = np.intersect1d(keys_a, keys_b, assume_unique=True, return_indices=True)
        order = np.argsort(index_a[i])
        rows_a, rows_b = rest[0][index_a[i][order]], rest[1][index_b[j][order]]
        if len(rows_a):
            kept = ascending(rows_b)
            partner[rows_a[kept]] = rows_b[kept]
            taken[rows_b[kept]] = True
            grow(a, b, partner, taken)
        elif count:
            return partner
        count = not len(rows_a)


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


@kernel
def _grow(a: Numbers, b: Numbers, partner: Numbers, taken: Flags) -> None:
    """Pair equal rows directly after a pair, then those directly before one; the ends of the lists count as pairs."""
    i, j = 0, 0
    while i < len(a):
        if partner[i] < 0 and j < len(b) and not taken[j] and a[i] == b[j]:
            partner[i] = j
            taken[j] = True
        j = partner[i] + 1 if partner[i] >= 0 else len(b)
        i += 1
    i, j = len(a) - 1, len(b) - 1
    while i >= 0:
        if partner[i] < 0 and j >= 0 and not taken[j] and a[i] == b[j]:
            partner[i] = j
            taken[j] = True
        j = partner[i] - 1 if partner[i] >= 0 else -1
        i -= 1


@kernel
def _longest_ascending(numbers: Numbers) -> Flags:
    """Which of the numbers make up a longest ascending sequence, by patience sorting."""
    tops, before = np.empty(len(numbers), np.int64), np.full(len(numbers), -1)
    piles = 0
    for i in range(len(numbers)):
        low, high = 0, piles
        while low < high:
            middle = (low + high) // 2
            if numbers[tops[middle]] < numbers[i]:
                low = middle + 1
            else:
                high = middle
        if low:
            before[i] = tops[low - 1]
        tops[low] = i
        piles = max(piles, low + 1)
    kept = np.zeros(len(numbers), np.bool_)
    i = tops[piles - 1] if piles else -1
    while i >= 0:
        kept[i] = True
        i = before[i]
    return kept
