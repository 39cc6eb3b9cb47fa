"""--sums: owners of a stage sum its gradient by messages along a ring, a tree, or inside hosts and then between."""

from __future__ import annotations

import json

import numpy as np
import pytest
from edited_programs import comes_back, refused_less_or_twice, runs_with, taken, written

from schedgen.checker import check
from schedgen.cli.main import main
from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.compiler.sum_trees import RING, SUMS, TREE, TWO_LEVEL, sum_trees
from schedgen.ir.file import parse
from schedgen.ir.instructions import Kind, Op
from schedgen.schemes import load
from schedgen.schemes.scheme import Sizes
from schedgen.simulator.buffer_sizes import buffer_sizes, message_bytes
from schedgen.simulator.machine import Machine
from schedgen.simulator.network import topology
from schedgen.simulator.simulate import simulate
from schedgen.util.errors import RefusedFile, UsageError

BY_MESSAGES = SUMS[1:]


def hosts_of(devices):
    """Hosts of so many devices."""
    return lambda workers: np.arange(workers, dtype=np.int32) // devices


def compiled(name, sums, workers, stages=2, devices=4, microbatches=None, **sizes):
    sized = Sizes(stages, microbatches or 2 * workers, workers, **sizes)
    return compile(load(name, sized), sized, Options(sums=sums, hosts=hosts_of(devices)))


