"""`stable_order`: what sorts an array of keys, equal ones in the order in which they stand.

NumPy's stable sort makes use of what is in order already, which much of a schedule is: it beat a radix sort of our own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def stable_order(keys: NDArray[Any]) -> NDArray[np.int64]:
    """The places of the keys, shape (n,), in ascending order."""
    few = keys.dtype.kind in "iu" and len(keys) > 0 and keys.min() >= 0 and keys.max() < 2**16
    return np.argsort(keys.astype(np.uint16) if few else keys, kind="stable")  # NumPy sorts 16 bits by radix
