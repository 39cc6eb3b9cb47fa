"""`Act`, an instruction prepared for execution, and `Position`, the step and accumulation pass being executed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Act = Callable[[], object]  # knows its operands; its return value is ignored


def in_order(first: Act, second: Act) -> Act:
    """An act that runs `first`, then `second`."""

    def act() -> None:
        first()
        second()

    return act


@dataclass
class Position:
    """The step that a rank is executing, and the accumulation pass (one pass through the list) within it."""

    passes: int  # per step
    step: int = 0
    accumulation_pass: int = 0

    @property
    def in_last_pass(self) -> bool:
        """Whether this is the step's last pass, at whose NORM the gradients of all passes are complete."""
        return self.accumulation_pass == self.passes - 1
