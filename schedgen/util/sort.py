"""`stable_order`: what sorts an array, in time that grows with its length alone where that is large.

NumPy sorts by comparisons, n log n of them, each at a random place of memory. Many keys are sorted by radix instead:
digit by digit, the lowest first, each digit in one walk.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedgen.util.jit import kernel

Numbers = NDArray[np.int64]

MANY = 2**18  # keys: fewer fit into a cache, where comparing is as fast
DIGIT = 11  # bits: so many places to write to at once fit into the nearest cache


def stable_order(keys: NDArray[Any]) -> Numbers:
    """The places of the keys in ascending order, equal ones in the order in which they stand; shape as `keys`, (n,)."""
    sortable = keys.dtype.kind in "iuf" and keys.dtype.itemsize <= 8 and keys.dtype != np.uint64
    if not sortable or not len(keys) or keys.min() < 0:
        return np.argsort(keys, kind="stable")
    if keys.dtype.kind != "f" and keys.max() < 2**16:  # NumPy sorts these by radix
        return np.argsort(keys.astype(np.uint16), kind="stable")
    if len(keys) < MANY:
        return np.argsort(keys, kind="stable")
    # The bits of a float that is not negative ascend as it does; -0.0 + 0.0 is 0.0.
    bits = (keys.astype(np.float64) + 0.0).view(np.int64) if keys.dtype.kind == "f" else keys.astype(np.int64)
    used = int(np.bitwise_or.reduce(bits))
    order = np.arange(len(bits))
    other_bits, other_order = np.empty((2, len(bits)), np.int64)
    sort = _sort_by_digit.sized(len(bits))
    for shift in range(0, used.bit_length(), DIGIT):
        if used >> shift & (2**DIGIT - 1):
            sort(bits, order, shift, np.zeros(2**DIGIT + 1, np.int64), other_bits, other_order)
            bits, order, other_bits, other_order = other_bits, other_order, bits, order
    return order


@kernel
def _sort_by_digit(
    keys: Numbers, order: Numbers, shift: int, begin: Numbers, sorted_keys: Numbers, sorted_order: Numbers
) -> None:
    """Fill the last two with the first two, sorted by the digit of `keys` at bit `shift`; `begin`: zeros."""
    mask = len(begin) - 2
    for key in keys:
        begin[((key >> shift) & mask) + 1] += 1
    for digit in range(mask):
        begin[digit + 1] += begin[digit]
    for i in range(len(keys)):
        digit = (keys[i] >> shift) & mask
        place = begin[digit]
        begin[digit] = place + 1
        sorted_keys[place], sorted_order[place] = keys[i], order[i]
