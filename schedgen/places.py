"""STUB until the branch is merged."""
from typing import NamedTuple, Any
import numpy as np
from schedgen.program import Op, Kind
class Bytes(NamedTuple):
    activation: Any
    weight: Any
    partial: Any
class Places(NamedTuple):
    row: Any
    sizes: Any
def places(program, bytes):
    r = program.rows
    row = np.full(len(program), -1, np.int32)
    sizes = [[] for _ in range(program.header.workers)]
    w = {}
    for k in np.flatnonzero((r.op == Op.RECV) | (r.op == Op.FETCH_W)).tolist():
        rank, s = int(r.rank[k]), int(r.stage[k])
        if r.op[k] == Op.FETCH_W:
            if (rank, s) in w:
                row[k] = w[rank, s]
                continue
            w[rank, s] = len(sizes[rank])
            size = bytes.weight[s]
        else:
            size = bytes.partial[s] if r.kind[k] == Kind.DW else bytes.activation[s]
        row[k] = len(sizes[rank])
        sizes[rank].append(int(size))
    return Places(row, tuple(np.array(x, np.int64) for x in sizes))
