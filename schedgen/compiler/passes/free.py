"""FREE behind the last use of every x, g and dw; weight_fetch and weight_versions free weights where they put them.

Where the last use is a SEND, the FREE, which waits for it, stands behind the second compute instruction that follows on
the rank, or at the end of its list: the message has that long to leave. MPI may deliver it only when the receiver's job
ends, and that may last longer than the sender's next one. Ranks do not matter to one another here, so this pass works
on the projected program.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schedgen.ir.accesses import accesses, numbers_in_all, operands
from schedgen.ir.effects import Buffer, Effect
from schedgen.ir.instructions import COMPUTE, Ints, Kind, Numbers, Op, Small
from schedgen.ir.program import Program, rows
from schedgen.util.jit import kernel

FREED = (Buffer.X, Buffer.G, Buffer.DW)


def free(program: Program) -> Program:
    """Insert the FREEs. Where weights have versions, every dw has been freed with its STEP."""
    header, table = program.header, program.rows
    kinds = [buffer for buffer in FREED if buffer != Buffer.DW or not header.weight_versions]
    done = accesses(program, kinds)
    slots = np.where(np.isin(np.arange(len(Buffer)), kinds), numbers_in_all(header), 0)
    # Every x and g begins once on a rank, and every dw is sent or stepped with in the end.
    begins = (done.effect == Effect.DEFINE) | (done.effect == Effect.RECEIVE)
    most = int((begins | (done.buffer == Buffer.DW) & (done.effect != Effect.ADD)).sum())
    compute = np.isin(np.arange(len(Op)), COMPUTE)
    buffer, number, after = _last_uses.sized(4 * len(program))(
        table.rank, table.op, compute, done.row, done.effect, done.buffer, done.number, np.cumsum([0, *slots]), most
    )
    order = np.argsort(after, kind="stable")
    buffer, number, after = buffer[order], number[order], after[order]
    stage, mb, via = operands(header, buffer, number)
    kind = np.select([buffer == freed for freed in FREED], [Kind[freed.name] for freed in FREED])
    new = rows(Op.FREE, table.rank[after], kind=kind, stage=stage, mb=mb, via=via)
    return program.insert(new, after=after.astype(np.int64))


@kernel
def _last_uses(
    rank: Ints, op: Small, compute: NDArray[np.bool_], of_row: Ints, effect: Small, kind: Small, number: Ints,
    base: Numbers, most: int,
) -> tuple[Small, Ints, Ints]:  # fmt: skip
    """(buffer, number, row behind which to free it), rank by rank in the order of first uses.

    `compute`: by opcode, whether it is a job. `base`: by kind of buffer, where its slots begin.
    """
    length, slots = len(rank), base[len(base) - 1]
    next_compute = np.empty(length, np.int32)  # behind each row, or else the rank's last row
    for row in range(length - 1, -1, -1):
        if row + 1 == length or rank[row + 1] != rank[row]:
            next_compute[row] = row
        else:
            next_compute[row] = row + 1 if compute[op[row + 1]] else next_compute[row + 1]
    seen, place = np.full(slots, -1, np.int32), np.empty(slots, np.int32)  # the rank that place[slot] is for
    buffer, named, after = np.empty(most, np.int8), np.empty(most, np.int32), np.empty(most, np.int32)
    count = 0
    for a in range(len(of_row)):
        row, slot = of_row[a], base[kind[a]] + number[a]
        if seen[slot] != rank[row]:
            seen[slot], place[slot] = rank[row], count
            buffer[count], named[count] = kind[a], number[a]
            count += 1
        after[place[slot]] = next_compute[next_compute[row]] if effect[a] == Effect.SEND else row
    return buffer[:count], named[:count], after[:count]
