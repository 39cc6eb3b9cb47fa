"""Exports: Chakra traces hold the schedule, its sizes and its dependencies; Chrome traces are those of simulate."""

from __future__ import annotations

import io
import json
import random
from collections import Counter, defaultdict
from typing import NamedTuple

import pytest

from schedgen.ir.file import read
from schedgen.ir.instructions import COMPUTE, Op
from schedgen.simulator.simulate import simulate

# et_def.proto of MLCommons Chakra: number -> name of the fields of Node and AttributeProto that are written.
NODE = {1: "id", 2: "name", 3: "type", 4: "ctrl_deps", 5: "data_deps", 6: "start", 7: "duration", 10: "attr"}
VALUES = (7, 9, 27, 29)  # int32_val, int64_val, bool_val, string_val
COMP, SEND, RECV, COLLECTIVE = 4, 5, 6, 7


class Node(NamedTuple):
    id: int
    name: str
    type: int
    ctrl_deps: list[int]
    data_deps: list[int]
    start: int
    duration: int
    attr: dict[str, object]


def varint(data):
    value = shift = 0
    while True:
        (byte,) = data.read(1)
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value


def fields(data):
    """(number, value) of a message in protobuf's wire format; values are numbers or bytes."""
    data = io.BytesIO(data)
    end = len(data.getbuffer())
    while data.tell() < end:
        key = varint(data)
        assert key & 7 in (0, 2)
        yield key >> 3, varint(data) if key & 7 == 0 else data.read(varint(data))


def by_hand(data):
    """(version, nodes) of a trace, read by the wire format's definition alone."""
    source, messages = io.BytesIO(data), []
    while source.tell() < len(data):
        messages.append(list(fields(source.read(varint(source)))))
    nodes = []
    for message in messages[1:]:
        node = {"id": 0, "start": 0, "duration": 0, "ctrl_deps": [], "data_deps": [], "attr": {}}
        for number, value in message:
            name = NODE[number]
            if name == "attr":
                attribute = dict(fields(value))
                (kind,) = set(attribute) & set(VALUES)
                value = attribute[kind].decode() if kind == 29 else attribute[kind]
                node["attr"][attribute[1].decode()] = value
            elif name.endswith("_deps"):
                packed = io.BytesIO(value)
                while packed.tell() < len(value):
                    node[name].append(varint(packed))
            else:
                node[name] = value.decode() if name == "name" else value
        nodes.append(Node(**node))
    return dict(messages[0])[1].decode(), nodes


SCHEDULES = ("1f1b", "fsdp", "lpp", "zb-v", "chimera")


@pytest.fixture
def exported(run, tmp_path):
    """A program, and the nodes of every rank's trace of it."""

    def exported(source, *options):
        (tmp_path / "schedule.json").write_text(source)
        command = ("export", tmp_path / "schedule.json", "--to", "chakra", "-o", tmp_path / "trace")
        assert run(*command, *options) == (0, "", "")
        with (tmp_path / "schedule.json").open("rb") as file:
            program, _ = read(file, "schedule")
        ranks = range(program.header.workers)
        assert sorted(path.name for path in tmp_path.glob("trace*")) == sorted(
            [*(f"trace.{rank}.et" for rank in ranks), "trace.groups.json"]
        )
        traces = [by_hand((tmp_path / f"trace.{rank}.et").read_bytes()) for rank in ranks]
        assert {version for version, _ in traces} == {"1.0.0"}
        return program, [nodes for _, nodes in traces]

    return exported


