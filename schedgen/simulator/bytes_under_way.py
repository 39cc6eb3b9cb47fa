"""Bytes in flight while an instruction runs: of messages and sums that its rank has started and not yet waited for.

In: one rank's rows, and the bytes of its buffers. Out: bytes by row. A receive or a sum is in flight until the next
instruction that touches the buffer it fills, a SEND until one that changes or ends the buffer it reads. Only mpirun
uses this: to decide during which jobs messages need calls.
"""

from __future__ import annotations

import numpy as np

from schedgen.analysis import analyse
from schedgen.ir.effects import Effect
from schedgen.ir.instructions import Kind, Op
from schedgen.ir.program import Program
from schedgen.simulator.buffer_sizes import BufferSizes, message_bytes, summed_bytes
from schedgen.util.arrays import Numbers


def bytes_under_way(program: Program, sizes: BufferSizes) -> Numbers:
    """By row of a rank's list, shape (rows,): the bytes of messages and of sums of gradients in flight."""
    touched, rows = analyse(program).accesses, program.rows
    in_order = np.lexsort((touched.number, touched.buffer))  # by buffer, and then in the order of the list
    row, effect, place = touched.row[in_order], touched.effect[in_order], np.arange(len(in_order))
    name = np.stack([touched.buffer, touched.number])[:, in_order]

    def until(waits: np.ndarray) -> Numbers:
        """By access: the row of the buffer's next access for which `waits` holds, or the number of rows if none."""
        at = np.append(np.where(waits, place, len(place)), len(place))
        following = np.minimum.accumulate(at[::-1])[::-1][1:]
        same = (following < len(place)) & (name[:, np.minimum(following, len(place) - 1)] == name).all(axis=0)
        return np.where(same, np.append(row, 0)[following], len(program))

    is_sum = (rows.op[row] == Op.ALLREDUCE) & (rows.kind[row] == Kind.DW)
    sent, received = effect == Effect.SEND, effect == Effect.RECEIVE
    waited = np.where(sent, until((effect == Effect.CHANGE) | (effect == Effect.END)), until(np.full(len(row), True)))
    messages = row[sent | received]
    size = summed_bytes(program, sizes)
    size[messages] = message_bytes(program, sizes, messages)
    change = np.zeros(len(program) + 2, np.int64)
    starts = sent | received | is_sum
    np.add.at(change, row[starts] + 1, size[row[starts]])
    np.add.at(change, waited[starts], -size[row[starts]])
    return np.cumsum(change)[: len(program)]
