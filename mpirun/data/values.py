"""What is done with pytrees and tensors of any meaning: hashes, names of leaves, copies, moves to a device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from ctypes import c_ubyte
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
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
    return np.frombuffer(memory_of(x.detach().cpu().resolve_conj().resolve_neg().contiguous()), np.uint8)


def memory_of(x: Tensor) -> Any:
    """The bytes of a contiguous tensor in place, as an object with a buffer, which keeps the tensor alive.

    After `Tensor.numpy()` no forward could resize the tensor.
    """
    memory: Any = (c_ubyte * x.nbytes).from_address(x.data_ptr())
    memory.tensor = x
    return memory


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree, by the keys and indices that lead to each, such as `[0]['mask']`."""
    return {pytree.keystr(path): leaf for path, leaf in pytree.tree_leaves_with_path(tree)}


def named_leaves(tree: Any) -> tuple[list[Any], tuple[str, ...]]:
    """The leaves of a pytree and their names, as in `by_path`; those of a dict in sorted order of its keys."""
    found = by_path(in_key_order(tree))
    return list(found.values()), tuple(found)


def in_key_order(tree: Any) -> Any:
    """A pytree with the entries of its dicts in sorted order of their keys."""
    return pytree.tree_map_only(
        dict, lambda x: {key: in_key_order(x[key]) for key in sorted(x)}, tree, is_leaf=lambda x: isinstance(x, dict)
    )


def copy_of(values: Any) -> Any:
    """A pytree with copies of its tensors."""
    return pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), values)


def to_device(values: Any, device: torch.device) -> Any:
    """A pytree with its tensors on a device; for the CPU it is returned as it is."""
    if device.type == "cpu":
        return values

    def copied(x: Tensor) -> Tensor:
        # The host does not wait for a copy of pinned memory.
        host = x.pin_memory() if x.device.type == "cpu" else x
        return host.to(device, non_blocking=True)

    return pytree.tree_map_only(Tensor, copied, values)
