"""Transport, QueuedTransport and OrderedAllreduce on 3 ranks: one line on rank 0 for each claim that holds."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import cache

import torch
from late_device import Late
from mpi4py import MPI
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mpirun.comm.device import Device
from mpirun.comm.gpu_transport import make_transport
from mpirun.comm.ordered_allreduce import AllreduceQueue, OrderedAllreduce, Section
from mpirun.comm.transport import Transport
from mpirun.comm.waiting import Done
from mpirun.data.values import to_device

WORLD = MPI.COMM_WORLD
GROUPS = [(0, 1, 2), (1, 2)]  # overlapping
LENGTHS = [1, 7, 1000]  # shorter than the group, not a multiple of it, many
# The keys of each member's rows: one per member, several and unsorted, and a member without any.
KEYS = {
    0: [[[0], [1], [2]], [[4, 1], [0, 5], [3, 2]], [[2], [], [0, 1]]],
    1: [[[1], [2]], [[3, 0], [2, 1]], [[], [1, 0]]],
}


@cache
def row(key: int, length: int, dtype: torch.dtype) -> Tensor:
    """Numbers of very different sizes, so that another order of adding gives other bits; in the host's memory."""
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(1000 * key + length)
        scale = 10.0 ** torch.randint(-3, 4, (length,), generator=generator)
        return (torch.randn(length, generator=generator) * scale).to(dtype)


def prepared(
    transport: Transport, group: int, rows: Tensor, keys: list[list[int]], total: Tensor | None
) -> OrderedAllreduce:
    """An all-reduce of rows given as numbers, not as bytes."""
    data = rows.view(torch.uint8)
    sections = [Section(0, data.shape[1], rows.dtype)]
    into = None if total is None else total.view(torch.uint8)
    return OrderedAllreduce(transport, transport.group(group), data, keys, sections, into)


def in_key_order(keys: list[list[int]], length: int, dtype: torch.dtype) -> Tensor:
    first, *others = sorted(key for member in keys for key in member)
    total = row(first, length, dtype)
    for key in others:
        total = total + row(key, length, dtype)
    return total


