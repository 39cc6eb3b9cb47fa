"""Slices of stages and substages: what is compiled, what `check` refuses, what an exchange costs."""

from __future__ import annotations

import json

import numpy as np
import pytest
from compiled import compiled

from schedgen.checker import check
from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.ir.instructions import Op
from schedgen.ir.program import Program
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.simulator.buffer_sizes import buffer_sizes
from schedgen.simulator.footprint import LINE, footprint
from schedgen.simulator.machine import Machine
from schedgen.simulator.simulate import simulate
from schedgen.simulator.stats import simulation_numbers
from schedgen.util.errors import RefusedFile, UsageError


def listed(program, rank):
    return [str(i) for i in program.instructions(rank)]


def jobs(program, rank):
    """FWDs and BWDs of a rank as (letter, stage, microbatch)."""
    return [(i.op.__class__(i.op), i.stage, i.mb) for i in program.instructions(rank) if i.op in (Op.FWD, Op.BWD)]


# What is compiled


def test_a_slice_is_a_stage_of_its_own_and_exchanges_what_it_gives():
    program = compiled("1f1b", 2, 1, tensor=2, prefetch=0)
    header, slices = program.header, program.header.tensor_parallel
    assert (header.workers, header.stages, slices.degree, slices.replicated) == (4, 4, 2, (1,))
    assert header.graph.edges == ((0, 2), (1, 3)) and header.owners == ((0,), (1,), (2,), (3,))
    assert header.tied == ((0, 1),)  # slices share what is not cut; a replicated stage's are copies
    assert header.groups == ((0, 1, 2, 3), (0, 1))
    assert listed(program, 1) == [
        '{"op": "FWD", "stage": 1, "mb": 0}',
        '{"op": "ALLREDUCE", "buf": "x.1.0", "group": 1}',
        '{"op": "SEND", "buf": "x.1.0", "to": 3}',
        '{"op": "RECV", "buf": "g.1.0", "from": 3}',
        '{"op": "BWD", "stage": 1, "mb": 0}',
        '{"op": "FREE", "buf": "g.1.0"}',
        '{"op": "ALLREDUCE", "buf": "t.0", "group": 1}',
        '{"op": "NORM", "group": 0}',
        '{"op": "STEP", "stage": 1}',
        '{"op": "FREE", "buf": "x.1.0"}',
        '{"op": "FREE", "buf": "dw.1"}',
    ]


def test_gradients_of_a_split_stage_are_exchanged_before_they_leave():
    part = listed(compiled("1f1b", 3, 1, tensor=2, replicated_stages=(0,)), 2)
    place = part.index('{"op": "BWD", "stage": 2, "mb": 0}')
    exchange = part.index('{"op": "ALLREDUCE", "buf": "g.0.0", "group": 1}')
    assert place < exchange < part.index('{"op": "SEND", "buf": "g.0.0", "to": 0}')


def test_substages_run_one_behind_the_other():
    program = compiled("1f1b", 2, 3, substages=3)
    assert program.header.graph.edges == tuple((s, s + 1) for s in range(5)) and program.header.workers == 2
    undivided = compiled("1f1b", 2, 3)
    for rank in range(2):
        order = [
            (op, 3 * s + p, b)
            for op, s, b in jobs(undivided, rank)
            for p in (range(3) if op == Op.FWD else reversed(range(3)))
        ]
        assert jobs(program, rank) == order


