"""Tied stages: every owner sums up what they share, once, between its own sums and NORM; all else is refused."""

from __future__ import annotations

import re

import numpy as np
import pytest
from damage import sizes_of
from edited_programs import taken

from schedgen.checker import RULES, check
from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.ir.instructions import Kind, Op
from schedgen.ir.program import Program
from schedgen.schemes import SCHEMES, load
from schedgen.simulator.machine import Machine
from schedgen.simulator.simulate import simulate
from schedgen.util.errors import RefusedFile, UsageError

TIED = [name for name in SCHEMES if name not in ("pipedream", "pipedream-2bw")]  # whose stages step one by one


def compiled(scheme, tied, **options):
    sizes = sizes_of(scheme)
    return compile(load(scheme, sizes), sizes, Options(tied=tied, **options))


def ties(program):
    """The rows that sum up a tie."""
    return np.flatnonzero((program.rows.op == Op.ALLREDUCE) & (program.rows.kind == Kind.T))


def refused(program, *rules):
    """Assert that `check` refuses the program by one of these rules; return the reason."""
    with pytest.raises(RefusedFile) as error:
        check(program)
    match = re.fullmatch(r"program:\d+: rank \d+: (?:{.*}: )?(.*) \(rule (\d): (.*)\)", str(error.value))
    assert match, str(error.value)
    assert int(match[2]) in rules and match[3] == RULES[int(match[2])], str(error.value)
    return match[1]


@pytest.mark.parametrize("scheme", TIED)
def test_a_tie_adds_its_sum_and_changes_nothing_else(scheme):
    plain, program = compiled(scheme, []), compiled(scheme, [[0, sizes_of(scheme).stages - 1]])
    rest = taken(program, np.delete(np.arange(len(program)), ties(program)))

    def lists(program):
        return [
            [(*i[:-1], program.header.groups[i.group] if i.op in (Op.ALLREDUCE, Op.NORM) else i.operand) for i in part]
            for part in map(program.instructions, range(program.header.workers))
        ]

    assert lists(rest) == lists(plain)


def test_owners_on_one_worker_are_a_group_of_one():
    program = compiled("zb-v", [[0, 7]])
    assert (0,) in program.header.groups
    assert [str(program.instruction(row)) for row in ties(program)] == [
        f'{{"op": "ALLREDUCE", "buf": "t.0", "group": {program.header.groups.index((0,))}}}'
    ]


def test_stages_that_step_one_by_one_are_not_tied():
    with pytest.raises(UsageError, match=r"^--updates stash: tied stages step together, which needs --updates flush$"):
        compiled("pipedream", [[0, 3]])


def test_ties_are_sorted_and_each_is_there_once():
    program = compiled("1f1b", [[3, 1], [2, 0, 1], [1, 3]])
    assert program.header.tied == ((0, 1, 2), (1, 3))
    entered = [(int(program.rows.rank[row]), int(program.rows.stage[row])) for row in ties(program)]
    assert entered == [(0, 0), (1, 0), (1, 1), (2, 0), (3, 1)]


def test_there_may_be_more_ties_than_stages(execute):
    tied = [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]
    program = compiled("fsdp", tied)
    check(program)
    execute(program)
    assert program.rows.stage[ties(program)].max() == 5
    peaks = (simulate(each, {"F": 1, "B": 2}, Machine()).footprint.peak for each in (program, compiled("fsdp", [])))
    assert np.array_equal(*peaks)


# Damage


def moved(program, row, to):
    return taken(program, np.insert(np.delete(np.arange(len(program)), row), to if to <= row else to - 1, row))


def with_group(program, rows, ranks):
    operand = program.rows.operand.copy()
    operand[rows] = program.header.groups.index(ranks)
    return Program(program.header, program.rows._replace(operand=operand))


def test_a_tie_summed_among_others_than_its_owners_is_refused():
    program = compiled("1f1b", [[0, 3], [1, 2]])
    both = ties(program)[program.rows.stage[ties(program)] == 0]
    swapped = program.rows.stage.copy()
    swapped[ties(program)] = 1 - swapped[ties(program)]
    wrong = Program(program.header, program.rows._replace(stage=swapped))
    assert refused(wrong, 5) == "this is not the group of the tie's owners"
    assert refused(with_group(program, both, (1, 2)), 6) == "this rank is not in group 2, [1, 2]"


def test_a_sum_freed_before_its_tie_is_refused():
    program = compiled("zb-v", [[0, 7]])
    rows = program.rows
    free = np.flatnonzero((rows.op == Op.FREE) & (rows.kind == Kind.DW) & (rows.stage == 7))
    assert (
        refused(moved(program, int(free[0]), int(ties(program)[0])), 7)
        == "dw.7 is never freed after this, its last use"
    )


def test_ties_entered_in_different_orders_are_refused():
    program = compiled("ddp", [[0, 3], [1, 2]])
    first, second = ties(program)[:2].tolist()
    order = np.arange(len(program))
    order[[first, second]] = second, first
    assert "in place of this, rank 0 enters" in refused(taken(program, order), 6)


def test_a_sum_of_a_tie_is_not_that_of_the_stage_with_its_number():
    program = compiled("ddp", [[0, 3]])
    kind = program.rows.kind.copy()
    kind[ties(program)[0]] = Kind.DW
    assert "in place of this, rank 0 enters" in refused(Program(program.header, program.rows._replace(kind=kind)), 6)


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
    plain, tied = (simulate(compiled(scheme, ties), cost, machine).end.max() for ties in ([], [[0, 3]]))
    assert tied == plain + ring


def test_a_tie_on_one_worker_takes_no_time():
    machine = Machine(alpha=0.5, beta=0.25, weight=8)
    cost = {"F": 1, "I": 1, "W": 1}
    plain, tied = (simulate(compiled("zb-v", ties), cost, machine).end.max() for ties in ([], [[0, 7]]))
    assert tied == plain
