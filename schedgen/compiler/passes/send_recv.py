"""Transfers: activations travel forwards and gradients backwards along the edges of the stage graph.

x.p.b goes once to every other worker that computes a consumer of stage p, behind its FWD; where outputs are per
consumer, x.p.b.c goes to that of consumer c. g.p.b goes from the worker of the consumer's backward to the worker of
p's, behind that backward. SEND and RECV are inserted side by side.
"""

from __future__ import annotations

import numpy as np

from schedgen.compiler.passes.find_rows import RowNumbers, defining_rows, job_rows, next_compute
from schedgen.compiler.place import Flags, PlacedScheme
from schedgen.ir.instructions import AnyInts, B, F, Ints, Kind, Op
from schedgen.ir.program import Program, Rows, concatenate, rows


def send_recv(program: Program, placed: PlacedScheme) -> Program:
    """The program with a SEND and a RECV for every activation and gradient that changes its worker."""
    activations, after_forward = _activations(program, placed.delayed_send)
    if program.header.is_forward:
        return program.insert(activations, after=after_forward)
    gradients, after_backward = _gradients(program)
    new = concatenate([activations, gradients])
    return program.insert(new, after=np.concatenate([after_forward, after_backward]))


def _activations(program: Program, delayed_send: Flags) -> tuple[Rows, RowNumbers]:
    header, graph = program.header, program.header.graph
    b = np.arange(header.microbatches)
    outputs = header.stages + 1 if graph.per_consumer else 1  # of a stage: consumer + 1, or 0 where all read the same
    keys = [np.empty(0, np.int64)]  # (producer, output, microbatch, worker) as one number
    for producer, consumer in graph.edges:
        key = producer * outputs + graph.output_consumer(producer, consumer) + 1
        job = (key * header.microbatches + b) * header.workers
        places = header.compute[: B + 1, consumer]  # of the forward, and of the backward if there is one
        keys += [job + place for place in (places if (places != places[F]).any() else places[:1])]
    messages = np.concatenate(keys)
    if (messages[1:] <= messages[:-1]).any():
        messages = np.unique(messages)
    message, to = np.divmod(messages, header.workers)
    buffer, mb = np.divmod(message, header.microbatches)
    stage, output = np.divmod(buffer, outputs)
    source = header.compute[F, stage, mb]
    far = source != to
    stage, mb, consumer, to, source = stage[far], mb[far], output[far] - 1, to[far], source[far]
    forward = job_rows(program, Op.FWD)[stage, mb]
    after = defining_rows(program, Kind.X, forward, stage, mb, consumer)
    delayed = delayed_send[stage, mb]
    after[delayed] = np.maximum(after[delayed], next_compute(program, forward[delayed]))
    return _pairs(Kind.X, stage, mb, consumer, source, to, after)


def _gradients(program: Program) -> tuple[Rows, RowNumbers]:
    header, graph = program.header, program.header.graph
    producer, consumer = np.array(graph.edges, np.int64).reshape(-1, 2).T
    operand = np.array([graph.gradient_consumer(p, c) for p, c in graph.edges], np.int64)
    source, to = header.compute[B, consumer], header.compute[B, producer]
    edge, mb = np.nonzero(source != to)
    backward = job_rows(program, Op.BWD, Op.BWD_I)[consumer[edge], mb]
    after = defining_rows(program, Kind.G, backward, producer[edge], mb, operand[edge])
    return _pairs(Kind.G, producer[edge], mb, operand[edge], source[edge, mb], to[edge, mb], after)


def _pairs(
    kind: Kind, stage: RowNumbers, mb: RowNumbers, consumer: RowNumbers, source: RowNumbers | Ints,
    to: RowNumbers | Ints, after: RowNumbers,
) -> tuple[Rows, RowNumbers]:  # fmt: skip
    """A SEND and its RECV for every message, one after the other, in the order of `after`."""
    order = np.argsort(after, kind="stable")
    stage, mb, consumer = stage[order], mb[order], consumer[order]

    def interleaved(of_send: AnyInts, of_recv: AnyInts) -> Ints:
        both = np.empty(2 * len(order), np.int32)
        both[::2], both[1::2] = of_send, of_recv
        return both

    ops = np.tile(np.array([Op.SEND, Op.RECV], np.int8), len(order))
    stages, mbs, consumers = (interleaved(column, column) for column in (stage, mb, consumer))
    sender, receiver = source[order], to[order]
    rank, peer = interleaved(sender, receiver), interleaved(receiver, sender)
    new = rows(ops, rank, kind=kind, stage=stages, mb=mbs, consumer=consumers, peer=peer)
    return new, np.repeat(after[order], 2)
