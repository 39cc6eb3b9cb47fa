"""Sums over slices: the outputs and gradients of a sliced stage's slices are summed before any other use of them.

Each of the T workers enters the ALLREDUCE of x.s.b after its FWD of a slice s, and of g.p.b after its BWD or BWD_I
for every producer p. All T ALLREDUCEs come after the last of the T jobs, so that the global order stays executable.
"""

from __future__ import annotations

import numpy as np

from schedgen.compiler.place import PlacedScheme
from schedgen.ir.instructions import B, F, Kind, Op
from schedgen.ir.program import Program, Rows, concatenate, rows
from schedgen.util.arrays import Numbers


def slice_allreduce(program: Program, _: PlacedScheme) -> Program:
    """The program with the ALLREDUCEs over slices, which come before the transfers."""
    header = program.header
    split, graph = header.tensor_parallel.sliced, header.graph
    if not split.any():
        return program
    stages = np.flatnonzero(split)
    outputs = np.stack([stages, stages, np.full_like(stages, -1)])
    edges = [(c, p, graph.gradient_consumer(p, c)) for p, c in graph.edges if split[c]]
    inputs = np.array(edges, np.int64).reshape(-1, 3).T
    forwards, after_forward = _sums(program, Kind.X, F, outputs, program.job_rows(Op.FWD))
    if program.header.is_forward:
        return program.insert(forwards, after=after_forward)
    backwards, after_backward = _sums(program, Kind.G, B, inputs, program.job_rows(Op.BWD, Op.BWD_I))
    return program.insert(concatenate([forwards, backwards]), after=np.concatenate([after_forward, after_backward]))


def _sums(program: Program, kind: Kind, d: int, buffers: Numbers, job: Numbers) -> tuple[Rows, Numbers]:
    """The ALLREDUCEs over the results of jobs of direction d, and the rows after which they are inserted.

    `buffers`, shape (3, n): the stage that computes each, and the stage and consumer in its name; `job`: the row of
    each job, (S, B). The T members of a sum are adjacent.
    """
    header, T = program.header, program.header.tensor_parallel.degree
    # Slices of one sum side by side: n is T times the number of sums of a microbatch.
    order = np.lexsort((buffers[0] % T, buffers[1] // T, buffers[0] // T))
    giver, stage, consumer = (column[order].reshape(-1, 1, T) for column in buffers)
    mb = np.arange(header.microbatches)[None, :, None]
    rank = header.compute[d][giver, mb]
    members, number = np.unique(np.sort(rank.reshape(-1, T), axis=1), axis=0, return_inverse=True)
    group = np.array([header.group_numbers[tuple(ranks)] for ranks in members.tolist()], np.int64)[number]
    after = job[giver, mb].max(axis=2, keepdims=True)
    columns = (rank, stage, mb, consumer, group.reshape(*rank.shape[:2], 1), after)
    rank_, stage_, mb_, consumer_, group_, after_ = (np.broadcast_to(column, rank.shape).ravel() for column in columns)
    new = rows(Op.ALLREDUCE, rank_, kind=kind, stage=stage_, mb=mb_, consumer=consumer_, group=group_)
    return new, after_.astype(np.int64)
