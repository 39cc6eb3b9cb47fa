"""Checks whether a CUDA graph that replays the operations of a job would compute the same as the job.

Cannot be captured: operations on host memory, operations whose values the host waits for, random draws in a backward.
Can be captured, but would replay wrongly: operations that change from one run to the next, because Python takes another
branch or passes in other numbers, and reads of tensors whose address changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpirun.comm.device import Device

HOST_WAITS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
NUMBERS = (int, float, complex, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format)


class CaptureCheck(TorchDispatchMode):
    """Checks all operations while it is active, even in autograd's threads, which run under the caller's modes."""

    def __init__(self, device: Device, given: Sequence[Tensor] | None) -> None:
        """`device`: where the job computes; `given`: the inputs of a forward; None for a backward."""
        super().__init__()
        self.device = device
        self.why: str | None = None  # why the job cannot be captured; None: no reason found
        self.digest = hashlib.sha256()
        self.made: WeakSet[UntypedStorage] | None = None  # memory that may move between runs; None: not tracked
        if given is not None:
            self.made = WeakSet(x.untyped_storage() for x in given)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # compiled modules stay compiled under this mode

    @property
    def operations(self) -> bytes:
        """A digest of the operations, of their tensors' shapes and types, and of their other arguments."""
        return self.digest.digest()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and record it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        read, made = tree_leaves((args, kwargs)), tree_leaves(result)
        self.digest.update(f"{func} {[self._text(x) for x in read]}\n".encode())
        if self.made is not None:
            self.made.update(x.untyped_storage() for x in made if isinstance(x, Tensor))
        if self.why is None:
            self.why = self._why_not(func, [x for x in (*read, *made) if isinstance(x, Tensor)])
        return result

    def _why_not(self, func: Any, tensors: Sequence[Tensor]) -> str | None:
        if any(tag in func.tags for tag in HOST_WAITS):
            return f"{func} makes the host wait for values"
        # Attention's backward gets its forward's random seed: a number on the host, unless the forward is captured.
        attends = "attention" in func.name()
        if self.made is None and torch.Tag.nondeterministic_seeded in func.tags and not attends:
            return f"{func} draws random numbers in a backward"
        returns, views = func._schema.returns, not func._schema.is_mutable
        if views and any(result.alias_info is not None for result in returns):  # a view: it touches no values
            return None
        if any(x.numel() and not self.device.has(x) for x in tensors if x.dim() or not attends):
            return f"{func} is computed on the host, or from host memory"
        return None

    def _text(self, x: Any) -> str:
        """An argument as text; a tensor neither made by nor given to the job with its address, which must stay."""
        if not isinstance(x, Tensor):
            return str(x) if isinstance(x, NUMBERS) else type(x).__name__
        stays = self.made is not None and x.untyped_storage() not in self.made
        return f"{x.dtype}{tuple(x.size())}{x.stride()}" + (f" at {x.data_ptr()}" if stays else "")
