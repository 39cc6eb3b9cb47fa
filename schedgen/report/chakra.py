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
from collections.abc import Iterator
from itertools import pairwise, starmap

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

VERSION = "1.0.0"
LOAD_NODE, STORE_NODE, COMP_NODE, SEND_NODE, RECV_NODE, COLLECTIVE_NODE = 2, 3, 4, 5, 6, 7  # NodeType
ALL_REDUCE = 0  # CollectiveCommType
ALL_RANKS = "0"  # the name of the group that needs no entry
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

    Durations and starts are those of the run, in whole microseconds; a unit of its time is `unit` microseconds.
    """
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
        messages = [_field(1, VERSION)]  # GlobalMetadata, then a Node each
        for index, (i, edges, *numbers) in enumerate(nodes):
            if edges is not None:
                messages.append(_node(program.header, rank, index, i, edges, *numbers))
        yield f".{rank}.et", b"".join(_varint(len(message)) + message for message in messages)
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
    header: Header, rank: int, index: int, i: Instruction, edges: tuple[list[int], list[int]],
    begin: int, length: int, size: int, tag: int,
) -> bytes:  # fmt: skip
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
    # By number: id, name, type, ctrl_deps, data_deps, start_time_micros, duration_micros, attr. Zeros are left out.
    deps = [b"".join(map(_varint, each)) for each in reversed(edges)]
    fields = [(1, index), (2, event_name(i)), (3, kind), (4, deps[0]), (5, deps[1]), (6, begin), (7, length)]
    own = [(number, value) for number, value in fields if value]
    for key, value in attributes.items():
        wide = 9 if key in _WIDE else 7  # int64_val, int32_val
        number = 27 if isinstance(value, bool) else 29 if isinstance(value, str) else wide  # bool_val, string_val
        own.append((10, _field(1, key) + _field(number, value)))
    return b"".join(starmap(_field, own))


def _field(number: int, value: int | str | bytes) -> bytes:
    """A field of a message on the wire, as protobuf writes it: a number, or bytes behind their length."""
    if isinstance(value, int):
        return _varint(8 * number) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(8 * number + 2) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    """A number in groups of 7 bits, the lowest first."""
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + _varint(number >> 7)
