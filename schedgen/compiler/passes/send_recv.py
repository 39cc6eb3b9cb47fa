"""Transfers: activations travel forwards and gradients backwards along the edges of the stage graph.

x.p.b goes once to every other worker that computes a consumer of stage p, after its FWD; where outputs are per
consumer, x.p.b.c goes to the worker of consumer c. g.p.b goes from the worker of the consumer's backward to the
worker of p's backward, after the consumer's backward. SEND and RECV are inserted side by side.
"""

from __future__ import annotations

import numpy as np

from schedgen.compiler.passes.find_rows import NextRow, defining_rows, earlier_compute, next_compute
from schedgen.compiler.place import PlacedScheme
from schedgen.ir.header import Header
from schedgen.ir.instructions import COMPUTE, B, F, Kind, Op
from schedgen.ir.program import Program, Rows, concatenate, rows
from schedgen.ir.transport import in_queue_order, queues
from schedgen.util.arrays import AnyInts, Flags, Ints, Numbers, stable_order


def send_recv(program: Program, placed: PlacedScheme) -> Program:
    """The program with a SEND and a RECV for every activation and gradient that goes to another worker."""
    activations, after_forward = _activations(program, placed.delayed_send)
    if program.header.is_forward:
        return program.insert(activations, after=after_forward)
    gradients, after_backward = _gradients(program)
    new = concatenate([activations, gradients])
    return program.insert(new, after=np.concatenate([after_forward, after_backward]))


def _activations(program: Program, delayed_send: Flags) -> tuple[Rows, Numbers]:
    header, graph = program.header, program.header.graph
    readers: dict[tuple[int, int], list[int]] = {}  # by producer and output, the stages that read it
    for producer, consumer in graph.edges:
        readers.setdefault((producer, graph.output_consumer(producer, consumer)), []).append(consumer)
    messages = [np.empty((2, 0), np.int32), *(_receivers(header, *output) for output in sorted(readers.items()))]
    lengths = [message.shape[1] for message in messages[1:]]
    stage, consumer = np.repeat(np.array(sorted(readers), np.int32).reshape(-1, 2), lengths, axis=0).T
    mb, to = np.concatenate(messages, axis=1)
    source = header.compute[F, stage, mb]
    forward = program.job_rows(Op.FWD)[stage, mb]
    after = defining_rows(program, Kind.X, forward, stage, mb, consumer)
    if delayed_send.any():
        delayed = delayed_send[stage, mb]
        following = next_compute(program, forward[delayed])
        redone = program.is_one_of(Op.RECOMPUTE)[following]  # a part of the backward that follows it
        following[redone] = next_compute(program, following[redone])
        follows = program.is_one_of(*COMPUTE)[following] & (program.rows.rank[following] == source[delayed])
        after[delayed] = np.where(follows, np.maximum(after[delayed], following), after[delayed])
    return _pairs(Kind.X, stage, mb, consumer, source, to, after)


def _receivers(header: Header, output: tuple[int, int], readers: list[int]) -> Ints:
    """(microbatch, worker) of all messages of one output of a stage, in this order; shape (2, messages)."""
    # The workers of the readers' forwards and, if there are any, backwards: by microbatch, ascending.
    places = np.sort(header.compute[: B + 1, readers].reshape(-1, header.microbatches), axis=0)
    far = places != header.compute[F, output[0]]
    far[1:] &= places[1:] != places[:-1]  # once to each
    mb, place = np.nonzero(far.T)
    return np.array([mb, places[place, mb]], np.int32)


def _gradients(program: Program) -> tuple[Rows, Numbers]:
    header, graph = program.header, program.header.graph
    producer, consumer = np.array(graph.edges, np.int64).reshape(-1, 2).T
    operand = np.array([graph.gradient_consumer(p, c) for p, c in graph.edges], np.int32)
    source, to = header.compute[B, consumer], header.compute[B, producer]
    edge, mb = (index.astype(np.int32) for index in np.nonzero(source != to))
    stage, operand = producer.astype(np.int32)[edge], operand[edge]
    backward = program.job_rows(Op.BWD, Op.BWD_I)[consumer[edge], mb]
    after = defining_rows(program, Kind.G, backward, stage, mb, operand)
    return _pairs(Kind.G, stage, mb, operand, source[edge, mb], to[edge, mb], after)


def _pairs(
    kind: Kind, stage: Ints, mb: Ints, consumer: Ints, source: Ints, to: Ints, after: Numbers
) -> tuple[Rows, Numbers]:
    """A SEND and its RECV for every message, in the order of `after`."""
    order = np.argsort(after, kind="stable")
    stage, mb, consumer, source, to = (column[order] for column in (stage, mb, consumer, source, to))
    return transfers(Op.RECV, kind, source, to, after[order], stage=stage, mb=mb, consumer=consumer)


def transfers(
    receive: Op, kind: Kind, source: AnyInts, to: AnyInts, after: Numbers, **buffer: AnyInts
) -> tuple[Rows, Numbers]:
    """A SEND and its receive for every message, one after the other, and the row after which each is inserted."""
    rank, other_end = (np.stack(ends, axis=1).ravel() for ends in ((source, to), (to, source)))
    ops = np.tile(np.array([Op.SEND, receive], np.int8), len(source))
    twice = {name: np.repeat(column, 2) for name, column in buffer.items()}
    return rows(ops, rank, kind=kind, operand=other_end, **twice), np.repeat(after, 2)


def receive_early(program: Program, placed: PlacedScheme) -> Program:
    """The program with every RECV moved directly before the rank's compute instruction `prefetch` jobs earlier.

    So it is posted before the message leaves. RECVs of one kind all move by the same number of a rank's jobs, and stay
    in order; those of what forwards save do not move. Weight fetches are early enough already: `weight_fetch` places
    them as early as its slots allow.

    On a transport that delivers in order, none moves above an operation of its communicator. So these stay in the
    global order, in which each message can be delivered once those before it are. With +batch no RECV moves, lest its
    batch is done late.
    """
    transport = placed.options.in_order
    if not placed.options.prefetch or (transport and transport.batch):
        return program
    receives = program.rows_of(Op.RECV)
    behind = earlier_compute(program, receives, placed.options.prefetch) - 1
    behind = np.where(program.rows.kind[receives] == Kind.SAVED, receives - 1, behind)  # it takes memory from then on
    if program.header.sums_by_messages:  # a partial has its memory from RECV to ADD: one step of a sum at a time
        of_sum = receives[program.rows.kind[receives] == Kind.DW]
        added = NextRow(program, Op.ADD).before(of_sum, program.rows.rank[of_sum])
        behind[np.searchsorted(receives, of_sum)] = np.maximum(behind[np.searchsorted(receives, of_sum)], added)
    if transport:
        queue, place = queues(program, transport), np.arange(len(program))
        place[receives] = behind
        operations = np.flatnonzero(queue >= 0)
        operations = operations[stable_order(queue[operations])]
        place[operations] = in_queue_order(place[operations], queue[operations])
        behind = place[receives]
    stays = ~program.is_one_of(Op.RECV)
    kept_until = np.zeros(len(program) + 1, np.int32)  # by row + 1: how many of the rows up to it stay
    kept_until[1:] = np.cumsum(stays)
    after = kept_until[behind + 1]
    order = np.argsort(after, kind="stable")
    places = after[order] + np.arange(len(receives))
    is_moved = np.zeros(len(program), bool)
    is_moved[places] = True
    source = np.empty(len(program), np.int64)  # by new row: its old row
    source[places], source[~is_moved] = receives[order], np.flatnonzero(stays)
    return Program(program.header, program.rows.take(source))
