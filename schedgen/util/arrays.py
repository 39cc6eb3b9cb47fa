"""Types of arrays, for annotations; and `stable_order`, which sorts keys and leaves equal ones in their order.

NumPy's stable sort exploits runs that are in order already, as much of a schedule is: it beat a radix sort of our own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Numbers = NDArray[np.int64]
Small = NDArray[np.int8]
Floats = NDArray[np.float64]
Times = Floats
Flags = NDArray[np.bool_]
AnyInts = NDArray[np.integer[Any]]


def stable_order(keys: NDArray[Any]) -> Numbers:
    """The indices, shape (n,), that sort the keys in ascending order."""
    few = keys.dtype.kind in "iu" and len(keys) > 0 and keys.min() >= 0 and keys.max() < 2**16
    return np.argsort(keys.astype(np.uint16) if few else keys, kind="stable")  # NumPy sorts 16 bits by radix


def places_in_runs(keys: NDArray[Any]) -> Numbers:
    """The place, from 0, of each of these sorted keys among those equal to it."""
    begins = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
    return np.arange(len(keys)) - np.repeat(begins, np.diff(np.append(begins, len(keys))))
