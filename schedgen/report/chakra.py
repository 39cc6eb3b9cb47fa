"""Schedules as MLCommons Chakra execution traces, one for each rank, which simulators such as ASTRA-sim replay.

A node is an instruction, and its id is the instruction's index in the rank's list:

    compute, ADD, STEP    COMP_NODE, with a duration
    SEND, RECV, FETCH_W   COMM_SEND_NODE and COMM_RECV_NODE, with bytes, peer and a tag that both ends share
    ALLREDUCE, NORM       COMM_COLL_NODE, or COMP_NODE in a group of one rank
    FREE                  none; later instructions wait for the SENDs that the FREE waits for

A data dependency leads to the instruction that defined what is read, a control dependency to the last instruction of
the list that blocked the rank. The messages and their field numbers are those of et_def.proto in
github.com/mlcommons/chakra, version 1.0.0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from itertools import pairwise
from typing import Any

import numpy as np

from schedgen.analysis.subject import Subject
from schedgen.checker.messages import rule_3
from schedgen.ir.cost import Amount
from schedgen.ir.header import Header
from schedgen.ir.instructions import COMPUTE, EXCHANGED, VERSIONED, Instruction, Kind, Op
from schedgen.ir.program import Program
from schedgen.report.chrome_trace import event_name
from schedgen.simulator.machine import Machine
from schedgen.simulator.simulate import simulate
from schedgen.util.errors import UsageError

VERSION = "1.0.0"
COMP_NODE, SEND_NODE, RECV_NODE, COLLECTIVE_NODE = 4, 5, 6, 7  # NodeType
ALL_REDUCE = 0  # CollectiveCommType
NUMBER = 8  # bytes of a loss or a norm: a NORM sums one for each microbatch and one more
# Message -> (field, its number, its type, whether it is repeated). Enumerations are int32 on the wire.
_SCHEMA = {
    "AttributeProto": [
        ("name", 1, "STRING", False),
        ("int32_val", 7, "INT32", False),
        ("int64_val", 9, "INT64", False),
        ("bool_val", 27, "BOOL", False),
        ("string_val", 29, "STRING", False),
    ],
    "GlobalMetadata": [("version", 1, "STRING", False)],
    "Node": [
        ("id", 1, "UINT64", False),
        ("name", 2, "STRING", False),
        ("type", 3, "INT32", False),
        ("ctrl_deps", 4, "UINT64", True),
        ("data_deps", 5, "UINT64", True),
        ("start_time_micros", 6, "UINT64", False),
        ("duration_micros", 7, "UINT64", False),
        ("attr", 10, "MESSAGE", True),
    ],
}
_WIDE = ("comm_size", "comm_type")  # attributes of 64 bits

Name = tuple[Any, ...]


def chakra_traces(
    program: Program, cost: Mapping[str, Amount], machine: Machine, unit: float = 1.0
) -> Iterator[tuple[str, bytes]]:
    """(suffix of a file's name, bytes) for each rank's trace, and last for the groups of collectives as JSON.

    `program` is checked and projected. Durations and starts are those of `simulate` in whole microseconds, of which a
    unit of its time has `unit`. Raises UsageError where protobuf is not installed.
    """
    messages = _messages()
    table, run = program.rows, simulate(program, cost, machine)
    begin, length = (np.rint(unit * times).astype(np.int64) for times in (run.start, run.end - run.start))
    sends, receives = rule_3(Subject(program, ""))
    size, tag = run.message_bytes.copy(), np.zeros(len(program), np.int64)
    pair = table.rank[sends].astype(np.int64) * program.header.workers + table.peer[sends]
    order = np.lexsort((sends, pair))
    first = np.flatnonzero(np.append(True, np.diff(pair[order]) > 0))
    tag[sends[order]] = np.arange(len(sends)) - np.repeat(first, np.diff(np.append(first, len(sends))))
    size[receives], tag[receives] = size[sends], tag[sends]
    size += run.summed_bytes
    size[table.op == Op.NORM] = NUMBER * (program.header.microbatches + 1)
    for rank, (start, stop) in enumerate(pairwise(program.bounds.tolist())):
        columns = (column[start:stop].tolist() for column in (begin, length, size, tag))
        instructions = program.instructions(rank)
        nodes = zip(instructions, dependencies(program.header, instructions), *columns, strict=True)
        out = BytesIO()
        _put(out, messages["GlobalMetadata"](version=VERSION))
        for index, (i, edges, *numbers) in enumerate(nodes):
            if edges is not None:
                _put(out, _node(messages, program.header, rank, index, i, edges, *numbers))
        yield f".{rank}.et", out.getvalue()
    groups = {str(group): list(ranks) for group, ranks in enumerate(program.header.groups) if group}
    yield ".groups.json", f"{json.dumps(groups)}\n".encode()


def dependencies(header: Header, listed: Sequence[Instruction]) -> Iterator[tuple[list[int], list[int]] | None]:
    """For every instruction of a rank's list the places of those it needs: (data, control); None for FREE."""
    defined: dict[Name, int] = {}
    sent: dict[Name, list[int]] = {}  # SENDs that may still be under way
    received: set[int] = set()
    reductions: list[int] = []
    behind: list[int] = []  # the last that blocked, and what a FREE or SEND since then waited for
    for at, i in enumerate(listed):
        reads, writes = _operands(header, i)
        if i.op in (Op.FREE, Op.STEP):
            behind += sent.pop(reads[0], [])
        if i.op == Op.FREE:
            defined.pop(reads[0], None)
            yield None
            continue
        data = {defined[name] for name in reads if name in defined}
        if i.op == Op.NORM:
            data.update(reductions)
        yield sorted(data), sorted(set(behind) - data)
        if i.op == Op.SEND:
            sent.setdefault(reads[0], []).append(at)
            behind += data & received  # it passes on what comes in
        elif i.op == Op.ALLREDUCE and i.kind not in EXCHANGED:
            reductions.append(at)
        elif i.op in (Op.RECV, Op.FETCH_W):
            received.add(at)
        else:
            behind = [at]
        defined.update(dict.fromkeys(writes, at))


def _operands(header: Header, i: Instruction) -> tuple[list[Name], list[Name]]:
    """What an instruction reads, and what it defines or changes."""
    s, b = i.stage, i.mb
    version = i.peer if i.op in (*VERSIONED, Op.FREE) else -1
    weights, gradient, saved, half = (Kind.W, s, version, i.via), (Kind.DW, s, i.via), ("saved", s, b), ("half", s, b)
    sums = [(Kind.DW, s, part) for part in header.weight_shards.parts(s)] if s >= 0 and i.kind != Kind.T else []
    inputs: list[Name] = []
    back: list[Name] = []
    given: list[Name] = []
    if i.op in COMPUTE:
        inputs = [
            *((Kind.W, s, version, part) for part in header.weight_shards.parts(s)),
            *((Kind.X, p, b, header.graph.output_consumer(p, s)) for p in header.graph.producers[s]),
        ]
        back = [
            *inputs,
            saved,
            *((Kind.G, s, b, header.graph.gradient_consumer(s, c)) for c in header.graph.consumers[s]),
        ]
        given = [(Kind.G, p, b, header.graph.gradient_consumer(p, s)) for p in header.graph.producers[s]]
    named: Name = (i.kind, s, i.via)
    if i.kind in (Kind.X, Kind.G):
        named = (i.kind, s, b, i.via)
    elif i.kind == Kind.W:
        named = weights
    partial: Name = ("partial", s, i.via, i.peer)
    match i.op:
        case Op.FWD:
            return inputs, [*((Kind.X, s, b, via) for via in header.graph.output_consumers(s)), saved]
        case Op.RECOMPUTE:
            return inputs, [saved]
        case Op.BWD:
            return [*back, *sums], [*given, *sums]
        case Op.BWD_I:
            return back, [*given, half]
        case Op.BWD_W:
            return [*back, half, *sums], [*sums]
        case Op.RECV | Op.FETCH_W:
            return [], [partial if i.kind == Kind.DW else named]
        case Op.SEND | Op.FREE:
            return [named], []
        case Op.ADD:
            return [gradient, partial], [gradient]
        case Op.ALLREDUCE if i.kind == Kind.T:
            summed: list[Name] = [(Kind.DW, stage, -1) for stage in header.tied[s]]
            return summed, summed
        case Op.ALLREDUCE if i.kind in EXCHANGED:
            return [named], [named]
        case Op.ALLREDUCE:
            return [gradient], [gradient]
        case Op.STEP:
            return [(Kind.W, s, max(version - 1, -1), i.via), gradient], [weights]
    return [], []  # NORM


def _node(
    messages: Mapping[str, Any], header: Header, rank: int, index: int, i: Instruction,
    edges: tuple[list[int], list[int]], begin: int, length: int, size: int, tag: int,
) -> Any:  # fmt: skip
    attributes: dict[str, bool | int | str] = {"is_cpu_op": False}
    kind = COMP_NODE
    if i.op == Op.SEND:
        kind = SEND_NODE
        attributes |= {"comm_src": rank, "comm_dst": i.peer, "comm_size": size, "comm_tag": tag}
    elif i.op in (Op.RECV, Op.FETCH_W):
        kind = RECV_NODE
        attributes |= {"comm_src": i.peer, "comm_dst": rank, "comm_size": size, "comm_tag": tag}
    elif i.op in (Op.ALLREDUCE, Op.NORM) and len(header.groups[i.peer]) > 1:
        kind = COLLECTIVE_NODE
        attributes |= {"comm_type": ALL_REDUCE, "comm_size": size, "pg_name": str(i.peer)}
    node = messages["Node"](id=index, name=event_name(i), type=kind, start_time_micros=begin, duration_micros=length)
    node.data_deps.extend(edges[0])
    node.ctrl_deps.extend(edges[1])
    for key, value in attributes.items():
        wide = "int64_val" if key in _WIDE else "int32_val"
        field = "bool_val" if isinstance(value, bool) else "string_val" if isinstance(value, str) else wide
        node.attr.add(name=key, **{field: value})
    return node


def _put(out: BytesIO, message: Any) -> None:
    """Write a message after its length, the form that Chakra's files have."""
    from google.protobuf.proto import serialize_length_prefixed

    serialize_length_prefixed(message, out)


def _messages() -> dict[str, Any]:
    """Protobuf's classes of the messages of _SCHEMA, by name."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError:
        raise UsageError("Chakra traces need protobuf: pip install protobuf") from None
    file = descriptor_pb2.FileDescriptorProto(name="schedgen/chakra.proto", package="ChakraProtoMsg", syntax="proto3")
    types = descriptor_pb2.FieldDescriptorProto
    for message, fields in _SCHEMA.items():
        message_type = file.message_type.add(name=message)
        for name, number, kind, repeated in fields:
            label = types.LABEL_REPEATED if repeated else types.LABEL_OPTIONAL
            field = message_type.field.add(name=name, number=number, type=getattr(types, f"TYPE_{kind}"), label=label)
            if kind == "MESSAGE":
                field.type_name = ".ChakraProtoMsg.AttributeProto"
            elif name.endswith("_val"):
                field.oneof_index = 0
        if message == "AttributeProto":
            message_type.oneof_decl.add(name="value")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    descriptors = {name: pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}") for name in _SCHEMA}
    return {name: message_factory.GetMessageClass(descriptor) for name, descriptor in descriptors.items()}
