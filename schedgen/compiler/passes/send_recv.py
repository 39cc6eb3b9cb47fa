"""Transfers: activations travel forwards and gradients backwards along the edges.

x.p.b goes once to every other worker that computes a consumer of stage p,
behind its FWD, or where it is apart x.p.b.c to that of consumer c; g.p.b goes
from the worker of the consumer's backward to the worker of p's, behind that
backward. SEND and RECV are inserted side by side.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schedgen.compiler.options import Options
from schedgen.compiler.passes.find_rows import Places, given, next_compute, rows_of
from schedgen.ir.instructions import AnyInts, B, F, Ints, Kind, Op
from schedgen.ir.program import Program, Rows, concatenate, rows


def transfers(program: Program, options: Options) -> Program:
    activations, behind_forward = _activations(program, options.paired)
    gradients, behind_backward = _gradients(program)
    new = concatenate([activations, gradients])
    return program.insert(new, after=np.concatenate([behind_forward, behind_backward]))


def _activations(program: Program, paired: NDArray[np.bool_]) -> tuple[Rows, Places]:
    header = program.header
    b = np.arange(header.microbatches)
    keys = [np.empty(0, np.int64)]  # (producer, via, microbatch, worker) as one number; via + 1 where outputs are apart
    ways_out = header.stages + 1 if header.graph.per_consumer else 1
    for producer, consumer in header.graph.edges:
        whole = (
            producer * ways_out + header.graph.output_consumer(producer, consumer) + 1
            if header.graph.per_consumer
            else producer
        )
        job = (whole * header.microbatches + b) * header.workers
        ways = (F, B) if (header.compute[F, consumer] != header.compute[B, consumer]).any() else (F,)
        keys += [job + header.compute[d, consumer] for d in ways]
    wanted = np.concatenate(keys)
    if (wanted[1:] <= wanted[:-1]).any():
        wanted = np.unique(wanted)
    job, to = np.divmod(wanted, header.workers)
    output, mb = np.divmod(job, header.microbatches)
    stage, via = np.divmod(output, ways_out)
    source = header.compute[F, stage, mb]
    far = source != to
    stage, mb, via, to, source = stage[far], mb[far], via[far] - 1, to[far], source[far]
    forward = rows_of(program, Op.FWD)[stage, mb]
    after = given(program, Kind.X, forward, stage, mb, via)
    late = paired[stage, mb]
    after[late] = np.maximum(after[late], next_compute(program, forward[late]))
    return _pairs(Kind.X, stage, mb, via, source, to, after)


def _gradients(program: Program) -> tuple[Rows, Places]:
    header = program.header
    edges = np.array(header.graph.edges, np.int64).reshape(-1, 2)
    source, to = header.compute[B, edges[:, 1]], header.compute[B, edges[:, 0]]
    edge, mb = np.nonzero(source != to)
    via = np.array([header.graph.gradient_consumer(p, c) for p, c in header.graph.edges], np.int64)
    backward = rows_of(program, Op.BWD, Op.BWD_I)[edges[edge, 1], mb]
    after = given(program, Kind.G, backward, edges[edge, 0], mb, via[edge])
    return _pairs(Kind.G, edges[edge, 0], mb, via[edge], source[edge, mb], to[edge, mb], after)


def _pairs(
    kind: Kind, stage: Places, mb: Places, via: Places, source: Places | Ints, to: Places | Ints, after: Places
) -> tuple[Rows, Places]:
    """A SEND and its RECV for every message, one after the other, in the order of `after`."""
    order = np.argsort(after, kind="stable")
    stage, mb, via, after = stage[order], mb[order], via[order], after[order]

    def twice(sender: AnyInts, receiver: AnyInts) -> Ints:
        both = np.empty(2 * len(sender), np.int32)
        both[::2], both[1::2] = sender, receiver
        return both

    ops = np.tile(np.array([Op.SEND, Op.RECV], np.int8), len(stage))
    rank, peer = twice(source[order], to[order]), twice(to[order], source[order])
    new = rows(ops, rank, kind=kind, stage=twice(stage, stage), mb=twice(mb, mb), via=twice(via, via), peer=peer)
    return new, np.repeat(after, 2)
