"""Tied stages: every owner sums up what they share, once, between its own sums and NORM; all else is refused."""

from __future__ import annotations

import re

import hypothesis.strategies as st
import numpy as np
import pytest
from damage import sizes_of
from edited_programs import taken
from examples import examples
from hypothesis import given, settings

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


def adds_to(program, rank, stages):
    """The rows of a rank that add to the weight gradient of one of these stages."""
    rows = program.rows
    adds = np.isin(rows.op, (Op.BWD, Op.BWD_W, Op.ADD, Op.ALLREDUCE)) & (rows.kind != Kind.T)
    return np.flatnonzero(adds & (rows.rank == rank) & np.isin(rows.stage, stages))


def refused(program, *rules):
    """Assert that `check` refuses the program by one of these rules; return the reason."""
    with pytest.raises(RefusedFile) as error:
        check(program)
    match = re.fullmatch(r"program:\d+: rank \d+: (?:{.*}: )?(.*) \(rule (\d): (.*)\)", str(error.value))
    assert match, str(error.value)
    assert int(match[2]) in rules and match[3] == RULES[int(match[2])], str(error.value)
    return match[1]


@pytest.mark.parametrize("scheme", TIED)
def test_first_and_last_stage_tied_in_every_scheme(scheme, execute):
    last = sizes_of(scheme).stages - 1
    program = compiled(scheme, [[0, last]])
    header, rows = program.header, program.rows
    assert header.tied == ((0, last),)
    owners = sorted({*header.owners[0], *header.owners[last]})
    sums = ties(program)
    assert rows.rank[sums].tolist() == owners
    for row in sums.tolist():
        rank = int(rows.rank[row])
        assert header.groups[rows.group[row]] == tuple(owners)
        own = [stage for stage in (0, last) if rank in header.owners[stage]]
        norm = np.flatnonzero((rows.op == Op.NORM) & (rows.rank == rank))
        assert adds_to(program, rank, own).max() < row < norm[0]
    memory = check(program)
    assert execute(program) == [
        {field: int(peak[rank]) for field, peak in memory._asdict().items()} for rank in range(header.workers)
    ]


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


def everywhere(program, k):
    """The rows of all members that sum up tie k."""
    sums = ties(program)
    return sums[program.rows.stage[sums] == k]


def without(program, rows):
    return taken(program, np.delete(np.arange(len(program)), rows))


def twice(program, rows):
    return taken(program, np.insert(np.arange(len(program)), rows, rows))


def moved(program, row, to):
    return taken(program, np.insert(np.delete(np.arange(len(program)), row), to if to <= row else to - 1, row))


def another_order(program, row, begin, end):
    """Whether the members of a collective's group disagree on its order if it moves past these rows."""
    passed = program.rows.take(slice(begin, end))
    same = np.isin(passed.op, (Op.ALLREDUCE, Op.NORM)) & (passed.group == program.rows.group[row])
    return same.any() and len(program.header.groups[program.rows.group[row]]) > 1


def with_group(program, rows, ranks):
    operand = program.rows.operand.copy()
    operand[rows] = program.header.groups.index(ranks)
    return Program(program.header, program.rows._replace(operand=operand))


def test_a_tie_that_nobody_sums_up_is_refused():
    program = compiled("1f1b", [[0, 3]])
    assert refused(without(program, ties(program)), 5) == "ALLREDUCE of t.0 is missing"


def test_a_tie_that_one_owner_does_not_sum_up_is_refused():
    program = compiled("1f1b", [[0, 3]])
    assert refused(without(program, ties(program)[1:]), 6) == "rank 3 of group 1 does not enter this"


def test_a_tie_summed_twice_is_refused():
    program = compiled("1f1b", [[0, 3]])
    assert refused(twice(program, ties(program)), 5) == "this tie is summed twice"


