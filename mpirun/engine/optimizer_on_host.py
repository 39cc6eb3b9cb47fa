"""OFFLOAD, FREE and RELOAD of an optimizer's state, which lives in the memory of the host.

Between RELOAD and FREE the optimizer's `state` has copies on the device. What a STEP adds to it, as the first one adds
everything, goes to the host with the rest. A number, such as the count of steps, stays where the optimizer puts it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mpirun.comm.device import Device
from mpirun.engine.core.offload import Copies


class StateOnHost(Copies):
    """The state of the optimizers of a unit."""

    def __init__(self, device: Device, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__(device)
        self.optimizers = optimizers
        self.places: dict[tuple[Tensor, str], Tensor] = {}  # by parameter and name: the host's copy

    def _tensors(self) -> Iterator[tuple[dict[str, Any], tuple[Tensor, str], Tensor]]:
        """All tensors but numbers: the dictionary that has it, its parameter and name there, and itself."""
        for optimizer in self.optimizers:
            for parameter, kept in optimizer.state.items():
                for name, x in list(kept.items()):
                    if isinstance(x, Tensor) and x.dim():
                        yield kept, (parameter, name), x

    def reload(self) -> None:
        """Start copying it to new memory of the device."""
        copies = []
        for kept, (_, name), x in self._tensors():
            kept[name] = torch.empty_like(x, device=self.device.torch)
            copies.append((kept[name], x))
        with self.launched(out=False):
            for on_device, x in copies:
                on_device.copy_(x, non_blocking=True)

    def offload(self) -> None:
        """Start copying it to the host."""
        self.wait()
        with self.launched(out=True):
            for _, key, x in self._tensors():
                if key not in self.places:
                    self.places[key] = self.device.host(x.nbytes)[: x.nbytes].view(x.dtype).view(x.shape)
                self.places[key].copy_(x, non_blocking=True)

    def free(self) -> None:
        """End the copies on the device, for kernels launched from now on."""
        self.wait()
        for kept, key, _ in self._tensors():
            kept[key[1]] = self.places[key]
