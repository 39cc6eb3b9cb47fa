"""Hashes of values: ranks that should have the same compare them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def digest_of(leaves: Iterable[Any]) -> str:
    """A hash of values: of the bytes of tensors, and of the repr of anything else."""
    found = hashlib.sha256()
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            found.update(raw_bytes(leaf).data)
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()


def raw_bytes(x: Tensor) -> np.ndarray:
    """The bytes of a tensor's elements in their order, in host memory; no copy if they lie there in that order."""
    dense = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()  # of one element: any strides
