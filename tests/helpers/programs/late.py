"""A device whose work is done late, as a GPU's is, on CPU memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from mpirun.comm.device import Device


class Late(Device):
    """Work given to it is done, in order, only when somebody has asked often enough for a mark to be reached."""

    kind: ClassVar[str] = "late"

    def __init__(self, direct: bool, seed: int = 0) -> None:
        super().__init__()
        self.direct = direct
        self.rng = np.random.default_rng(seed)
        self.stream: deque[Callable[[], None]] = deque()
        self.turns = 0  # until the next piece of work is done

    def launch(self, kernel: Callable[[], None]) -> None:
        self.stream.append(kernel)

    def mark(self) -> Place:
        place = Place(self)
        self.launch(place.come)
        return place

    def turn(self) -> None:
        self.turns -= 1
        if self.turns < 0 and self.stream:
            self.stream.popleft()()
            self.turns = int(self.rng.integers(0, 6))


class Place:
    """A mark in the stream."""

    def __init__(self, device: Late) -> None:
        self.device, self.here = device, False

    def come(self) -> None:
        self.here = True

    def reached(self) -> bool:
        if not self.here:
            self.device.turn()
        return self.here