def test_a_scheme_of_one_s_own_may_place_slices_itself(run, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def w(s, b, d, t):\n    return 3 - 2 * s - t, 3 - 2 * s - t\n\n\ndef n(s, b, d):\n    return b\n")
    command = ("compile", path, "--stages", 2, "--microbatches", 2, "--tensor", 2, "-o", tmp_path / "out.json")
    assert run(*command) == (0, "", "")
    header = json.loads((tmp_path / "out.json").read_text())
    assert header["owners"] == [[3], [2], [1], [0]] and header["tensor"] == {"degree": 2, "replicated": [1]}
    # Without t, w is for the 4 / 2 workers of one slice.
    path.write_text(
        "def w(s, b, d, *, workers):\n    return s % workers, s % workers\n\n\ndef n(s, b, d):\n    return b\n"
    )
    assert run(*command, "--workers", 4).code == 0
    assert json.loads((tmp_path / "out.json").read_text())["owners"] == [[0], [1], [2], [3]]


def test_two_slices_of_a_stage_are_on_two_workers():
    scheme = Scheme("same", 2, lambda s, b, d, t: (0 * t, 0 * t), lambda s, b, d: b, "n", "greedy", by_slice=True)
    with pytest.raises(UsageError, match=r"w puts two slices of F\(0, 0\) on worker 0: the 2 slices"):
        compile(scheme, Sizes(2, 2, 2), Options(tensor=2))


DRIFTING = """import numpy as np


def w(s, b, d, t):
    worker = np.where(t == 0, 2 * (b % 2), 1 + 2 * (b // 2 % 2)) + 0 * s
    return worker, worker


def n(s, b, d, *, stages):
    return b * 2 * stages + np.where(d == 0, s, 2 * stages - 1 - s)
"""


def test_slices_of_a_replicated_stage_that_would_drift_apart_are_refused(run, refused, graph_file, tmp_path):
    """Slice 0 adds up (0 + 2) + (1 + 3), slice 1 (0 + 1) + (2 + 3): no order makes their bits the same."""
    path = tmp_path / "two.py"
    path.write_text(DRIFTING)
    graph = ("--graph", graph_file(stages=8, replicated=[0]))
    sizes = ("--stages", 1, "--microbatches", 4, "--workers", 4, "--tensor", 2)
    message = refused(run("compile", path, *graph, *sizes, "-o", "-"), 2)
    assert message.startswith(
        "schedgen: w: the copies of replicated stage 0 would drift apart, for its slices 0 and 1 "
    )
    program = compiled(str(path), 1, 4, 4, tensor=2, substages=8, replicated_stages=(0,))
    words = r"program:\d+: rank 1: dw.1 is not added up in the order and grouping of dw.0, .* \(rule 11: "
    with pytest.raises(RefusedFile, match=words):
        check(program)


@pytest.mark.parametrize(
    ("op", "name", "sizes", "more"),
    [(Op.BWD, "gpipe", (1, 2), {}), (Op.ADD, "fsdp", (2, 4, 8), {"replicated_stages": (0,), "fan_out": 8})],
)
def test_another_order_on_one_slice_of_a_replicated_stage_is_refused(op, name, sizes, more):
    """The same change on all slices is right."""
    program = compiled(name, *sizes, tensor=2, **more)
    check(program)
    order = np.arange(len(program))
    for slice in (1, 0):
        rows = np.flatnonzero((program.rows.op == op) & (program.rows.rank == slice) & (program.rows.stage == slice))
        order[rows[:2]] = rows[:2][::-1]
        changed = Program(program.header, program.rows.take(order))
        if slice == 0:
            check(changed)
            return
        with pytest.raises(RefusedFile, match=r"rank 1: dw.1 is not added up .* \(rule 11: "):
            check(changed)


# What is refused


X_SUM, G_SUM = ({"op": "ALLREDUCE", "buf": buf} for buf in ("x.2.0", "g.0.0"))


# What it costs


def test_an_exchange_is_on_all_links_and_the_rank_waits_for_it():
    T, alpha, beta, size = 3, 0.5, 0.01, 90
    program = compiled("ddp", 2, 1, T, tensor=T)
    run = simulate(program, {"F": 1, "B": 2}, Machine(alpha, beta, activation=size))
    ring = 2 * (T - 1) * beta * size / T + 2 * alpha
    numbers = simulation_numbers(program, run)
    assert numbers["latency"] == pytest.approx(6 + ring)  # x of stage 0; the last stage is replicated
    assert numbers["idle"]["reduction"] == pytest.approx(T * (ring + 2 * alpha))  # NORM exchanges numbers in 2 rounds
    assert numbers["exchanges"] == {"sums": 1, "bytes": 2 * (T - 1) * size}


def test_the_room_for_exchanges_is_counted():
    program = compiled("ddp", 3, 2, 2, tensor=2)
    size = 1000
    part = -(-size // (2 * LINE)) * LINE
    none = compiled("ddp", 3, 2, 2, tensor=2, replicated_stages=(0, 1))
    sizes = buffer_sizes(Machine(activation=size), program.header.stages)
    assert (footprint(program, sizes).owned - footprint(none, sizes).owned == size + part).all()


def test_other_commands_know_exchanges(run, graph_file, tmp_path):
    path = tmp_path / "file.json"
    sizes = ("--stages", 2, "--microbatches", 2, "--tensor", 2)
    assert run("compile", "zb-h1", *sizes, "--graph", graph_file(stages=4), "-o", path) == (0, "", "")
    text = path.read_bytes()
    assert run("seal", path) == (0, "", "") and path.read_bytes() == text
    numbers = json.loads(run("stats", path, "--json").out)
    assert numbers["exchanges"] == sum(worker["exchanges"] for worker in numbers["workers"]) // 2 == 10
    assert "exchanges" in run("stats", path).out and "sums 10" in run("simulate", path).out
    assert "4 workers, 8 stages (4 in 2 slices each), 2 microbatches" in run("draw", path).out
    assert run("draw", path, "-o", tmp_path / "a.html").code == 0
    assert run("simulate", path, "--trace", tmp_path / "a.trace").code == 0
    assert run("export", path, "--to", "torch-jobs", "-o", "-").code == 2
    assert run("export", path, "--to", "chakra", "-o", tmp_path / "et").code == 0
    other = tmp_path / "other.json"
    assert run("compile", "zb-h1", *sizes, "--graph", graph_file(stages=4, replicated=[0]), "-o", other).code == 0
    assert "tensor replicated: (3,) -> (0, 3)" in run("diff", path, other).out
