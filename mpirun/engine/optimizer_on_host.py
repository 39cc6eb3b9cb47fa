"""OFFLOAD, FREE and RELOAD of an optimizer's state, which lives in the memory of the host.

Between RELOAD and FREE the optimizer's `state` has copies on the device. What a STEP adds to it, as the first one adds
everything, goes to the host with the rest. A number, such as the count of steps, stays where the optimizer puts it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mpirun.comm.device import Device, Mark
from mpirun.engine.recipe import SteppedOptimizer


class StateOnHost:
    """The state of the optimizers of a unit."""

    def __init__(self, device: Device, made: SteppedOptimizer) -> None:
        self.device, self.made = device, made
        self.places: dict[tuple[Tensor, str], Tensor] = {}  # by parameter and name: the host's copy
        self.copied: Mark | None = None  # after the copies of the last OFFLOAD or RELOAD

    def _tensors(self) -> Iterator[tuple[dict[str, Any], tuple[Tensor, str], Tensor]]:
        """All tensors but numbers: the dictionary that has it, its parameter and name there, and itself."""
        for optimizer in self.made.optimizers:
            for parameter, kept in optimizer.state.items():
                for name, x in list(kept.items()):
                    if isinstance(x, Tensor) and x.dim():
                        yield kept, (parameter, name), x

    def reload(self) -> None:
        """Start copying it to new memory of the device."""
        mark = self.device.mark()
        with self.device.copies(out=False):
            if mark is not None:
                mark.arrive()
            for kept, (_, name), x in self._tensors():
                kept[name] = torch.empty_like(x, device=self.device.torch)
                kept[name].copy_(x, non_blocking=True)
            self.copied = self.device.mark()

    def offload(self) -> None:
        """Start copying it to the host."""
        self.wait()
        mark = self.device.mark()
        with self.device.copies(out=True):
            if mark is not None:
                mark.arrive()
            for _, key, x in self._tensors():
                if key not in self.places:
                    self.places[key] = self.device.host(x.nbytes)[: x.nbytes].view(x.dtype).view(x.shape)
                self.places[key].copy_(x, non_blocking=True)
            self.copied = self.device.mark()

    def free(self) -> None:
        """End the copies on the device, for kernels launched from now on."""
        self.wait()
        for kept, key, _ in self._tensors():
            kept[key[1]] = self.places[key]

    def wait(self) -> None:
        """Let kernels launched from now on wait for the copies."""
        if self.copied is not None:
            self.copied.arrive()