def test_a_tie_summed_among_others_than_its_owners_is_refused():
    program = compiled("1f1b", [[0, 3], [1, 2]])
    both = everywhere(program, 0)
    swapped = program.rows.stage.copy()
    swapped[ties(program)] = 1 - swapped[ties(program)]
    wrong = Program(program.header, program.rows._replace(stage=swapped))
    assert refused(wrong, 5) == "this is not the group of the tie's owners"
    assert refused(with_group(program, both, (1, 2)), 6) == "this rank is not in group 2, [1, 2]"


def test_a_tie_summed_before_the_last_backward_is_refused():
    program = compiled("1f1b", [[0, 3]])
    row = int(ties(program)[0])
    assert "not complete here" in refused(moved(program, row, adds_to(program, 0, [0])[-1]), 5)


def test_a_tie_summed_before_a_partial_is_added_is_refused():
    program = compiled("fsdp", [[0, 3]])
    row = int(ties(program)[0])
    adds = adds_to(program, 0, [0])
    last = int(adds[-1])
    assert program.rows.op[last] == Op.ADD
    assert "not complete here" in refused(moved(program, row, last), 5)


def test_a_tie_summed_before_the_owners_have_their_sum_is_refused():
    program = compiled("lpp", [[0, 2]])  # both stages are owned by ranks 0 and 2, so the group is the same
    for row in ties(program)[::-1].tolist():
        program = moved(program, row, adds_to(program, program.rows.rank[row], [2]).max())
    assert "not complete here" in refused(program, 5)


def test_a_tie_summed_behind_norm_is_refused():
    program = compiled("1f1b", [[0, 3]])
    for row in ties(program).tolist():
        program = moved(program, row, row + 2)
    assert refused(program, 5) == "this adds to t.0 after NORM"


def test_a_sum_freed_before_its_tie_is_refused():
    program = compiled("zb-v", [[0, 7]])
    rows = program.rows
    free = np.flatnonzero((rows.op == Op.FREE) & (rows.kind == Kind.DW) & (rows.stage == 7))
    assert refused(moved(program, int(free[0]), int(ties(program)[0])), 7) == "dw.7 is used again after its end"


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


@given(data=st.data())
@settings(max_examples=examples(100))
def test_a_tie_less_or_twice_is_refused(cases, data):
    program = data.draw(cases.filter(lambda case: case.tied)).compile()
    k = data.draw(st.integers(0, len(program.header.tied) - 1))
    rows = everywhere(program, k)
    damage, words = data.draw(st.sampled_from([(without, f"ALLREDUCE of t.{k} is missing"), (twice, "summed twice")]))
    assert words in refused(damage(program, rows), 5)
    if len(rows) > 1:
        row = rows[[data.draw(st.integers(0, len(rows) - 1))]]
        refused(damage(program, row), 6)


@given(data=st.data())
@settings(max_examples=examples(100))
def test_a_tie_before_one_of_its_sums_is_refused(cases, data):
    program = data.draw(cases.filter(lambda case: case.tied)).compile()
    header, rows = program.header, program.rows
    row = int(data.draw(st.sampled_from(ties(program).tolist())))
    rank = int(rows.rank[row])
    own = [stage for stage in header.tied[rows.stage[row]] if rank in header.owners[stage]]
    to = adds_to(program, rank, own).max()
    refused(moved(program, row, int(to)), 6 if another_order(program, row, to, row) else 5)


@given(data=st.data())
@settings(max_examples=examples(100))
def test_a_tie_behind_norm_is_refused(cases, data):
    program = data.draw(cases.filter(lambda case: case.tied)).compile()
    row = int(data.draw(st.sampled_from(ties(program).tolist())))
    norm = np.flatnonzero((program.rows.op == Op.NORM) & (program.rows.rank == program.rows.rank[row]))[0]
    refused(moved(program, row, int(norm) + 1), 6 if another_order(program, row, row + 1, norm + 1) else 5)


# Time


@pytest.mark.parametrize(
    ("scheme", "bytes_of_stages", "ring"),
    [
        ("1f1b", (40, 10, 10, 20), 2 * (0.5 + 0.25 * 20 / 2)),  # ranks 0 and 3
        ("ddp", (40, 30, 30, 20), 6 * (0.5 + 0.25 * 20 / 4)),  # behind the sums of all four
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