@pytest.mark.parametrize("scheme", SCHEDULES)
def test_every_instruction_is_its_node_and_every_message_has_two_ends(scheme, exported, golden):
    program, ranks = exported(golden[scheme], "--activation", "1000", "--weight", "5000")
    ends = defaultdict(list)
    for rank, nodes in enumerate(ranks):
        listed = program.instructions(rank)
        kinds = Counter(node.type for node in nodes)
        ops = Counter(Op(i.op) for i in listed)
        assert kinds[COMP] == sum(ops[op] for op in (*COMPUTE, Op.ADD, Op.STEP))
        assert kinds[SEND] == ops[Op.SEND] and kinds[RECV] == ops[Op.RECV] + ops[Op.FETCH_W]
        assert kinds[COLLECTIVE] == ops[Op.ALLREDUCE] + ops[Op.NORM]
        for node in nodes:
            i = listed[node.id]
            assert node.name.split()[0] == Op(i.op).name
            assert not node.attr["is_cpu_op"]
            if node.type in (SEND, RECV):
                assert node.attr["comm_size"] == (1000 if node.name.split()[1][0] in "xg" else 5000)
                peer = node.attr["comm_dst" if node.type == SEND else "comm_src"]
                assert peer == i.operand and node.attr["comm_src" if node.type == SEND else "comm_dst"] == rank
                message = tuple(node.attr[key] for key in ("comm_src", "comm_dst", "comm_tag"))
                ends[message].append((node.type, node.name.split()[1]))
            if node.type == COLLECTIVE:
                assert node.attr["comm_type"] == 0 and node.attr["pg_name"] == str(i.group)
    assert ends
    for (first, buffer), (second, same) in (sorted(pair) for pair in ends.values()):
        assert (first, second) == (SEND, RECV) and buffer == same


def test_edges_say_what_is_read_and_what_stood_before(exported, golden):
    _, ranks = exported(golden["1f1b"], "--cost", "F=10,B=20")
    by_name = {node.name: node for node in ranks[1]}

    def behind(name):
        ids = {node.id: node.name for node in ranks[1]}
        order = by_name[name].ctrl_deps
        assert set(order) <= set(by_name[name].data_deps)
        return [[ids[at] for at in deps] for deps in ([a for a in by_name[name].data_deps if a not in order], order)]

    assert behind("FWD 1 0") == [["RECV x.0.0"], []]
    assert behind("SEND x.1.0") == [["FWD 1 0"], []]
    assert behind("FWD 1 2") == [["RECV x.0.2"], ["FWD 1 1"]]
    assert behind("BWD 1 0")[1] == ["SEND x.1.0", "FWD 1 2"]  # FREE x.1.0 waits for the SEND
    assert behind("BWD 1 1")[0] == ["RECV x.0.1", "FWD 1 1", "BWD 1 0", "RECV g.1.1"]
    assert behind("STEP 1") == [["BWD 1 7"], ["NORM"]]
    assert [by_name[name].duration for name in ("FWD 1 0", "BWD 1 0", "STEP 1")] == [10, 20, 0]


@pytest.mark.parametrize("scheme", SCHEDULES)
def test_replayed_by_its_data_dependencies_a_trace_takes_the_simulated_times(scheme, exported, golden):
    """A node starts when all its dependencies have ended, a receive ends when its message is sent: the longest path.

    Chakra's feeder issues a node when its data dependencies are done, and reads no other dependencies.
    """
    program, ranks = exported(golden[scheme])
    sent, entered, end = {}, defaultdict(dict), [{} for _ in ranks]
    left = [(rank, node) for rank, nodes in enumerate(ranks) for node in nodes]
    while left:
        waiting = []
        for rank, node in left:
            starts = [end[rank].get(dep) for dep in node.data_deps] or [0]
            message = tuple(node.attr.get(key) for key in ("comm_src", "comm_dst", "comm_tag"))
            if node.type == RECV:
                starts.append(sent.get(message))
            if node.type == COLLECTIVE and None not in starts:
                together = entered[node.name, node.attr["pg_name"]]
                together[rank] = max(starts)
                members = program.header.groups[int(node.attr["pg_name"])]
                starts = [together.get(member) for member in members]
            if None in starts:
                waiting.append((rank, node))
                continue
            end[rank][node.id] = max(starts) + node.duration
            if node.type == SEND:
                sent[message] = max(starts)
        assert len(waiting) < len(left)
        left = waiting
    run = simulate(program, program.header.cost)
    for rank, nodes in enumerate(ranks):
        for node in nodes:
            if node.type == COMP:
                row = int(program.bounds[rank]) + node.id
                assert end[rank][node.id] == run.end[row] and node.start == run.start[row], (rank, node)


