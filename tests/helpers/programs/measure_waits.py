"""The processor time of a waiting rank, and the wait for a message after a computation: seconds, on 4 ranks.

Rank 0 prints them as JSON:

    waiting      by rank, of a wait of half a second: processor time / time
    transfer     of 16 MiB from rank 0 to rank 1 when both only wait: each of several times
    plain        by repetition: how long rank 1 still waits for it after a long computation
    thread       as `plain`, with `MessageProgress.with_thread` the computations of both
    works        whether this MPI allows calls from two threads, without which there is no thread
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI

from mpirun.comm.progress_thread import MessageProgress
from mpirun.comm.transport import Transport

WORLD = MPI.COMM_WORLD
BYTES = 2**24
REPETITIONS = 7


def waiting(transport: Transport) -> list[float]:
    """The others wait for a message from rank 0, which sleeps; rank 0 for their answers, which are as late."""
    token, others = torch.zeros(1), range(1, WORLD.size)
    if WORLD.rank == 0:
        tokens = torch.zeros(WORLD.size, 1)
        receives = [transport.receive(tokens[other], other, 2) for other in others]
        for receive in receives:
            receive.start()
        time.sleep(0.5)
        sends = [transport.send(token, other, 1) for other in others]
        share = share_of_a_core(lambda: [transport.wait(receive.done) for receive in receives])
        for done in sends:
            transport.wait(done)
    else:
        receive = transport.receive(token, 0, 1)
        receive.start()
        share = share_of_a_core(lambda: transport.wait(receive.done))
        time.sleep(0.5)
        transport.wait(transport.send(token, 0, 2))
    return WORLD.allgather(share)


def share_of_a_core(act: Callable[[], object]) -> float:
    begin, used = time.perf_counter(), time.process_time()
    act()
    return (time.process_time() - used) / (time.perf_counter() - begin)


def computation(seconds: float) -> Callable[[], None]:
    """A computation that takes about `seconds` on this machine, without a call of MPI."""
    a = torch.rand(256, 256)

    def act(times: int) -> None:
        for _ in range(times):
            torch.mm(a, a)

    def measured(times: int) -> float:
        begin = time.perf_counter()
        act(times)
        return (time.perf_counter() - begin) / times

    times = round(seconds / min(measured(5) for _ in range(10)))
    return lambda: act(times)


def behind(pair: MPI.Intracomm, transport: Transport, act: Callable[[], None]) -> float:
    """Seconds for which a rank still waits for a message that is in flight while it does `act`."""
    message = torch.zeros(BYTES, dtype=torch.uint8)
    receive = transport.receive(message, 0, 1)
    pair.Barrier()
    if pair.rank == 0:
        done = transport.send(message, 1, 1)
    else:
        receive.start()
        done = receive.done
    act()
    begin = time.perf_counter()
    transport.wait(done)
    waited = time.perf_counter() - begin
    pair.Barrier()
    return waited


def hiding(pair: MPI.Intracomm) -> dict[str, list[float]]:
    """The waits of rank 1, by way. The ways take turns, so that other load on the machine affects all of them."""
    transport = Transport(pair, [])
    progress = MessageProgress(pair)
    act = computation(0.04)
    by_way: dict[str, list[float]] = {"transfer": [], "plain": [], "thread": []}
    for repetition in range(-1, REPETITIONS):
        times = {
            "transfer": behind(pair, transport, lambda: None),
            "plain": behind(pair, transport, act),
            "thread": behind(pair, transport, progress.with_thread(act)),
        }
        if repetition >= 0:  # the first warms up
            for what, seconds in times.items():
                by_way[what].append(seconds)
    return by_way


if __name__ == "__main__":
    torch.set_num_threads(1)
    result: dict[str, Any] = {"waiting": waiting(Transport(WORLD, [])), "works": MessageProgress(WORLD).allowed}
    pair = WORLD.Split(WORLD.rank // 2)
    if WORLD.rank < 2:
        result |= pair.bcast(hiding(pair), 1)
    done = WORLD.Ibarrier()
    while not done.Test():  # ranks 2 and 3 leave the cores to the others
        time.sleep(0.05)
    if WORLD.rank == 0:
        print(json.dumps(result))
    sys.exit()
