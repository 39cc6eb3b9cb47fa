"""What all instructions share: an act is an instruction prepared for execution, a position says which step it is in."""

from __future__ import annotations

from collections.abc import Callable

Act = Callable[[], None]  # knows its operands


def in_order(first: Act, second: Act) -> Act:
    """Both acts, one after the other."""

    def act() -> None:
        first()
        second()

    return act


class Position:
    """Which step of the run, and which of its accumulation passes through the list, a rank executes."""

    def __init__(self, passes: int) -> None:
        """`passes`: accumulation passes of a step."""
        self.passes = passes
        self.step = self.accumulation_pass = 0

    @property
    def in_first_pass(self) -> bool:
        """Whether a step has just begun."""
        return self.accumulation_pass == 0

    @property
    def in_last_pass(self) -> bool:
        """Whether the gradients of all passes are there at NORM."""
        return self.accumulation_pass == self.passes - 1
