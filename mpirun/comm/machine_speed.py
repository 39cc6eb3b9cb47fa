"""The machine file of the machine that runs: what messages cost inside hosts and between them, how fast devices are.

Messages are timed by ping-pong; jobs of a profile, or a product of matrices, tell devices apart.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from mpirun.comm.device import Device
from mpirun.comm.fail_together import Stop
from mpirun.comm.gpu_transport import make_transport
from mpirun.comm.output import note
from mpirun.comm.transport import Transport

SIZES = [8 << k for k in range(22)]  # bytes, to 16 MiB
LONGEST = 0.1  # seconds of a message: longer ones are not timed
MOST, LEAST, ENOUGH, WARM_UP = 42, 6, 0.1, 2  # times that a size is sent: as often as that takes ENOUGH seconds
ROUNDS = 5  # at most: another is measured if other programs disturbed the links: if some message took DISTURBED times
DISTURBED = 1.5  # as long as a longer one, or bytes cost nothing
ALIKE = 1.2  # devices whose seconds differ by less count as equally fast: other programs make such differences
SIDE, PRODUCTS, TRIES = 512, 4, 20  # of the matrices, how many products are timed together, and how often
LONG = 4  # how many of the longest messages tell beta
DISTINCT = 0.1  # of a message's time: alphas that differ by less are the same
WINDOWS, EXCHANGES = 3, 4  # in which hosts exchange messages, and how often in each
SHARED = 1.2  # pairs that take this many times as long together as one alone share a card
TAG = 1


def measure_machine(
    comm: MPI.Intracomm, device: Device, crowded: bool, seconds: Sequence[float] = ()
) -> dict[str, Any]:
    """What a machine file says of this machine; {} for one rank. The same on all ranks; collective.

    `seconds`: that the same jobs took, by rank; (): a product of matrices is timed. Stop as `measure_levels`.
    """
    if not (levels := measure_levels(comm, device, crowded)):
        return {}
    if not all(level["beta"] for level in levels):
        note(comm, "other programs disturbed the links: long messages took no longer than short ones, and beta is 0")
    speed = speeds(seconds or comm.allgather(_product_seconds(comm, device)))
    if min(speed) == 1:
        return {"levels": levels}
    slowest = speed.index(min(speed))
    note(
        comm,
        f"devices differ: rank {slowest} takes {1 / speed[slowest]:.2g} times as long as rank "
        f"{speed.index(1)}; measure again when nothing else runs, if they are alike",
    )
    return {"levels": levels, "speed": speed}


def speeds(seconds: Sequence[float]) -> list[float]:
    """By rank: its speed as a part of the fastest's; 1 on all ranks where they hardly differ."""
    fastest, slowest = min(seconds), max(seconds)
    return [1.0] * len(seconds) if slowest < ALIKE * fastest else [round(fastest / each, 3) for each in seconds]


def _product_seconds(comm: MPI.Intracomm, device: Device) -> float:
    """The least seconds of some products of matrices, on all ranks at once."""
    factor, seconds = torch.ones(SIDE, SIDE, device=device.torch), []
    comm.Barrier()
    for _ in range(TRIES):
        begin = time.perf_counter()
        for _ in range(PRODUCTS):
            factor @ factor
        device.finish()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def measure_levels(comm: MPI.Intracomm, device: Device, crowded: bool) -> list[dict[str, Any]]:
    """The levels of this machine, the same on all ranks: host, network or both; none for one rank. Collective.

    Messages are between the memories of devices, as a run's are. Stop if the ranks of a host do not follow one another.
    """
    if comm.size == 1:
        return []
    names = comm.allgather(MPI.Get_processor_name())
    hosts = [[*ranks] for _, ranks in groupby(range(comm.size), lambda rank: names[rank])]
    if len({*names}) < len(hosts):
        raise Stop("a machine file lists ranks host by host: launch so that the ranks of a host follow one another")
    transport = make_transport(comm, (), crowded, device=device)
    levels: list[dict[str, Any]] = []
    most = max(map(len, hosts))
    if most > 1:  # pipelines send from rank to rank, all at once
        neighbours = [pair for ranks in hosts for pair in pairwise(ranks)]
        rounds = [pairs for k in (0, 1) if (pairs := [pair for pair in neighbours if pair[0] % 2 == k])]
        each = len(hosts[0]) if len({*map(len, hosts)}) == 1 else [*map(len, hosts)]
        devices = {} if len(hosts) == 1 else {"devices": each}  # one host: of any number of devices
        levels.append({"name": "host", **devices, **_fitted(comm, transport, rounds)})
    if len(hosts) > 1:
        gaps = [1 << k for k in range((len(hosts) - 1).bit_length())]
        rounds = [
            [(ranks[0], hosts[h + gap][0]) for h, ranks in enumerate(hosts) if not h & gap and h + gap < len(hosts)]
            for gap in gaps
        ]
        levels.append({"name": "network", **_fitted(comm, transport, rounds)})
        both_ways = _both_ways(comm, transport, hosts, levels[-1])
        if most == 1:
            levels[-1]["beta"] = max(levels[-1]["beta"], both_ways)
        elif both_ways:
            levels[-1]["card"] = both_ways
    transport.free()
    return levels


