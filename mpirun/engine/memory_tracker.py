"""Live bytes of tensors and their peak, counted at every torch op.

The CPU allocator keeps no such numbers, so a dispatch mode looks at what every op returns. It sees backwards too,
because autograd runs under the modes of the thread that called it. On CUDA the allocator's own numbers are used.
`track_memory` chooses between the two.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryTracker(TorchDispatchMode):
    """Counts every storage once, at its current size, from the op that returns it until it is freed.

    - A storage first seen as an input existed before and does not count.
    - Memory that an op allocates and frees within itself is not seen.
    - Tensors without strides or without data (sparse, meta, fake) are not seen.
    - `live` is exact at any time; `peak` is updated after every op, while its inputs and outputs are alive together.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: weakref.WeakSet[UntypedStorage] = weakref.WeakSet()
        self._peak = 0

    @property
    def live(self) -> int:
        """Bytes alive now."""
        return sum(storage.nbytes() for storage in self._storages)

    @property
    def peak(self) -> int:
        """The most bytes alive at once since the beginning or the last `reset_peak`."""
        self._peak = max(self._peak, self.live)
        return self._peak

    def reset_peak(self) -> None:
        """Reset the peak to the bytes alive now."""
        self._peak = self.live

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute an op and count the storages that it returns and was not given."""
        kwargs = kwargs or {}
        before = {storage._cdata for storage in _storages((args, kwargs))}
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(...): made just now, outside of any op
            before.clear()
        result = func(*args, **kwargs)
        self._storages.update(storage for storage in _storages(result) if storage._cdata not in before)
        self._peak = max(self._peak, self.live)
        return result


class CudaMemoryCount:
    """The allocator's own count on one CUDA device, including rounding and, in `peak`, workspaces inside ops.

    cuBLAS caches its workspaces. They belong to no job: `live` frees them first. Autograd's thread frees the last
    gradients that it has read only after its caller continues: `live` runs a backward of no bytes to wait for that.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._base = device, 0
        self._leaf = torch.zeros((), device=device, requires_grad=True)
        self._root, self._gradient = self._leaf.view_as(self._leaf), torch.ones((), device=device)
        self._base = self.live
        self.reset_peak()

    @property
    def live(self) -> int:
        """As `MemoryTracker.live`."""
        torch.autograd.grad(self._root, self._leaf, self._gradient, retain_graph=True)
        torch._C._cuda_clearCublasWorkspaces()
        return torch.cuda.memory_allocated(self.device) - self._base

    @property
    def peak(self) -> int:
        """As `MemoryTracker.peak`."""
        return torch.cuda.max_memory_allocated(self.device) - self._base

    def reset_peak(self) -> None:
        """As `MemoryTracker.reset_peak`."""
        torch.cuda.reset_peak_memory_stats(self.device)


MemoryCount = MemoryTracker | CudaMemoryCount  # bytes of tensors allocated since the count began


@contextlib.contextmanager
def track_memory(device: torch.device) -> Iterator[MemoryCount]:
    """Count the bytes of tensors on a device while the block runs."""
    if device.type == "cuda":
        yield CudaMemoryCount(device)
    else:
        with MemoryTracker() as tracker:
            yield tracker


def _storages(values: Any) -> Iterable[UntypedStorage]:
    for x in tree_leaves(values):
        if isinstance(x, Tensor) and x.layout == torch.strided:
            storage = x.untyped_storage()
            if storage.device.type != "meta":  # FakeTensors name another device, but their storages do not
                yield storage
