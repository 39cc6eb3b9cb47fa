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
        """`direct`: messages go without host memory; `seed`: of when work is done."""
        super().__init__()
        self.direct = direct
        self.rng = np.random.default_rng(seed)
        self.stream: deque[Callable[[], None]] = deque()
        self.turns = 0  # until the next piece of work is done

    def launch(self, kernel: Callable[[], None]) -> None:
        """Put a piece of work behind the others."""
        self.stream.append(kernel)

    def mark(self) -> LateMark:
        """A mark behind all work given so far."""
        mark = LateMark(self)
        self.launch(mark.reach)
        return mark

    def turn(self) -> None:
        """Somebody asks: perhaps a piece of work is done."""
        self.turns -= 1
        if self.turns < 0 and self.stream:
            self.stream.popleft()()
            self.turns = int(self.rng.integers(0, 6))


class LateMark:
    """A mark in the stream of work."""

    def __init__(self, device: Late) -> None:
        """Not reached yet."""
        self.device, self.is_reached = device, False

    def reach(self) -> None:
        """All work before it is done."""
        self.is_reached = True

    def reached(self) -> bool:
        """Whether it is reached, which becomes so by asking."""
        if not self.is_reached:
            self.device.turn()
        return self.is_reached
