"""Exchange: what the shards of a split stage give is added up, before anything else is done with it.

Each of the T workers enters the ALLREDUCE of x.s.b behind its FWD of a shard s,
and of g.p.b behind its BWD or BWD_I for every producer p. All T enter it behind
the last of the T jobs, so that running the global order one instruction after
another goes on working.
"""

from __future__ import annotations

import numpy as np

from schedgen.compiler.options import Options
from schedgen.compiler.passes.find_rows import Places, rows_of
from schedgen.ir.instructions import B, F, Kind, Op
from schedgen.ir.program import Program, Rows, concatenate, rows


def exchange(program: Program, _: Options) -> Program:
    header = program.header
    if not header.tensor_parallel.split.any():
        return program
    every = np.flatnonzero(header.tensor_parallel.split)
    outputs = np.stack([every, every, np.full_like(every, -1)])
    edges = np.array(
        [
            (c, p, header.graph.gradient_consumer(p, c))
            for p, c in header.graph.edges
            if header.tensor_parallel.split[c]
        ],
        np.int64,
    )
    forwards, behind_forward = _sums(program, Kind.X, F, outputs, rows_of(program, Op.FWD))
    backwards = rows_of(program, Op.BWD, Op.BWD_I)
    gradients, behind_backward = _sums(program, Kind.G, B, edges.reshape(-1, 3).T, backwards)
    new = concatenate([forwards, gradients])
    return program.insert(new, after=np.concatenate([behind_forward, behind_backward]))


def _sums(program: Program, kind: Kind, d: int, given: Places, at: Places) -> tuple[Rows, Places]:
    """Those of what jobs of a direction give; `given`: the stage that gives it, its name's stage and consumer, (3, n).

    `at`: the row of each job, (S, B). The T members of each stand one behind the other.
    """
    header, T = program.header, program.header.tensor_parallel.degree
    # Shards of one sum side by side: n is T times the sums of a microbatch.
    order = np.lexsort((given[0] % T, given[1] // T, given[0] // T))
    giver, stage, via = (column[order].reshape(-1, 1, T) for column in given)
    mb = np.arange(header.microbatches)[None, :, None]
    rank = header.compute[d][giver, mb]
    groups = {group: index for index, group in enumerate(header.groups)}
    ranks, number = np.unique(np.sort(rank.reshape(-1, T), axis=1), axis=0, return_inverse=True)
    group = np.array([groups[tuple(one)] for one in ranks.tolist()], np.int64)[number].reshape(*rank.shape[:2], 1)
    after = at[giver, mb].max(axis=2, keepdims=True)
    fields = [np.broadcast_to(one, rank.shape).ravel() for one in (rank, stage, mb, via, group, after)]
    rank_, stage_, mb_, via_, peer, after_ = fields
    new = rows(Op.ALLREDUCE, rank_, kind=kind, stage=stage_, mb=mb_, via=via_, peer=peer)
    return new, after_.astype(np.int64)
