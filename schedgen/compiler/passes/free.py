"""FREE after the last use of every x, g and dw; weight_fetch and weight_versions free weights themselves.

FREE waits for the SENDs of its buffer. So where the last use is a SEND, the FREE comes after the second compute
instruction that follows on the rank, or at the end of its list: MPI may deliver the message only when the receiver's
job ends, which may take longer than the sender's next job. Ranks are independent of one another here, so this pass
works on the projected program.
"""

from __future__ import annotations

import numpy as np

from schedgen.ir.accesses import Slots, accesses, numbers_in_all, operands, slots
from schedgen.ir.effects import Buffer, Effect
from schedgen.ir.instructions import COMPUTE, Kind, Op
from schedgen.ir.program import Program, rows
from schedgen.util.arrays import Flags, Ints, Small
from schedgen.util.jit import kernel

FREED = (Buffer.X, Buffer.G, Buffer.DW)


def free(program: Program, sends_end_late: bool = False) -> Program:
    """A projected program with its FREEs inserted; where weights have versions, dw is already freed at its STEP.

    A FREE that the program has is kept. `sends_end_late`: one that waits for SENDs comes at the end of its list.
    """
    header, table = program.header, program.rows
    kinds = [buffer for buffer in FREED if buffer != Buffer.DW or header.has_flush]
    done = accesses(program, kinds)
    # Every x and g begins once on a rank, and every life of a dw ends with a SEND or a STEP.
    begins = (done.effect == Effect.DEFINE) | (done.effect == Effect.RECEIVE)
    most = int((begins | (done.buffer == Buffer.DW) & (done.effect != Effect.ADD)).sum())
    most = len(begins) if sends_end_late else most  # torch's list is not proved yet
    places = slots(np.where(np.isin(np.arange(len(Buffer)), kinds), numbers_in_all(header), 0))
    buffer, (number, after) = np.empty(most, np.int8), np.empty((2, most), np.int32)
    jobs = program.is_one_of(*COMPUTE) & (not sends_end_late)
    count = _last_uses.sized(4 * len(program))(
        table.rank, jobs, *done, places, np.zeros((places.total, 3), np.int32),
        np.empty(len(program), np.int32), buffer, number, after,
    )  # fmt: skip
    del done, begins  # a third of the memory in use
    order = np.argsort(after[:count], kind="stable")
    order = order[np.searchsorted(after[order], 0) :]
    buffer, number, after = buffer[order], number[order], after[order]
    stage, mb, piece = operands(header, buffer, number)
    kind_of = np.zeros(len(Buffer), np.int8)
    kind_of[list(FREED)] = [Kind[freed.name] for freed in FREED]
    new = rows(Op.FREE, table.rank[after], kind=kind_of[buffer], stage=stage, mb=mb, piece=piece)
    del buffer, number, order, stage, mb, piece
    return program.insert(new, after=after.astype(np.int64))


@kernel
def _last_uses(
    rank: Ints, is_compute: Flags, of_row: Ints, effect: Small, kind: Small, number: Ints, places: Slots,
    first_use: Ints, next_compute: Ints, buffer: Small, named: Ints, after: Ints,
) -> int:  # fmt: skip
    """Fill the last three arrays: what is freed after which row, by rank and first use; return the number of FREEs.

    `first_use`, zeros at first, by slot: the latest rank that used it, + 1; its buffer's index in the three arrays; and
    whether its last use was a SEND. What is then added to a dw begins a new one, before which the old one is freed.
    `next_compute` becomes the row of the next job after each row, or else the rank's last row.
    """
    length, count = len(rank), 0
    for row in range(length - 1, -1, -1):
        if row + 1 == length or rank[row + 1] != rank[row]:
            next_compute[row] = row
        else:
            next_compute[row] = row + 1 if is_compute[row + 1] else next_compute[row + 1]
    for a in range(len(of_row)):
        row, slot = of_row[a], places.begin[kind[a]] + places.step[kind[a]] * number[a]
        is_new, is_sent = first_use[slot, 0] != rank[row] + 1, effect[a] == Effect.SEND
        if not is_new and effect[a] == Effect.ADD and first_use[slot, 2]:
            after[first_use[slot, 1]] = min(after[first_use[slot, 1]], row - 1)
            is_new = True
        if is_new:
            first_use[slot, 0], first_use[slot, 1] = rank[row] + 1, count
            buffer[count], named[count] = kind[a], number[a]
            count += 1
        first_use[slot, 2] = is_sent
        after[first_use[slot, 1]] = next_compute[next_compute[row]] if is_sent else row
        if effect[a] == Effect.END:
            after[first_use[slot, 1]] = -1  # it is freed
    return count
