"""What all instructions share: an act is an instruction prepared for execution, a position says which step it is in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Act = Callable[[], object]  # knows its operands; what it returns is not used


def in_order(first: Act, second: Act) -> Act:
    """Both acts, one after the other."""

    def act() -> None:
        first()
        second()

    return act


@dataclass
class Position:
    """Which step of the run, and which of its accumulation passes through the list, a rank executes."""

    passes: int  # of every step
    step: int = 0
    accumulation_pass: int = 0

    @property
    def in_last_pass(self) -> bool:
        """Whether the gradients of all passes are there at NORM."""
        return self.accumulation_pass == self.passes - 1
