"""What lowering is told besides the order of the jobs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Options(NamedTuple):
    """Arrays are (S, B). The numbers stand in the file's header."""

    whole: NDArray[np.bool_]  # microbatches whose split backward is one instruction after all
    paired: NDArray[np.bool_]  # forwards whose output leaves behind the worker's next job
    recompute: NDArray[np.bool_]  # forwards that keep nothing and are redone before their backward
    weight_slots: int  # foreign weight copies a worker may hold at a time
    fan_out: int  # copies of one stage that one holder sends out at a time
    prefetch: int  # jobs by which receives stand before the place where they are sent
