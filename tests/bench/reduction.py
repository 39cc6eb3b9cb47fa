"""make bench-run: how to sum a gradient over its owners, measured.

Ours (one slice a member, added in torch in the order of the ranks), a ring of
chunks, and MPI's own non-blocking Iallreduce, each alone and during a
computation that, like a backward, makes no calls for it: milliseconds until the
sum is done, beyond the computation's own time. Medians of rounds in which all
take turns. MPI's sum has no bf16 and guarantees no order, unlike the other two.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.comm.message import mpi_buffer
from mpirun.comm.ordered_allreduce import AllreduceQueue, OrderedAllreduce
from mpirun.comm.progress_thread import MessageProgress
from mpirun.comm.sections import Section
from mpirun.comm.transport import Transport

QUICK = "--quick" in sys.argv
SIZES = (2**12,) if QUICK else (2**12, 2**16, 2**20, 2**22)  # elements of float32
ROUNDS = 2 if QUICK else 15


class Ring:
    """Reduce-scatter and gather in 2 (members - 1) steps, each of which waits for the previous one."""

    def __init__(self, transport: Transport, row: Tensor) -> None:
        comm = transport.comm
        self.transport, me, members = transport, comm.rank, comm.size
        self.parts = list(row.view(members, -1))
        self.into = torch.empty_like(self.parts[0])
        self.next, self.before = (me + 1) % members, (me - 1) % members
        self.plan = [((me - k) % members, (me - k - 1) % members, True) for k in range(members - 1)]
        self.plan += [((me - k + 1) % members, (me - k) % members, False) for k in range(members - 1)]

    def run(self) -> None:
        wait = self.transport.wait
        for out, into, add in self.plan:
            target = self.into if add else self.parts[into]
            receive = self.transport.comm.Irecv(mpi_buffer(target), self.before, 7).Test
            send = self.transport.send(self.parts[out], self.next, 7)
            wait(receive)
            wait(send)
            if add:
                self.parts[into] += self.into


def measure() -> None:
    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    transport, progress = Transport(comm, (), crowded=comm.size > 2), MessageProgress(comm)
    sums = AllreduceQueue(transport)
    keys = [[rank] for rank in range(comm.size)]
    a = torch.randn(500, 500)

    def compute() -> None:
        for _ in range(4):
            torch.mm(a, a)

    behind = progress.with_thread(compute)
    for size in SIZES:
        row, other = torch.zeros(1, size), torch.empty(size)
        data = row.view(torch.uint8)
        allreduce = OrderedAllreduce(transport, transport.comm, data, keys, [Section(0, data.shape[1], row.dtype)])
        ring = Ring(transport, torch.zeros(size))

        def ours(between: Callable[[], None], allreduce: OrderedAllreduce = allreduce) -> None:
            sums.start(allreduce)
            between()
            sums.finish()

        def mpi(between: Callable[[], None], row: Tensor = row, other: Tensor = other) -> None:
            out, into = row[0].numpy(), other.numpy()
            request = transport.comm.Iallreduce(out, into)
            between()
            transport.wait(request.Test)

        def by_ring(between: Callable[[], None], ring: Ring = ring) -> None:
            between()
            ring.run()

        ways: Sequence[Callable[[Callable[[], None]], None]] = (ours, by_ring, mpi)
        laps: dict[tuple[int, bool], list[float]] = {}
        for number in range(ROUNDS):
            begin = time.perf_counter()
            behind()
            own = time.perf_counter() - begin
            for k in sorted(range(len(ways)), key=lambda k: (k + number) % len(ways)):  # each is first in turn
                way = ways[k]
                for hidden in (False, True):
                    comm.Barrier()
                    begin = time.perf_counter()
                    way(behind if hidden else lambda: None)
                    laps.setdefault((k, hidden), []).append(time.perf_counter() - begin - own * hidden)
        if comm.rank == 0:
            each = [
                f"{1e3 * statistics.median(laps[k, hidden]):7.3f}" for hidden in (False, True) for k in range(len(ways))
            ]
            print(
                f"  {4 * size / 2**20:8.3f} MiB  alone {' '.join(each[:3])}   behind {' '.join(each[3:])}", flush=True
            )


def main() -> None:
    from ranks import mpi

    for ranks in (2,) if QUICK else (2, 4):
        print(f"ms to a sum over {ranks} ranks: ours, a ring, Iallreduce")
        subprocess.run(
            [*mpi(ranks), "-m", "mpi4py", __file__, *sys.argv[1:], "measure"], check=True, cwd=Path(__file__).parent
        )


if __name__ == "__main__":
    measure() if sys.argv[-1] == "measure" else main()
