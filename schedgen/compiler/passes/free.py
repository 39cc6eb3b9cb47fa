"""FREE behind the last use of every x, g and dw (the weights pass frees weight copies).

Where the last use is a SEND, the FREE, which waits for it, stands behind the
rank's next compute instruction: the message has that long to leave. Ranks do
not matter to one another here, so this pass works on the projected program.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schedgen.ir.instructions import Ints, Kind, Op, Small
from schedgen.ir.program import Program, rows
from schedgen.util.jit import kernel

Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]


def free(program: Program) -> Program:
    """Insert the FREEs. Where weights have versions, every dw has been freed with its STEP."""
    header, table = program.header, program.rows
    stages, batches = header.stages, header.microbatches
    ends = np.array(header.graph.edges, np.int64).reshape(-1, 2)
    order = np.lexsort((ends[:, 0], ends[:, 1]))  # header.graph.edges is sorted by producer, this is by consumer
    first_in = np.searchsorted(ends[order, 1], np.arange(stages + 1))
    first_out = np.searchsorted(ends[:, 0], np.arange(stages + 1))
    # At most so many buffers: outputs, received ones, gradients, sums.
    backward = np.isin(table.op, (Op.BWD, Op.BWD_I))
    sums = (table.op == Op.STEP) | ((table.op == Op.SEND) & (table.kind == Kind.DW))
    outputs = np.where(header.graph.is_per_consumer, np.diff(first_out), 1)[table.stage[table.op == Op.FWD]].sum()
    inputs = np.diff(first_in)[table.stage[backward]].sum()
    most = int(outputs + (table.op == Op.RECV).sum() + inputs + sums.sum())
    last, buffer, count = _last_uses.sized(4 * len(program))(
        table.rank, table.op, table.kind, table.stage, table.mb, table.via, ends, order, first_in, first_out,
        header.graph.is_per_consumer, header.weight_shards.first_unit, stages, batches, most,
    )  # fmt: skip
    last, buffer = last[:count], buffer[:count]
    number, mb = np.divmod(buffer, batches)
    kind, stage, via = np.full(count, Kind.X, np.int8), number.astype(np.int32), np.full(count, -1, np.int32)
    gradient = number >= stages
    kind[gradient], stage[gradient] = Kind.G, number[gradient] - stages
    kind[number >= 2 * stages + len(ends)] = Kind.X
    share = number >= 2 * stages
    if len(ends):
        stage[share], via[share] = ends[(number[share] - 2 * stages) % len(ends)].T
    first_sum = 2 * (stages + len(ends)) * batches
    whole = buffer >= first_sum
    kind[whole], mb[whole] = Kind.DW, -1
    stage[whole], via[whole] = np.array(header.weight_shards.units, np.int32)[buffer[whole] - first_sum].T
    new = rows(Op.FREE, table.rank[last], kind=kind, stage=stage, mb=mb, via=via)
    after = last.astype(np.int64)
    if header.weight_versions.count:  # there every update has freed its dw
        rest = np.flatnonzero(kind != Kind.DW)
        new, after = new.take(rest), after[rest]
    return program.insert(new, after=after)


@kernel
def _last_uses(
    rank: Ints, op: Small, kind: Small, stage: Ints, mb: Ints, via: Ints, ends: Numbers, order: Numbers,
    first_in: Numbers, first_out: Numbers, apart: NDArray[np.bool_], first_unit: Numbers, stages: int, batches: int,
    most: int,
) -> tuple[Ints, Numbers, int]:  # fmt: skip
    """(row behind which to free, number of the buffer, how many), by row.

    Buffers are numbered: x by job, then g by job or, where several stages read
    an output, by edge and microbatch, then x where it is apart by these, then dw by unit.
    """
    g, shares = stages * batches, 2 * stages * batches
    outputs = shares + len(ends) * batches
    dw = outputs + len(ends) * batches
    size = dw + first_unit[stages]
    seen = np.full(size, -1, np.int32)  # the rank that last touched a buffer ...
    last = np.zeros(size, np.int32)  # ... and its row
    following = np.full(size, -1, np.int32)  # buffers that are freed behind the same row, as lists
    length = len(op)
    head = np.full(length, -1, np.int32)
    next_compute = np.zeros(length, np.int32)
    for row in range(length - 1, -1, -1):
        at_end = row + 1 == length or rank[row + 1] != rank[row]
        # A compute instruction behind this one, or else the rank's last instruction.
        if at_end:
            next_compute[row] = row
        else:
            next_compute[row] = row + 1 if Op.FWD <= op[row + 1] <= Op.RECOMPUTE else next_compute[row + 1]
    touched = np.empty(size, np.int32)
    found = np.empty(8, np.int64)
    behind, buffer = np.empty(most, np.int32), np.empty(most, np.int64)
    count, total, begin = 0, 0, 0
    for row in range(length):
        o, s, b = op[row], stage[row], mb[row]
        few = 0
        # x, g or dw; a received partial of a dw is freed by its ADD
        if o == Op.RECV or o == Op.SEND or (o == Op.ALLREDUCE and kind[row] <= Kind.G):
            if kind[row] == Kind.X or kind[row] == Kind.G:
                found[0], few = (0 if kind[row] == Kind.X else g) + s * batches + b, 1
                for edge in range(first_out[s], first_out[s + 1]):
                    if ends[edge, 1] == via[row]:
                        found[0] = (outputs if kind[row] == Kind.X else shares) + edge * batches + b
            elif kind[row] == Kind.DW and o == Op.SEND:
                found[0], few = dw + first_unit[s] + max(via[row], 0), 1
        elif o == Op.ADD or (o == Op.ALLREDUCE and kind[row] == Kind.DW) or o == Op.STEP:  # t.k: STEP comes later
            found[0], few = dw + first_unit[s] + max(via[row], 0), 1
        elif Op.FWD <= o <= Op.RECOMPUTE:
            ins, outs = first_in[s + 1] - first_in[s], first_out[s + 1] - first_out[s]
            parts = first_unit[s + 1] - first_unit[s]
            if len(found) < 2 * (ins + outs) + parts:
                found = np.empty(4 * (ins + outs + parts), np.int64)
            for k in range(first_in[s], first_in[s + 1]):
                producer = ends[order[k], 0]
                found[few] = outputs + order[k] * batches + b if apart[producer] else producer * batches + b
                few += 1
                if o == Op.BWD or o == Op.BWD_I:
                    several = first_out[producer + 1] - first_out[producer] > 1
                    found[few] = shares + order[k] * batches + b if several else g + producer * batches + b
                    few += 1
            if o == Op.FWD:
                for k in range(outs if apart[s] else 1):
                    found[few] = outputs + (first_out[s] + k) * batches + b if apart[s] else s * batches + b
                    few += 1
            if o == Op.BWD or o == Op.BWD_I or o == Op.BWD_W:
                for edge in range(first_out[s], first_out[s + 1]):
                    found[few] = shares + edge * batches + b if outs > 1 else g + s * batches + b
                    few += 1
            if o == Op.BWD or o == Op.BWD_W:
                for unit in range(first_unit[s], first_unit[s + 1]):
                    found[few] = dw + unit
                    few += 1
        for k in range(few):
            slot = found[k]
            if seen[slot] != rank[row]:
                seen[slot] = rank[row]
                touched[count] = slot
                count += 1
            last[slot] = row
        if row + 1 == length or rank[row + 1] != rank[row]:
            for k in range(count - 1, -1, -1):
                slot = touched[k]
                at = next_compute[last[slot]] if op[last[slot]] == Op.SEND else last[slot]
                following[slot] = head[at]
                head[at] = slot
            for at in range(begin, row + 1):
                slot = head[at]
                while slot >= 0:
                    behind[total], buffer[total] = at, slot
                    total += 1
                    slot = following[slot]
            count, begin = 0, row + 1
    return behind, buffer, total
