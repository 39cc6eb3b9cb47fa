"""Which rows of two lists are the same, for a diff: patience matching [Bram Cohen], in time n log n.

Rows that occur once in both lists are paired; the longest run of pairs that keeps both orders stays and cuts the
lists into gaps; what is equal beside a pair joins it; then the same in every gap, all gaps at once. Where nothing in
any gap is single, equal rows are counted, and the k-th of one list pairs with the k-th of the other. A schedule's rows
are nearly all single, and of those no matching has more.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schedgen.util.jit import kernel

Numbers = NDArray[np.int64]


def match(a: Numbers, b: Numbers) -> Numbers:
    """For each row of `a` the row of `b` it is the same as, ascending, or -1; equal numbers are equal rows."""
    partner, taken = np.full(len(a), -1), np.zeros(len(b), np.bool_)
    grow, climb = _grow.sized(len(a) + len(b)), _climb.sized(len(a) + len(b))
    span = max(a.max(initial=0), b.max(initial=0)) + 1
    grow(a, b, partner, taken)
    count = False
    while True:
        rest = [np.flatnonzero(free) for free in (partner < 0, ~taken)]
        gaps = [np.cumsum(paired)[left] for paired, left in zip((partner >= 0, taken), rest, strict=True)]
        keys = [gap * span + rows[left] for gap, rows, left in zip(gaps, (a, b), rest, strict=True)]
        if count:
            _, both = np.unique(np.concatenate(keys), return_inverse=True)
            keys = [_numbered(part) for part in np.split(both, [len(keys[0])])]
        (mine, at), (theirs, to) = (_single(key) for key in keys)
        _, i, j = np.intersect1d(mine, theirs, assume_unique=True, return_indices=True)
        order = np.argsort(at[i])
        old, new = rest[0][at[i][order]], rest[1][to[j][order]]
        if len(old):
            kept = climb(new)
            partner[old[kept]] = new[kept]
            taken[new[kept]] = True
            grow(a, b, partner, taken)
        elif count:
            return partner
        count = not len(old)


def _single(key: Numbers) -> tuple[Numbers, Numbers]:
    """The keys that occur once, and where."""
    values, first, times = np.unique(key, return_index=True, return_counts=True)
    return values[times == 1], first[times == 1]


def _numbered(key: Numbers) -> Numbers:
    """Keys told apart: (key, how many of it came before) as one number."""
    order = np.argsort(key, kind="stable")
    begins = np.flatnonzero(np.append(True, key[order][1:] != key[order][:-1]))
    nth = np.arange(len(key)) - np.repeat(begins, np.diff(np.append(begins, len(key)))) if len(key) else key
    numbered = np.empty_like(key)
    numbered[order] = key[order] * 2**31 + nth
    return numbered


@kernel
def _grow(a: Numbers, b: Numbers, partner: Numbers, taken: NDArray[np.bool_]) -> None:
    """Pair what is equal behind a pair, and then what is equal before one; the ends of the lists count as pairs."""
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
def _climb(numbers: Numbers) -> NDArray[np.bool_]:
    """Which of the numbers make the longest ascending sequence (patience sorting)."""
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
