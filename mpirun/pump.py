"""The pump: MPI moves large messages only while somebody is inside MPI.

Between instructions the interpreter calls MPI anyway. Inside a long
computation nobody does, so there the ends of its layers, forwards and
backwards, call it, at most once a millisecond. Nearly all of a transfer then
hides behind the computation, which does not become slower. A thread that wakes
up every millisecond hides as much, but where every core has a rank it takes
some percent of the computation's time; MPI's own progress threads take a core.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

PERIOD = 1e-3  # seconds between two calls
LONG = 2e-3  # seconds: what computes longer than this has calls inside


class Pump:
    def __init__(self, poll: Callable[[], None]) -> None:
        """`poll`: what calls MPI."""
        self.poll = poll
        self.last = 0.0

    def tick(self) -> None:
        now = time.perf_counter()
        if now - self.last > PERIOD:
            self.poll()
            self.last = now

    def put_into(self, module: nn.Module) -> None:
        """From now on the forwards and backwards of a module's layers tick."""
        for layer in _layers(module):
            layer.register_forward_hook(self._after_forward)

    def _after_forward(self, layer: nn.Module, given: Any, output: Any) -> None:
        self.tick()
        if isinstance(output, Tensor) and output.grad_fn is not None:
            output.grad_fn.register_prehook(self._before_backward)

    def _before_backward(self, gradients: Any) -> None:
        self.tick()


def _layers(module: nn.Module) -> list[nn.Module]:
    """The parts of a module that have no parts; what torch.compile made is one."""
    children = list(module.children())
    if not children or hasattr(module, "_orig_mod"):
        return [module]
    return [layer for child in children for layer in _layers(child)]