@pytest.mark.parametrize("scheme", SCHEDULES)
def test_a_feeder_gives_the_jobs_out_in_the_order_of_the_list(scheme, exported, golden):
    """Of the nodes whose data dependencies are done it issues that of the lowest id; an issued node may end any time.

    Messages are taken as arrived, so that nothing but the trace keeps the order.
    """
    _, ranks = exported(golden[scheme])
    chance = random.Random(0)
    for nodes in ranks:
        waiting, running, given = {node.id: set(node.data_deps) for node in nodes}, [], []
        assert all(len(node.data_deps) == len(set(node.data_deps)) for node in nodes)  # the feeder removes each once
        while waiting or running:
            free = min((at for at, needs in waiting.items() if not needs), default=None)
            if free is not None and (not running or chance.random() < 0.5):
                given.append(free)
                running.append(free)
                del waiting[free]
                continue
            done = running.pop(chance.randrange(len(running)))
            for needs in waiting.values():
                needs.discard(done)
        jobs = {node.id for node in nodes if node.type == COMP}
        assert [at for at in given if at in jobs] == sorted(jobs)


def test_groups_of_collectives_are_listed_by_name_and_all_ranks_need_none(exported, golden, tmp_path):
    exported(golden["lpp"])
    groups = json.loads((tmp_path / "trace.groups.json").read_text())
    assert groups == {"1": [0, 2], "2": [1, 3]}
    exported(golden["ddp"], "--weight", "64")
    assert json.loads((tmp_path / "trace.groups.json").read_text()) == {}


def regrouped(text):
    """A file whose groups are in the reverse order."""
    file = json.loads(text)
    file["groups"].reverse()
    for i in (i for instructions in file["programs"] for i in instructions if "group" in i):
        i["group"] = len(file["groups"]) - 1 - i["group"]
    return json.dumps(file)


@pytest.mark.parametrize("what", ["slices that only exchange", "groups in another order"])
def test_a_collective_of_some_ranks_names_them(what, exported, golden, run, tmp_path):
    """Group number 0, too, since simulators take that name for all ranks."""
    path, graph = tmp_path / "grouped.json", tmp_path / "tensor.graph"
    if what == "groups in another order":
        path.write_text(regrouped(golden["lpp"]))
        assert run("seal", path).code == 0
    else:
        graph.write_text('{"stages": 4, "replicated": [0, 3]}')
        sizes = ("--graph", graph, "--workers", 4, "--microbatches", 4, "--tensor", 2)
        assert run("compile", "1f1b", *sizes, "--forward", "-o", path).code == 0
    program, ranks = exported(path.read_text())
    assert len(program.header.groups[0]) < program.header.workers
    groups, seen = json.loads((tmp_path / "trace.groups.json").read_text()), set()
    assert "0" not in groups
    for rank, nodes in enumerate(ranks):
        listed = program.instructions(rank)
        for node in nodes:
            if node.type == COLLECTIVE:
                assert groups[node.attr["pg_name"]] == list(program.header.groups[listed[node.id].group])
                seen.add(node.attr["pg_name"])
    assert seen == groups.keys()


@pytest.mark.parametrize("alpha", ["0.5", "0"])
def test_a_chrome_trace_has_an_arrow_for_every_message(alpha, golden, run, tmp_path):
    path = tmp_path / "1f1b.json"
    path.write_text(golden["1f1b"])
    assert run("simulate", path, "--cost", "F=1,B=3", "--alpha", alpha, "--trace", tmp_path / "b").code == 0
    assert run("stats", path, "--measured", tmp_path / "b").code == 0
    events = json.loads((tmp_path / "b").read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X" and e["name"].startswith("SEND")]
    begins, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    assert {(e["args"]["instruction"], e["tid"], e["ts"]) for e in slices} == {
        (e["name"], e["tid"], e["ts"]) for e in begins.values()
    }
    for message, begin in begins.items():
        assert ends[message]["tid"] == json.loads(begin["name"])["to"]
        assert ends[message]["ts"] >= begin["ts"] + float(alpha)


def test_wrong_usage_is_one_sentence(golden, run, refused, tmp_path):
    path = tmp_path / "1f1b.json"
    path.write_text(golden["1f1b"])
    assert "nowhere" in refused(run("export", path, "--to", "chakra", "-o", tmp_path / "nowhere" / "trace"), 1)