def data(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def sums(transport: Transport, dtype: torch.dtype) -> None:
    """All sums of both groups in flight at once, twice, with the same receive buffers."""
    cases = [
        (group, keys, length)
        for length in LENGTHS
        for group, members in enumerate(GROUPS)
        for keys in KEYS[group]
        if WORLD.rank in members
    ]
    made: list[tuple[OrderedAllreduce, Tensor]] = []
    for group, keys, length in cases:
        own_keys = keys[transport.group(group).rank]
        rows = torch.empty((len(own_keys), length), dtype=dtype)
        total = None if own_keys else torch.empty(length, dtype=dtype)  # a member without rows gives memory for the sum
        made.append((prepared(transport, group, rows, keys, total), rows))
    under_way = AllreduceQueue(transport)
    for again in range(2):
        for (group, keys, length), (allreduce, rows) in zip(cases, made, strict=True):
            for place, key in zip(rows, keys[transport.group(group).rank], strict=True):
                place.copy_(to_device(row(key + again, length, dtype), place.device))
            under_way.start(allreduce)
        under_way.finish()
        for (group, keys, length), (allreduce, _) in zip(cases, made, strict=True):
            expected = in_key_order([[key + again for key in member] for member in keys], length, dtype)
            assert data(allreduce.total) == data(expected), (WORLD.rank, again, group, keys, length)
            assert len(set(transport.group(group).allgather(data(allreduce.total)))) == 1


def short_sums(transport: Transport) -> None:
    """16 numbers are summed by the first member, from which the others receive the sum and nothing else."""
    rows = torch.ones((1, 16))
    made = prepared(transport, 0, rows, [[0], [1], [2]], None)
    counts = len(made.receives), len(made.gathers), len(made.scattered), len(made.gather_to)
    assert counts == ((2, 0, 0, 2) if WORLD.rank == 0 else (0, 1, 1, 0))


def in_the_background(transport: Transport) -> None:
    """A sum makes progress while its members wait for something else."""
    keys = [[0], [1], [2]]
    rows = to_device(row(WORLD.rank, 1000, torch.float32)[None].clone(), torch.get_default_device())
    under_way = AllreduceQueue(transport)
    under_way.start(prepared(transport, 0, rows, keys, None))
    transport.wait(lambda: not under_way.active)
    assert data(rows[0]) == data(in_key_order(keys, 1000, torch.float32))
    WORLD.Barrier()


def messages(transport: Transport) -> None:
    """From each rank to the next, on one tag, in order, up to sizes above MPI's eager limit; twice."""
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

    sent, expected = tensors(WORLD.rank), tensors(before)
    got = [torch.empty_like(tensor) for tensor in expected]
    receives = [transport.receive(tensor, before, 1) for tensor in got]
    for _ in range(2):
        for tensor in got:
            tensor.zero_()
        for receive in receives:
            receive.start()
        wait_for_all(transport, [receive.done for receive in receives] + [transport.send(x, after, 1) for x in sent])
        for received, tensor in zip(got, expected, strict=True):
            assert torch.equal(received, tensor), (WORLD.rank, tensor.dtype, tensor.shape)


def wait_for_all(transport: Transport, dones: list[Done]) -> None:
    for done in dones:
        transport.wait(done)


def kinds(transport: Transport) -> None:
    """Messages of two kinds may be received in another order than they were sent in."""
    after, before = (WORLD.rank + 1) % 3, (WORLD.rank - 1) % 3
    out = [torch.full((4,), 10.0 * WORLD.rank + kind) for kind in (1, 2)]
    into = [torch.empty(4) for _ in out]
    receives = [transport.receive(into[kind - 1], before, kind) for kind in (2, 1)]
    for receive in receives:
        receive.start()
    sends = [transport.send(out[kind - 1], after, kind) for kind in (1, 2)]
    wait_for_all(transport, [receive.done for receive in receives] + sends)
    assert [float(tensor[0]) for tensor in into] == [10.0 * before + 1, 10.0 * before + 2]


def under_way(transport: Transport) -> None:
    """A transport knows which large messages are still in flight."""
    transport.watch()
    after, before = (WORLD.rank + 1) % 3, (WORLD.rank - 1) % 3
    place, value = torch.zeros(2**18), torch.full((2**18,), float(WORLD.rank))
    receive = transport.receive(place, before, 1)
    receive.start()
    assert transport.moves()
    WORLD.Barrier()  # nobody sends before
    wait_for_all(transport, [receive.done, transport.send(value, after, 1)])
    transport.wait(lambda: not transport.moves())
    assert float(place[-1]) == before


def weights_again(transport: Transport) -> None:
    """Weights received before a forward may be received again before its backward: autograd sees no change."""
    after, before = (WORLD.rank + 1) % 3, (WORLD.rank - 1) % 3
    weights = torch.zeros(3)
    x, parameter = torch.ones(3, requires_grad=True), torch.nn.Parameter(weights.view(3))
    receive = transport.receive(weights, before, 1)

    def fetch() -> None:
        receive.start()
        wait_for_all(transport, [receive.done, transport.send(torch.full((3,), 5.0), after, 1)])

    fetch()
    output = (x * parameter).sum()
    fetch()
    output.backward()
    assert x.grad is not None and x.grad.tolist() == [5.0] * 3


def groups(transport: Transport) -> None:
    """A group's ranks are its members in order; a rank that is no member has no group."""
    for index, members in enumerate(GROUPS):
        assert (transport.groups[index] is not None) == (WORLD.rank in members)
        if WORLD.rank in members:
            assert transport.group(index).allgather(WORLD.rank) == list(members)


def in_the_stream(transport: Transport) -> None:
    """A message holds what was written before its send, and arrives after the reads that precede its receive."""
    after, before = (WORLD.rank + 1) % 3, (WORLD.rank - 1) % 3
    value, place, seen = torch.zeros(4), torch.zeros(4), []
    receive = transport.receive(place, before, 1)
    for k in range(1, 6):
        value.fill_(100.0 * k + WORLD.rank)
        sent = transport.send(value, after, 1)
        seen.append(place.clone())
        receive.start()
        wait_for_all(transport, [receive.done, sent])
    came = [[100.0 * k + before] * 4 for k in range(6)]
    assert [x.tolist() for x in seen] == [[0.0] * 4, *came[1:5]] and place.tolist() == came[5], (seen, place)


def kept(transport: Transport) -> None:
    """What a request names lives as long as the request, though all others drop it, as a sum does rows of padding."""
    after, before = (WORLD.rank + 1) % 3, (WORLD.rank - 1) % 3
    received: list[StorageWeakRef] = []
    make = transport._persistent

    def persistent(tensor: Tensor, peer: int, tag: int, comm: MPI.Intracomm | None) -> MPI.Prequest:
        received.append(StorageWeakRef(tensor.untyped_storage()))
        return make(tensor, peer, tag, comm)

    transport._persistent = persistent  # type: ignore[method-assign]
    rows, under_way = torch.zeros((1, 192), dtype=torch.uint8), AllreduceQueue(transport)
    rows.view(torch.float32)[0, :8] = 1.0  # the slices of members 1 and 2 are padding
    under_way.start(
        OrderedAllreduce(transport, transport.group(0), rows, [[0], [1], [2]], [Section(0, 32, torch.float32)])
    )
    under_way.finish()
    assert rows.view(torch.float32)[0, :8].tolist() == [3.0] * 8
    receive = transport.receive(torch.empty(2**18), before, 1)
    sent = torch.full((2**18,), float(WORLD.rank))
    sends = StorageWeakRef(sent.untyped_storage())
    done = transport.send(sent, after, 1)
    del sent
    assert not transport.device.direct or not sends.expired()
    receive.start()
    wait_for_all(transport, [receive.done, done])
    assert received and not any(ref.expired() for ref in received)


DEVICES = {
    "at once": Device(),
    "late": Late(direct=True, seed=WORLD.rank),
    "late and staged": Late(direct=False, seed=WORLD.rank),
}
CLAIMS: dict[str, Callable[[Transport], None]] = {
    "sums of float32": lambda transport: sums(transport, torch.float32),
    "sums of bfloat16": lambda transport: sums(transport, torch.bfloat16),
    "short sums": short_sums,
    "sums in the background": in_the_background,
    "messages": messages,
    "kinds": kinds,
    "under way": under_way,
    "weights again": weights_again,
    "groups": groups,
    "in the stream": in_the_stream,
    "kept": kept,
}


def holds(name: str) -> None:
    WORLD.Barrier()
    if WORLD.rank == 0:
        print(f"holds: {name}", flush=True)


if __name__ == "__main__":
    order = in_key_order([[0, 1, 2]], 1000, torch.float32)
    other = in_key_order([[0]], 1000, torch.float32) + in_key_order([[1, 2]], 1000, torch.float32)
    assert data(order) != data(other), "numbers whose order does not matter would prove nothing"
    for how, device in DEVICES.items():
        for name, claim in CLAIMS.items():
            with device.working() if isinstance(device, Late) else contextlib.nullcontext(), device.torch:
                claim(make_transport(WORLD, GROUPS, device=device))
            holds(f"{name}, {how}")
    sys.exit()