def _fitted(comm: MPI.Intracomm, transport: Transport, rounds: list[list[tuple[int, int]]]) -> dict[str, Any]:
    """alpha and beta, fitted to the medians over the pairs of all rounds; pairs of a round send at once."""
    least = np.full(len(SIZES), np.inf)
    for _ in range(ROUNDS):
        by_pair = [seconds for pairs in rounds for seconds in _one_round(comm, transport, pairs)]
        timed = min(map(len, by_pair))
        least = np.minimum(least[:timed], np.median([seconds[:timed] for seconds in by_pair], axis=0))
        alpha, beta = fitted(least)
        if beta > 0 and not (np.maximum.accumulate(least) > DISTURBED * least).any():
            break
    return {"alpha": alpha, "beta": beta}


def _one_round(comm: MPI.Intracomm, transport: Transport, pairs: list[tuple[int, int]]) -> list[list[float]]:
    """By pair: seconds by size, up to the first size that takes LONGEST. The same on all ranks; collective."""
    peer = {a: b for pair in pairs for a, b in (pair, pair[::-1])}.get(comm.rank)
    first, seconds, slowest = (comm.rank, peer) in pairs, list[float](), 0.0
    for size in SIZES:
        times = MOST if not slowest else min(MOST, max(LEAST, int(ENOUGH / slowest)))
        seconds.append(0.0 if peer is None else ping_pong(transport, peer, size, first, times))
        slowest = comm.allreduce(seconds[-1], MPI.MAX)
        if slowest > LONGEST:
            break
    return [mine for mine in comm.allgather(seconds if first else None) if mine]


def _both_ways(comm: MPI.Intracomm, transport: Transport, hosts: list[list[int]], link: dict[str, Any]) -> float:
    """Seconds per byte of what joins a host to others, if all its ranks share it; 0 if they do not. Collective.

    Hosts 0 and 1, 2 and 3, ... exchange messages, both ways at once as pipelines and sums do: of one rank of each, and
    of all.
    """
    here = next(h for h, ranks in enumerate(hosts) if comm.rank in ranks)
    other, place, together = here ^ 1, hosts[here].index(comm.rank), min(map(len, hosts))
    host = MPI.Intracomm(comm.Split(here, comm.rank))
    size = next((size for size in reversed(SIZES) if link["beta"] * size < LONGEST), SIZES[0])
    found = []
    for ranks in (1, together):
        peer = hosts[other][place] if other < len(hosts) and place < ranks else None
        seconds = min(_exchanges(host, transport, peer, size) for _ in range(WINDOWS))  # other programs lengthen some
        found.append(max(comm.allgather(seconds if other < len(hosts) else 0.0)))
    host.Free()
    alone, at_once = found
    if together > 1 and at_once <= SHARED * alone:
        return 0.0
    alpha = link["alpha"]
    latency = alpha if isinstance(alpha, float) else [time for least, time in alpha if least <= size][-1]
    return float(at_once - latency) / (together * size)


def _exchanges(host: MPI.Intracomm, transport: Transport, peer: int | None, size: int) -> float:
    """The seconds of an exchange of messages of `size` bytes between this host's ranks and their peers: a mean, since
    hosts do not begin at the same moment."""
    out, into = (torch.zeros(size, dtype=torch.uint8, device=transport.device.torch) for _ in range(2))
    receive = None if peer is None else transport.receive(into, peer, TAG)
    begin = 0.0
    for number in range(1 + EXCHANGES):
        host.Barrier()
        if number == 1:
            begin = time.perf_counter()
        if receive is not None and peer is not None:
            receive.start()
            transport.wait(transport.send(out, peer, TAG))
            transport.wait(receive.done)
            transport.device.finish()
    host.Barrier()
    return (time.perf_counter() - begin) / EXCHANGES


def ping_pong(transport: Transport, peer: int, size: int, first: bool, times: int) -> float:
    """The median of half the seconds that `size` bytes take to the peer and back; `first`: this rank sends first."""
    out, into = (torch.zeros(size, dtype=torch.uint8, device=transport.device.torch) for _ in range(2))
    receive = transport.receive(into, peer, TAG)
    seconds = []
    for _ in range(WARM_UP + times):
        begin = time.perf_counter()
        receive.start()
        if first:
            transport.wait(transport.send(out, peer, TAG))
        transport.wait(receive.done)
        if not first:
            transport.wait(transport.send(out, peer, TAG))
        transport.device.finish()
        seconds.append((time.perf_counter() - begin) / 2)
    return float(np.median(seconds[WARM_UP:]))


def fitted(seconds: NDArray[np.float64]) -> tuple[float | list[tuple[int, float]], float]:
    """alpha and beta of messages of the first SIZES, from the seconds that they take.

    beta is the slope of the longest, but takes no more than any message takes. alpha is what is left: for each size
    from which another alpha holds, as where MPI begins to ask the receiver first, that size and the alpha; or one.
    """
    sizes = np.array(SIZES[: len(seconds)], np.float64)
    slope = np.polyfit(sizes[-LONG:], seconds[-LONG:], 1, w=1 / seconds[-LONG:])[0]
    beta = max(0.0, float(min(slope, (seconds / sizes).min())))
    alphas = [(0, float(seconds[0] - beta * sizes[0]))]
    for size, whole in zip(SIZES, seconds.tolist(), strict=False):
        if abs(whole - beta * size - alphas[-1][1]) > DISTINCT * whole:
            alphas.append((size, whole - beta * size))
    return (alphas if len(alphas) > 1 else alphas[0][1]), beta
