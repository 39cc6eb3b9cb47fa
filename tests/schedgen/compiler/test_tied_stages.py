"""Tied stages: every owner sums up what they share, once, between its own sums and NORM."""

from __future__ import annotations

import json

import numpy as np
import pytest
from compiled import compiled, sizes_of
from edited_programs import runs_with, taken

from schedgen.checker import check
from schedgen.ir.instructions import Kind, Op
from schedgen.schemes import SCHEMES
from schedgen.simulator.machine import Machine
from schedgen.simulator.simulate import simulate

TIED = [name for name in SCHEMES if name not in ("pipedream", "pipedream-2bw")]  # whose stages step one by one


def ties(program):
    """The rows that sum up a tie."""
    return np.flatnonzero((program.rows.op == Op.ALLREDUCE) & (program.rows.kind == Kind.T))


@pytest.mark.parametrize("scheme", TIED)
def test_a_tie_adds_its_sum_and_changes_nothing_else(scheme):
    plain, program = compiled(scheme, tied=[]), compiled(scheme, tied=[[0, sizes_of(scheme).stages - 1]])
    rest = taken(program, np.delete(np.arange(len(program)), ties(program)))

    def lists(program):
        return [
            [(*i[:-1], program.header.groups[i.group] if i.op in (Op.ALLREDUCE, Op.NORM) else i.operand) for i in part]
            for part in map(program.instructions, range(program.header.workers))
        ]

    assert lists(rest) == lists(plain)


def test_owners_on_one_worker_are_a_group_of_one():
    program = compiled("zb-v", tied=[[0, 7]])
    assert (0,) in program.header.groups
    assert [str(program.instruction(row)) for row in ties(program)] == [
        f'{{"op": "ALLREDUCE", "buf": "t.0", "group": {program.header.groups.index((0,))}}}'
    ]


def test_ties_are_sorted_and_each_is_there_once():
    program = compiled("1f1b", tied=[[3, 1], [2, 0, 1], [1, 3]])
    assert program.header.tied == ((0, 1, 2), (1, 3))
    entered = [(int(program.rows.rank[row]), int(program.rows.stage[row])) for row in ties(program)]
    assert entered == [(0, 0), (1, 0), (1, 1), (2, 0), (3, 1)]


def test_there_may_be_more_ties_than_stages():
    tied = [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]
    program = compiled("fsdp", tied=tied)
    runs_with(check(program), program)
    assert program.rows.stage[ties(program)].max() == 5
    both = program, compiled("fsdp")
    peaks = (simulate(each, {"F": 1, "B": 2}, Machine()).footprint.peak for each in both)
    assert np.array_equal(*peaks)


# Time


@pytest.mark.parametrize(
    ("scheme", "bytes_of_stages", "ring"),
    [
        ("1f1b", (40, 10, 10, 20), 2 * (0.5 + 0.25 * 20 / 2)),  # ranks 0 and 3
        ("ddp", (40, 30, 30, 20), 6 * 0.25 * 20 / 4),  # behind the sums of all four, while the last of these arrives
    ],
)
def test_norm_waits_for_the_ring_of_a_tie(scheme, bytes_of_stages, ring):
    machine = Machine(alpha=0.5, beta=0.25, weight=bytes_of_stages)
    cost = {"F": 1, "B": 2}
    plain, tied = (simulate(compiled(scheme, tied=ties), cost, machine).end.max() for ties in ([], [[0, 3]]))
    assert tied == plain + ring


def test_a_tie_on_one_worker_takes_no_time():
    machine = Machine(alpha=0.5, beta=0.25, weight=8)
    cost = {"F": 1, "I": 1, "W": 1}
    plain, tied = (simulate(compiled("zb-v", tied=ties), cost, machine).end.max() for ties in ([], [[0, 7]]))
    assert tied == plain


# Commands


def test_diff_shows_ties(run, graph_file, tmp_path):
    for name, tied in (("plain", []), ("tied", [[0, 3], [2, 1]])):
        path = tmp_path / f"{name}.json"
        run("compile", "1f1b", "--graph", graph_file(stages=4, tied=tied), "--microbatches", 2, "-o", path)
    result = run("diff", tmp_path / "plain.json", tmp_path / "tied.json")
    assert result.code == 1
    assert result.out.startswith("tied: () -> ((0, 3), (1, 2))\n")
    assert result.out.count('\n+{"op": "ALLREDUCE", "buf": "t.') == 4


def test_stats_count_a_tie_as_one_collective(run, graph_file, tmp_path):
    path = tmp_path / "tied.json"
    for tied, collectives in (([], 1), ([[0, 3]], 2)):
        run("compile", "1f1b", "--graph", graph_file(stages=4, tied=tied), "--microbatches", 2, "-o", path)
        numbers = json.loads(run("stats", path, "--json").out)
        assert numbers["collectives"] == collectives
