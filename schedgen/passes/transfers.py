"""Transfers: activations travel forwards and gradients backwards along the edges.

x.p.b goes once to every other worker that computes a consumer of stage p,
behind its FWD; g.p.b goes from the worker of the consumer's backward to the
worker of p's, behind that backward. SEND and RECV are inserted side by side.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schedgen.passes.lookup import Places, next_compute, rows_of
from schedgen.passes.options import Options
from schedgen.program import B, F, Ints, Kind, Op, Program, Rows, concatenate, rows


def transfers(program: Program, options: Options) -> Program:
    parts = [_activations(program, options.paired), _gradients(program)]
    return program.insert(concatenate([new for new, _ in parts]), after=np.concatenate([after for _, after in parts]))


def _activations(program: Program, paired: NDArray[np.bool_]) -> tuple[Rows, Places]:
    header = program.header
    b = np.arange(header.microbatches)
    wanted = [
        np.stack([np.full_like(b, producer), b, header.compute[d, consumer]], axis=1)
        for producer, consumer in header.edges
        for d in (F, B)
    ]
    stage, mb, to = np.unique(np.concatenate(wanted), axis=0).T if wanted else np.empty((3, 0), np.int64)
    source = header.compute[F, stage, mb]
    far = source != to
    stage, mb, to, source = stage[far], mb[far], to[far], source[far]
    after = rows_of(program, Op.FWD)[stage, mb]
    late = paired[stage, mb]
    after[late] = next_compute(program, after[late])
    return _pairs(Kind.X, stage, mb, np.full_like(stage, -1), source, to), np.repeat(after, 2)


def _gradients(program: Program) -> tuple[Rows, Places]:
    header = program.header
    backward = rows_of(program, Op.BWD, Op.BWD_I)
    new, after = [], []
    for producer, consumer in header.edges:
        source, to = header.compute[B, consumer], header.compute[B, producer]
        mb = np.flatnonzero(source != to)
        stage = np.full_like(mb, producer)
        via = np.full_like(mb, header.share(producer, consumer))
        new.append(_pairs(Kind.G, stage, mb, via, source[mb], to[mb]))
        after.append(np.repeat(backward[consumer, mb], 2))
    if not new:
        return _pairs(Kind.G, *([np.empty(0, np.int64)] * 5)), np.empty(0, np.int64)
    return concatenate(new), np.concatenate(after)


def _pairs(kind: Kind, stage: Places, mb: Places, via: Places, source: Places | Ints, to: Places | Ints) -> Rows:
    """A SEND and its RECV for every message, one after the other."""

    def twice(sender: Places | Ints, receiver: Places | Ints) -> Ints:
        return np.stack([sender, receiver], axis=1).ravel().astype(np.int32)

    return rows(
        twice(np.full_like(stage, Op.SEND), np.full_like(stage, Op.RECV)),
        twice(source, to),
        kind=kind, stage=twice(stage, stage), mb=twice(mb, mb), via=twice(via, via), peer=twice(to, source),
    )  # fmt: skip
