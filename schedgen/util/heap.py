"""Priority queues as kernels: binary heaps in slices of an array, and a tournament tree of minima.

A heap's items are integers. If `time` is empty, they are ordered as integers; otherwise by time and, where times are
equal, as integers. An item below len(by_rank) is the rank of job by_rank[item]; any other is its own index into `time`.
"""

from __future__ import annotations

from schedgen.util.arrays import Numbers, Times
from schedgen.util.jit import kernel


@kernel
def time_of(item: int, time: Times, by_rank: Numbers) -> float:
    """The time of an item of a heap that is ordered by time."""
    return float(time[by_rank[item]] if item < len(by_rank) else time[item])


@kernel
def before(a: int, b: int, time: Times, by_rank: Numbers) -> bool:
    """Whether item a comes before item b."""
    if len(time):
        time_a, time_b = time_of(a, time, by_rank), time_of(b, time, by_rank)
        if time_a != time_b:
            return time_a < time_b
    return a < b


@kernel
def push(heap: Numbers, size: int, item: int, time: Times, by_rank: Numbers) -> None:
    """Add an item to a heap of `size` items."""
    index = size
    heap[index] = item
    while index and before(heap[index], heap[(index - 1) // 2], time, by_rank):
        parent = (index - 1) // 2
        heap[index], heap[parent] = heap[parent], heap[index]
        index = parent


@kernel
def pop(heap: Numbers, size: int, time: Times, by_rank: Numbers) -> None:
    """Remove the first item, heap[0], from a heap of `size` items."""
    heap[0] = heap[size - 1]
    index, length = 0, size - 1
    while 2 * index + 1 < length:
        child = 2 * index + 1
        if child + 1 < length and before(heap[child + 1], heap[child], time, by_rank):
            child += 1
        if not before(heap[child], heap[index], time, by_rank):
            break
        heap[index], heap[child] = heap[child], heap[index]
        index = child


@kernel
def set_leaf(tree: Times, node: int, key: float) -> None:
    """Set a leaf of a tournament tree: node k is the minimum of nodes 2 k and 2 k + 1, and node 1 the least of all."""
    tree[node] = key
    while node > 1:
        node //= 2
        least = min(tree[2 * node], tree[2 * node + 1])
        if tree[node] == least:
            return
        tree[node] = least


@kernel
def least_leaf(tree: Times, leaves: int) -> int:
    """The index of the first leaf with the least key in a tournament tree whose leaves are the nodes from `leaves`."""
    node = 1
    while node < leaves:
        node = 2 * node if tree[2 * node] <= tree[2 * node + 1] else 2 * node + 1
    return node - leaves
