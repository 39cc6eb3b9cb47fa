"""Transport and Sum on 3 ranks: one line on rank 0 for each claim that holds."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.transport import Sum, Transport

WORLD = MPI.COMM_WORLD
GROUPS = [(0, 1, 2), (1, 2)]  # overlapping
LENGTHS = [1, 7, 1000]  # shorter than the group, not a multiple of it, many
# The keys of each member's rows: one a member, several and unsorted, and a member without any.
KEYS = {
    0: [[[0], [1], [2]], [[4, 1], [0, 5], [3, 2]], [[2], [], [0, 1]]],
    1: [[[1], [2]], [[3, 0], [2, 1]], [[], [1, 0]]],
}


def row(key: int, length: int, dtype: torch.dtype) -> Tensor:
    """Numbers of very different sizes, so that another order of adding gives other bits."""
    generator = torch.Generator().manual_seed(1000 * key + length)
    scale = 10.0 ** torch.randint(-3, 4, (length,), generator=generator)
    return (torch.randn(length, generator=generator) * scale).to(dtype)


def in_key_order(keys: list[list[int]], length: int, dtype: torch.dtype) -> Tensor:
    first, *others = sorted(key for one in keys for key in one)
    total = row(first, length, dtype)
    for key in others:
        total = total + row(key, length, dtype)
    return total


def start(transport: Transport, group: int, keys: list[list[int]], length: int, dtype: torch.dtype) -> Sum:
    mine = [row(key, length, dtype) for key in keys[transport.group(group).rank]]
    return Sum(transport.group(group), mine, keys, like=torch.empty(length, dtype=dtype))


def data(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def sums(dtype: torch.dtype) -> None:
    """All at once on both groups; then each is finished."""
    transport = Transport(WORLD, GROUPS)
    cases = [
        (group, keys, length)
        for length in LENGTHS
        for group, members in enumerate(GROUPS)
        for keys in KEYS[group]
        if WORLD.rank in members
    ]
    begun = [start(transport, group, keys, length, dtype) for group, keys, length in cases]
    for (group, keys, length), one in zip(cases, begun, strict=True):
        total = one.finish()
        expected = in_key_order(keys, length, dtype)
        assert total.dtype == dtype and data(total) == data(expected), (WORLD.rank, group, keys, length)
        assert len(set(transport.group(group).allgather(data(total)))) == 1


def messages() -> None:
    """Each to the next rank, all on one tag, in order: as large as one that MPI does not buffer."""
    transport = Transport(WORLD, GROUPS)
    after, before = (WORLD.rank + 1) % 3, (WORLD.rank - 1) % 3

    def tensors(rank: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(rank)
        return [
            torch.empty(0),
            torch.randn(33, generator=generator).to(torch.bfloat16),
            torch.randn(5_000_000 // 4, generator=generator),
            torch.randn((), generator=generator),
            torch.randint(0, 256, (3, 5), generator=generator),
            torch.rand(9, generator=generator) < 0.5,
        ]

    mine, expected = tensors(WORLD.rank), tensors(before)
    got = [torch.empty_like(tensor) for tensor in expected]
    requests = [transport.receive(tensor, before, 1) for tensor in got]
    requests += [transport.send(tensor, after, 1) for tensor in mine]
    MPI.Request.Waitall(requests)
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours, theirs), (WORLD.rank, theirs.dtype, theirs.shape)


def kinds() -> None:
    """Messages of two kinds may be received in another order than they were sent in."""
    transport = Transport(WORLD, GROUPS)
    after, before = (WORLD.rank + 1) % 3, (WORLD.rank - 1) % 3
    out = [torch.full((4,), 10.0 * WORLD.rank + kind) for kind in (1, 2)]
    into = [torch.empty(4) for _ in out]
    requests = [transport.receive(into[kind - 1], before, kind) for kind in (2, 1)]
    requests += [transport.send(out[kind - 1], after, kind) for kind in (1, 2)]
    MPI.Request.Waitall(requests)
    assert [float(tensor[0]) for tensor in into] == [10.0 * before + 1, 10.0 * before + 2]


def groups() -> None:
    """A group's ranks are its members in order; who is outside has none."""
    transport = Transport(WORLD, GROUPS)
    for index, members in enumerate(GROUPS):
        assert (transport.groups[index] is not None) == (WORLD.rank in members)
        if WORLD.rank in members:
            assert transport.group(index).allgather(WORLD.rank) == list(members)


CLAIMS: dict[str, Callable[[], None]] = {
    "sums of float32": lambda: sums(torch.float32),
    "sums of bfloat16": lambda: sums(torch.bfloat16),
    "messages": messages,
    "kinds": kinds,
    "groups": groups,
}

if __name__ == "__main__":
    order = in_key_order([[0, 1, 2]], 1000, torch.float32)
    other = in_key_order([[0]], 1000, torch.float32) + in_key_order([[1, 2]], 1000, torch.float32)
    assert data(order) != data(other), "numbers whose order does not matter would prove nothing"
    for name, claim in CLAIMS.items():
        claim()
        WORLD.Barrier()
        if WORLD.rank == 0:
            print(f"holds: {name}", flush=True)
    sys.exit()