@pytest.mark.parametrize("sums", BY_MESSAGES)
@pytest.mark.parametrize("workers", range(2, 9))
def test_every_scheme_is_proved_and_runs(sums, workers):
    half = {"stages": max(workers // 2, 1), "replicas": 2}
    cases = [("ddp", {}), ("fsdp", half), ("1f1b", half), ("lpp", {"groups": 2}), ("zb-v", half | {"stages": workers})]
    for name, sizes in cases if workers % 2 == 0 else [("ddp", {})]:
        for devices in (1, 3, 4):
            program = compiled(name, sums, workers, devices=devices, **({"stages": workers} | sizes))
            runs_with(check(program), program)
            assert not program.is_one_of(Op.ALLREDUCE).any()
    comes_back(program)


def of_sums(program):
    """The rows of the sums: messages of gradients, ADDs and FREEs."""
    return np.flatnonzero(program.rows.kind == Kind.DW)


@pytest.mark.parametrize("sums", BY_MESSAGES)
@pytest.mark.parametrize(("name", "sizes"), [("ddp", {}), ("fsdp", {"replicas": 2})])
def test_a_row_of_a_sum_less_twice_or_swapped_is_refused_or_changes_nothing(sums, name, sizes):
    program = compiled(name, sums, 4, devices=2, microbatches=4, **sizes)
    rows = of_sums(program)
    for row in rows.tolist():
        refused_less_or_twice(program, row, row)
    for row, other in zip(rows[:-1].tolist(), rows[1:].tolist(), strict=True):
        order = np.arange(len(program))
        order[[row, other]] = other, row
        changed = taken(program, order)
        if program.rows.rank[row] == program.rows.rank[other]:
            try:
                memory = check(changed)
            except RefusedFile:
                continue
            runs_with(memory, changed)


def moved(program, row, to):
    return taken(program, np.insert(np.delete(np.arange(len(program)), row), to - (row < to), row))


def test_each_wrong_sum_is_refused_for_what_is_wrong_with_it():
    program = compiled("ddp", TREE, 3, stages=1)  # rank 1 sends its sum to rank 0, frees it, and adds the total
    table = program.rows
    send, free, add, *_ = np.flatnonzero((table.rank == 1) & (table.kind == Kind.DW) & (table.op != Op.RECV)).tolist()
    assert [table.op[row] for row in (send, free, add)] == [Op.SEND, Op.FREE, Op.ADD]
    last_backward = int(program.rows_of(Op.BWD)[table.rank[program.rows_of(Op.BWD)] == 1][-1])
    for wrong, words in (
        (taken(program, np.delete(np.arange(len(program)), free)), "this sum is not complete here"),
        (moved(program, last_backward, add), "what follows a sum that is sent must be the total"),
    ):
        with pytest.raises(RefusedFile, match=words):
            check(wrong)


def test_owners_that_add_the_same_gradients_in_different_orders_are_refused():
    """Both owners send their sum and add the other's: each gradient counts once, but the bits may differ."""
    sizes = Sizes(1, 2, 2)
    program = compile(load("ddp", sizes), sizes, Options(sums=TREE))
    text = json.loads(written(program))
    for rank, listed in enumerate(text["programs"]):
        norm = next(k for k, i in enumerate(listed) if i["op"] == "NORM")
        jobs = [i for i in listed[:norm] if i.get("buf") != "dw.0"]
        other = 1 - rank
        receive = {"op": "RECV", "buf": "dw.0", "from": other}
        send = {"op": "SEND", "buf": "dw.0", "to": other}
        moves = [send, receive] if rank else [receive, send]
        listed[:norm] = [*jobs, *moves, {"op": "ADD", "buf": "dw.0", "from": other}]
    with pytest.raises(RefusedFile, match=r"this sum is not complete here \(rule 5"):
        check(parse(json.dumps(text), "file"))


@pytest.mark.parametrize("workers", [8, 64])
def test_two_levels_carry_no_more_between_hosts_than_any_sum_must(workers):
    devices, hosts, size = workers // 8 * 4 if workers == 8 else 8, 2 if workers == 8 else 8, 2**20
    carried = {}
    for sums in (RING, TWO_LEVEL):
        program = compiled("ddp", sums, workers, stages=1, devices=devices, microbatches=workers)
        sends = program.rows_of(Op.SEND)
        bytes = message_bytes(program, buffer_sizes(Machine(weight=size), 1), sends)
        out, to = (hosts_of(devices)(workers)[ranks] for ranks in (program.rows.rank[sends], program.rows.to[sends]))
        carried[sums] = [np.bincount(end[out != to], bytes[out != to], minlength=hosts) for end in (out, to)]
        of_links = np.bincount(program.rows.rank[sends], bytes, minlength=workers)
        assert sums == TWO_LEVEL or (of_links == 2 * (workers - 1) * size // workers).all()
    assert (np.array(carried[TWO_LEVEL]) == 2 * (hosts - 1) * size // hosts).all()
    assert (np.array(carried[RING]) == 2 * (workers - 1) * size // workers).all()


def test_two_levels_are_faster_than_the_rest_between_slow_hosts():
    network = topology(2, 2, (2e-6, 1e-3), (1 / 9e9, 1 / 12.5e6))  # 100 Mbit/s, 1 ms
    machine, times = Machine(weight=2_000_000).on(network), {}
    for sums in SUMS:
        program = compiled("ddp", sums, 4, stages=4, devices=2, microbatches=8)
        times[sums] = simulate(program, {"F": 0.02, "B": 0.04}, machine).end.max()
    assert min(times, key=times.__getitem__) == TWO_LEVEL
    assert times[TWO_LEVEL] < 0.7 * times["allreduce"]  # a card carries half the bytes


def test_trees_reach_every_owner_and_begin_at_different_hosts():
    for owners in range(2, 20):
        for devices in range(1, 7):
            for sums in BY_MESSAGES:
                trees = sum_trees(sums, np.arange(owners) // devices, 2)
                assert ((trees < 0).sum(axis=1) == 1).all()
                above = np.where(trees < 0, np.arange(owners), trees)
                for _ in range(owners):
                    above = np.take_along_axis(above, above, axis=1)
                roots = np.argmax(trees < 0, axis=1)
                assert (above == roots[:, None]).all()  # all ways lead there
                if sums == TWO_LEVEL:
                    count = min(len(trees), -(-owners // devices))
                    assert len(set((roots // devices).tolist())) == count


def test_what_has_no_such_sums_is_refused_in_one_sentence(tmp_path, capsys):
    graph = tmp_path / "graph"
    graph.write_text('{"stages": 4, "tied": [[0, 3]]}')
    sizes = ["--stages", "4", "--microbatches", "8", "--workers", "4", "-o", str(tmp_path / "out.json")]
    for command, words in (
        (["ddp", "--sums", "two-level"], "--sums two-level needs --machine FILE or --topology HxD"),
        (["ddp", "--sums", "two-level", "--topology", "1x3"], "the machine has 3 devices, but there are 4 workers"),
        (["ddp", "--sums", "ring", "--topology", "2x2"], "tell compile the hosts for --sums two-level"),
        (["ddp", "--topology", "2x2"], "tell compile the hosts for --sums two-level"),
        (["1f1b", "--sums", "ring"], "--sums ring: no stage has several owners"),
        (["ddp", "--sums", "ring", "--graph", str(graph)], "--sums ring does not go with ties"),
        (["ddp", "--sums", "tree", "--forward"], "--sums tree does not go with --forward"),
        (["fsdp", "--sums", "tree", "--shards", "2"], "--sums tree does not go with --shards"),
        (["ddp", "--sums", "tree", "--tensor", "2"], "--sums tree does not go with --tensor"),
        (["ddp", "--sums", "tree", "--updates", "stash"], "--sums tree does not go with --updates stash"),
    ):
        assert main(["compile", *command, *sizes]) == 2
        out, err = capsys.readouterr()
        assert words in err and err.count("\n") == 1 and not out, err
    with pytest.raises(UsageError, match="sums 'star' is none of allreduce, ring, tree, two-level"):
        compiled("ddp", "star", 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw.update(parts=[0, 4]), "parts must be 2 numbers of at least 1"),
        (lambda raw: raw.update(parts=[4]), "parts must be 2 numbers"),
        (lambda raw: raw.update(parts=[2**30, 2**30]), "parts of gradients"),
        (lambda raw: raw.update(parts=[2, 4]), "there is no such shard"),
        (lambda raw: raw["lowering"].pop("sums"), "parts: only what several owners of a stage sum by messages"),
        (lambda raw: raw.update(tied=[[0, 1]]), "lowering: sums of weights that are tied"),
        (lambda raw: raw["lowering"].update(sums=7), "lowering: sums must be a printable string"),
    ],
)
def test_a_file_with_wrong_parts_is_refused(change, words):
    raw = json.loads(written(compiled("ddp", RING, 4, microbatches=4)))
    change(raw)
    with pytest.raises(RefusedFile, match=words):
        check(parse(json.dumps(raw), "file"))
