"""Execute the messages of lists on MPI as a transport that delivers in order would: one at a time in each communicator.

mpiexec -n R python -m mpi4py in_order_ranks.py TRANSPORT SECONDS LIST ...

A message carries the name of its buffer, and is an Issend, which blocks those behind it until it is received. Its tag
is its communicator, so position decides what a receive meets. Jobs take no time. A rank that gets no further for
SECONDS says where it stands, and ends the launch.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict, deque
from functools import partial

import numpy as np
from mpi4py import MPI

from schedgen.analysis import analyse
from schedgen.checker import check_but_waits, checked
from schedgen.ir.effects import COLLECTIVES, RECEIVERS
from schedgen.ir.instructions import Instruction, Kind, Op, buffer_name
from schedgen.ir.program import Program
from schedgen.ir.transport import communicators, read_transport

SIZE = 64  # bytes of a message


def name_of(each: Instruction) -> bytes:
    kind = Kind.W if each.op == Op.FETCH_W else each.kind
    return buffer_name(kind, each.stage, each.mb, each.piece).encode().ljust(SIZE)


def run(world: MPI.Intracomm, program: Program, communicator: np.ndarray, patience: float) -> int:
    """Execute this rank's list; return how many of its receives got another buffer. `communicator`: by row."""
    lifetimes, swapped = analyse(program).lifetimes, 0
    groups = [world.Create(world.group.Incl(group)) for group in program.header.groups]
    awaited = defaultdict[int, list[int]](list)  # by row, the operations that have to be done before it
    for user, received in zip(lifetimes.users.tolist(), lifetimes.received.tolist(), strict=True):
        awaited[user].append(received)
    sends = program.is_one_of(Op.SEND)
    for row in np.flatnonzero((lifetimes.send_before >= 0) & ~sends).tolist():
        send = int(lifetimes.send_before[row])
        while send >= 0:
            awaited[row].append(send)
            send = int(lifetimes.send_before[send])
    for row in program.rows_of(*COLLECTIVES).tolist():
        awaited[row + 1].append(row)
    row, end = program.bounds[world.rank : world.rank + 2].tolist()
    queues, posted, done = defaultdict[int, deque[int]](deque), dict[int, tuple[MPI.Request, bytearray]](), set[int]()

    def post(first: int) -> tuple[MPI.Request, bytearray]:
        each, tag = program.instruction(first), int(communicator[first])
        if each.op in COLLECTIVES:
            return groups[each.group].Ibarrier(), bytearray()
        data = bytearray(SIZE if each.op in RECEIVERS else name_of(each))
        start = (
            partial(world.Irecv, source=each.source) if each.op in RECEIVERS else partial(world.Issend, dest=each.to)
        )
        return start([data, MPI.BYTE], tag=tag), data

    since = time.monotonic()
    while row < end or any(queues.values()):
        before = row, len(done)
        while row < end and all(other in done for other in awaited[row]):
            if communicator[row] >= 0:
                queues[int(communicator[row])].append(row)
            row += 1
        for queue in filter(None, queues.values()):
            first = queue[0]
            if first not in posted:
                posted[first] = post(first)
            request, data = posted[first]
            if request.Test():
                done.add(queue.popleft())
                swapped += program.instruction(first).op in RECEIVERS and data != name_of(program.instruction(first))
        if (row, len(done)) != before:
            since = time.monotonic()
        elif time.monotonic() - since > patience:
            print(f"rank {world.rank} waits at {program.instruction(min(row, end - 1))}", flush=True)
            world.Abort(3)
        else:
            time.sleep(0.0005)
    return swapped


if __name__ == "__main__":
    world, transport = MPI.COMM_WORLD, read_transport(sys.argv[1])
    assert transport
    for name in sys.argv[3:]:
        program = checked(name, partial(check_but_waits, transport=transport))
        number = communicators(program, transport)
        swapped = world.allreduce(run(world.Dup(), program, number, float(sys.argv[2])))
        if world.rank == 0:
            print(f"{name}: {swapped} swapped", flush=True)
