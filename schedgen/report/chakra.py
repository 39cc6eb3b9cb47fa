"""Schedules as MLCommons Chakra execution traces, one for each rank, which simulators such as ASTRA-sim replay.

A node is an instruction, and its id is the instruction's index in the rank's list:

    compute, ADD, STEP    COMP_NODE, with a duration
    SEND, RECV, FETCH_W   COMM_SEND_NODE and COMM_RECV_NODE, with bytes, peer and a tag that both ends share
    ALLREDUCE, NORM       COMM_COLL_NODE, or COMP_NODE in a group of one rank
    FREE                  no node; later instructions wait for the SENDs that the FREE waits for

A node has data dependencies on the instructions that defined what it reads and on the last one before it that
blocked the rank, because Chakra's feeder ignores all other dependencies. Those that only keep the order of the list are
control dependencies, too. The messages and their field numbers are from et_def.proto in github.com/mlcommons/chakra,
version 1.0.0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from io import BytesIO
from itertools import pairwise
from typing import Any

import numpy as np

from schedgen.analysis import analyse
from schedgen.ir.effects import COPIES, RECEIVERS, SENDERS, Effect, ops_that
from schedgen.ir.header import Header
from schedgen.ir.instructions import COMPUTE, EXCHANGED, Instruction, Op
from schedgen.ir.program import Program
from schedgen.report.chrome_trace import event_name
from schedgen.simulator.buffer_sizes import NUMBER
from schedgen.simulator.simulate import Simulation
from schedgen.util.arrays import places_in_runs
from schedgen.util.errors import UsageError

VERSION = "1.0.0"
LOAD_NODE, STORE_NODE, COMP_NODE, SEND_NODE, RECV_NODE, COLLECTIVE_NODE = 2, 3, 4, 5, 6, 7  # NodeType
ALL_REDUCE = 0  # CollectiveCommType
ALL_RANKS = "0"  # the name of the group that needs no entry
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
_WIDE = ("comm_size", "comm_type", "tensor_size")  # attributes of 64 bits

_WRITES = (Effect.DEFINE, Effect.RECEIVE)  # these need no earlier value
_UPDATES = (Effect.ADD, Effect.CHANGE)
_GIVE, _TAKE = ops_that(Effect.SEND), ops_that(Effect.RECEIVE)


def jobs_rounded_to_zero(run: Simulation, unit: float = 1.0) -> int:
    """How many jobs take some time, but 0 when it is rounded to microseconds; `unit` as in `chakra_traces`."""
    times = unit * run.lasts[run.program.rows_of(*COMPUTE)]
    return int(((times > 0) & (np.rint(times) == 0)).sum())


def chakra_traces(run: Simulation, unit: float = 1.0) -> Iterator[tuple[str, bytes]]:
    """(ending of a file's name, bytes) for each rank's trace, and last for the groups of collectives as JSON.

    Durations and starts are those of the run, in whole microseconds; a unit of its time is `unit` microseconds. Raises
    UsageError if protobuf is not installed.
    """
    messages = _messages()  # first, since it raises UsageError without protobuf
    from google.protobuf.proto import serialize_length_prefixed

    program = run.program
    table = program.rows
    begin, length = (np.rint(unit * times).astype(np.int64) for times in (run.start, run.end - run.start))
    sends, receives, _ = analyse(program).messages
    size, tag = run.message_bytes.copy(), np.zeros(len(program), np.int64)
    pair = table.rank[sends].astype(np.int64) * program.header.workers + table.to[sends]
    order = np.lexsort((sends, pair))
    tag[sends[order]] = places_in_runs(pair[order])
    size[receives], tag[receives] = size[sends], tag[sends]
    size += run.summed_bytes
    size[table.op == Op.NORM] = NUMBER * (program.header.microbatches + 1)  # losses, and the norm
    for rank, (start, stop) in enumerate(pairwise(program.bounds.tolist())):
        columns = (column[start:stop].tolist() for column in (begin, length, size, tag))
        instructions = program.instructions(rank)
        nodes = zip(instructions, dependencies(program, rank), *columns, strict=True)
        out = BytesIO()
        serialize_length_prefixed(messages["GlobalMetadata"](version=VERSION), out)
        for index, (i, edges, *numbers) in enumerate(nodes):
            if edges is not None:
                node = _node(messages, program.header, rank, index, i, edges, *numbers)
                serialize_length_prefixed(node, out)
        yield f".{rank}.et", out.getvalue()
    header = program.header
    groups = {group_name(header, group): list(ranks) for group, ranks in enumerate(header.groups)}
    groups.pop(ALL_RANKS, None)
    yield ".groups.json", f"{json.dumps(groups)}\n".encode()


def group_name(header: Header, group: int) -> str:
    """The name of a group: its number; "0" means all ranks, so if group 0 is not all ranks, it gets another name."""
    return str(group or (0 if len(header.groups[0]) == header.workers else len(header.groups)))


def dependencies(program: Program, rank: int) -> Iterator[tuple[list[int], list[int]] | None]:
    """For each instruction of a rank, its dependencies' indices: (all, those only for the list's order); FREE: None."""
    start, stop = program.bounds[rank : rank + 2].tolist()
    accesses = analyse(program).accesses
    first = accesses.begin(np.arange(start, stop + 1)).tolist()
    touched = slice(first[0], first[-1])
    effects = accesses.effect[touched].tolist()
    buffers = list(zip(accesses.buffer[touched].tolist(), accesses.number[touched].tolist(), strict=True))
    defined: dict[tuple[int, int], int] = {}
    sent: dict[tuple[int, int], list[int]] = {}  # SENDs that may still be in flight
    received: set[int] = set()
    reductions: list[int] = []
    blocking: list[int] = []  # the last blocking instruction, and the SENDs that a FREE or STEP after it waited for
    for place, i in enumerate(program.instructions(rank)):
        does = [(effects[k - first[0]], buffers[k - first[0]]) for k in range(first[place], first[place + 1])]
        for effect, buffer in does:
            blocking += sent.pop(buffer, []) if effect in (Effect.END, Effect.CHANGE) else []
        if i.op == Op.FREE:
            defined.pop(does[0][1], None)
            yield None
            continue
        data = {defined[buffer] for effect, buffer in does if effect not in _WRITES and buffer in defined}
        if i.op == Op.NORM:
            data.update(reductions)
        yield sorted(data.union(blocking)), sorted(set(blocking) - data)
        if i.op in _GIVE:
            sent.setdefault(does[0][1], []).append(place)
            blocking += data & received  # it relays a received buffer, and waits for it
        elif i.op == Op.ALLREDUCE and i.kind not in EXCHANGED:
            reductions.append(place)
        elif i.op in _TAKE:
            received.add(place)
        else:
            blocking = [place]
        defined.update({buffer: place for effect, buffer in does if effect in (*_WRITES, *_UPDATES)})


def _node(
    messages: Mapping[str, Any], header: Header, rank: int, index: int, i: Instruction,
    edges: tuple[list[int], list[int]], begin: int, length: int, size: int, tag: int,
) -> Any:  # fmt: skip
    attributes: dict[str, bool | int | str] = {"is_cpu_op": False}
    kind = COMP_NODE
    if i.op in SENDERS:
        kind = SEND_NODE
        attributes |= {"comm_src": rank, "comm_dst": i.to, "comm_size": size, "comm_tag": tag}
    elif i.op in RECEIVERS:
        kind = RECV_NODE
        attributes |= {"comm_src": i.source, "comm_dst": rank, "comm_size": size, "comm_tag": tag}
    elif i.op in COPIES:
        kind = STORE_NODE if i.op == Op.OFFLOAD else LOAD_NODE
        attributes |= {"tensor_size": size}
    elif i.op in (Op.ALLREDUCE, Op.NORM) and len(header.groups[i.group]) > 1:
        kind = COLLECTIVE_NODE
        attributes |= {"comm_type": ALL_REDUCE, "comm_size": size, "pg_name": group_name(header, i.group)}
    node = messages["Node"](id=index, name=event_name(i), type=kind, start_time_micros=begin, duration_micros=length)
    node.data_deps.extend(edges[0])
    node.ctrl_deps.extend(edges[1])
    for key, value in attributes.items():
        wide = "int64_val" if key in _WIDE else "int32_val"
        field = "bool_val" if isinstance(value, bool) else "string_val" if isinstance(value, str) else wide
        node.attr.add(name=key, **{field: value})
    return node


def _messages() -> dict[str, Any]:
    """Protobuf's classes for the messages of _SCHEMA, by name."""
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
