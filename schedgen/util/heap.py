"""Kernels for taking the first of many: binary heaps in slices of an array, and a tree of minima."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schedgen.util.jit import kernel

Times = NDArray[np.float64]
Numbers = NDArray[np.int64]


@kernel
def when(item: int, time: Times, by_rank: Numbers) -> float:
    """When an item of a heap may start: a job, by its rank, or room made by a job."""
    return float(time[by_rank[item]] if item < len(by_rank) else time[item])


@kernel
def before(a: int, b: int, time: Times, by_rank: Numbers) -> bool:
    """Heap order of two items: by time where `time` is not empty, then by number."""
    if len(time):
        x, y = when(a, time, by_rank), when(b, time, by_rank)
        if x != y:
            return x < y
    return a < b


@kernel
def push(heap: Numbers, size: int, item: int, time: Times, by_rank: Numbers) -> None:
    """Add to a binary heap of `size` items."""
    at = size
    heap[at] = item
    while at and before(heap[at], heap[(at - 1) // 2], time, by_rank):
        up = (at - 1) // 2
        heap[at], heap[up] = heap[up], heap[at]
        at = up


@kernel
def pop(heap: Numbers, size: int, time: Times, by_rank: Numbers) -> None:
    """Take the first of `size` items away."""
    heap[0] = heap[size - 1]
    at, length = 0, size - 1
    while 2 * at + 1 < length:
        down = 2 * at + 1
        if down + 1 < length and before(heap[down + 1], heap[down], time, by_rank):
            down += 1
        if not before(heap[down], heap[at], time, by_rank):
            break
        heap[at], heap[down] = heap[down], heap[at]
        at = down


@kernel
def settle(tree: Times, place: int, key: float) -> None:
    """Change one leaf of a tree of minima."""
    tree[place] = key
    while place > 1:
        place //= 2
        tree[place] = min(tree[2 * place], tree[2 * place + 1])
