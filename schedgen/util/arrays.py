"""Types of arrays, for annotations."""

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
