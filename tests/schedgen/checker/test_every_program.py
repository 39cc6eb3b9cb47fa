"""Six claims about programs with any combination of the compiler's features.

What is compiled is proved and runs on the reference machine, comes back from its file, and has the peaks of memory
that are planned; one instruction less or twice is refused; mutants that are accepted run; damage of a rule's kind is
refused by that rule. `make test-check` tries 10,000 programs, and 200,000 mutants.
"""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import hypothesis.strategies as st
import numpy as np
import pytest
from drawn_programs import programs
from edited_programs import comes_back, refused_less_or_twice, runs_with, taken
from examples import examples, further
from hypothesis import HealthCheck, assume, event, given, settings
from mutants import mutant
from slow_memory_plan import hold, peaks_of_timeline, random_bytes

from schedgen.checker import RULES, check
from schedgen.ir.instructions import Kind, Op
from schedgen.ir.program import Program, rows
from schedgen.util.errors import RefusedFile

MUTANTS = 20  # of every program


@given(program=programs())
@settings(max_examples=examples(200, as_asked=True))
def test_what_is_compiled_is_proved_and_runs_and_comes_back_from_its_file(program):
    runs_with(check(program), program)
    comes_back(program)


@given(program=programs(), data=st.data())
@settings(max_examples=examples(100, as_asked=True))
def test_memory_peaks_where_it_is_planned(program, data):
    peaks_of_timeline(program, data)
    header = program.header
    if header.has_flush and not header.is_forward:  # what the slow plan knows
        rng = np.random.default_rng(data.draw(st.integers(0, 99)))
        sizes = random_bytes(rng, header.stages, len(header.graph.edges))
        if header.gradient_units:  # long enough to be divided
            weight = 100 * sizes.weight
            sizes = sizes._replace(weight=weight, partial=weight * sizes.partial, owned=303 * sizes.owned)
        hold(program, sizes)


@given(program=programs(), data=st.data())
@settings(max_examples=examples(200, as_asked=True))
def test_an_instruction_less_or_twice_is_refused(program, data):
    rows, row = program.rows, data.draw(st.integers(0, len(program) - 1))
    # Without a RECOMPUTE its FWD keeps what the backward needs; versions that are not freed end with the STEP.
    assume(rows.op[row] != Op.RECOMPUTE)
    assume(program.header.has_flush or rows.op[row] != Op.FREE or rows.kind[row] != Kind.W)
    refused_less_or_twice(program, row, data.draw(st.integers(0, len(program))))


@given(program=programs(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=examples(60, as_asked=True))
def test_mutants_that_are_accepted_run(program, seed):
    chance = Random(seed)
    for _ in range(MUTANTS):
        changed = mutant(chance, program)
        try:
            memory = check(changed) if changed else None
        except RefusedFile as error:
            event(f"refused by rule {error.rule}")
            continue
        event("accepted" if memory else "refused in reading")
        if memory:
            runs_with(memory, changed)


# Damage of each rule's kind


def having(program, *ops, kinds=tuple(Kind)):
    return np.flatnonzero(np.isin(program.rows.op, ops) & np.isin(program.rows.kind, kinds))


def pick(data, rows):
    assume(len(rows))
    return int(data.draw(st.sampled_from(list(map(int, rows)))))


def without(program, rows):
    return taken(program, np.delete(np.arange(len(program)), rows))


def moved(program, row, to):
    """The program with row `row` moved to before row `to`, on the same rank."""
    return taken(program, np.insert(np.delete(np.arange(len(program)), row), to if to <= row else to - 1, row))


def changed(program, row, **values):
    columns = {name: getattr(program.rows, name).copy() for name in values}
    for name, value in values.items():
        columns[name][row] = value
    return Program(program.header, program.rows._replace(**columns)).project()


def a_job_on_another_worker(program, data):
    workers = program.header.workers
    assume(workers > 1)
    row = pick(data, having(program, Op.FWD, Op.BWD, Op.BWD_I, Op.BWD_W))
    return changed(program, row, rank=(program.rows.rank[row] + data.draw(st.integers(1, workers - 1))) % workers)


def a_backward_before_everything(program, data):
    row = pick(data, having(program, Op.BWD, Op.BWD_I))
    return moved(program, row, int(program.bounds[program.rows.rank[row]]))


def one_less(*ops, kinds=tuple(Kind)):
    return lambda program, data: without(program, pick(data, having(program, *ops, kinds=kinds)))


def a_norm_less_of_several(program, data):
    assume(program.header.workers > 1)
    return one_less(Op.NORM)(program, data)


def a_tie_less(program, data):
    row = pick(data, ties(program))
    return without(program, ties(program)[program.rows.stage[ties(program)] == program.rows.stage[row]])


def a_tie_twice(program, data):
    row = pick(data, ties(program))
    rows = ties(program)[program.rows.stage[ties(program)] == program.rows.stage[row]]  # of all its ranks
    return taken(program, np.insert(np.arange(len(program)), rows, rows))


def a_tie_less_of_several(program, data):
    row = pick(data, ties(program))
    assume(len(program.header.groups[program.rows.group[row]]) > 1)
    return without(program, row)


def a_tie_before_one_of_its_sums(program, data):
    rows = program.rows
    row = pick(data, ties(program))
    rank = int(rows.rank[row])
    own = [stage for stage in program.header.tied[rows.stage[row]] if rank in program.header.owners[stage]]
    sums = np.isin(rows.op, (Op.BWD, Op.BWD_W)) | (np.isin(rows.op, (Op.ADD, Op.ALLREDUCE)) & (rows.kind == Kind.DW))
    to = int(np.flatnonzero(sums & (rows.rank == rank) & np.isin(rows.stage, own)).max())
    assume(not passes_its_group(program, row, to, row))
    return moved(program, row, to)


def a_tie_behind_norm(program, data):
    row = pick(data, ties(program))
    norm = int(np.flatnonzero((program.rows.op == Op.NORM) & (program.rows.rank == program.rows.rank[row]))[0])
    assume(not passes_its_group(program, row, row + 1, norm + 1))
    return moved(program, row, norm + 1)


def ties(program):
    """The rows that sum up a tie."""
    return having(program, Op.ALLREDUCE, kinds=(Kind.T,))


def passes_its_group(program, row, begin, end):
    """Whether the members of a collective's group would disagree on its order, which is rule 6, behind these rows."""
    passed = program.rows.take(slice(begin, end))
    same = np.isin(passed.op, (Op.ALLREDUCE, Op.NORM)) & (passed.group == program.rows.group[row])
    return same.any() and len(program.header.groups[program.rows.group[row]]) > 1


def an_offload_before_its_step(program, data):
    row = pick(data, having(program, Op.OFFLOAD, kinds=(Kind.OPT,)))
    rank, stage, shard = (int(column[row]) for column in (program.rows.rank, program.rows.stage, program.rows.shard))
    steps = having(program, Op.STEP)
    same = (program.rows.rank == rank) & (program.rows.stage == stage) & (program.rows.shard == shard)
    return moved(program, row, int(steps[same[steps]][0]))


def an_offload_of_a_loan(program, data):
    row = pick(data, having(program, Op.RECV, kinds=(Kind.SAVED,)))
    i, rank = program.instruction(row), program.rows.rank[[row]]
    assume(program.header.compute[1, i.stage, i.mb] != rank[0])
    copy = rows(Op.OFFLOAD, rank, kind=Kind.SAVED, stage=i.stage, mb=i.mb)
    return program.insert(copy, after=np.array([row])).project()


def a_limit_that_is_less(program, data):
    most = int(check(program).saved.max())
    assume(most > 1)
    lowering = {**program.header.lowering, "memory_limit": data.draw(st.integers(1, most - 1))}
    return Program(replace(program.header, lowering=lowering), program.rows).project()


def a_job_with_another_version(program, data):
    row, count = pick(data, having(program, Op.FWD, Op.BWD)), program.header.weight_versions.count
    version = (program.rows.version[row] + data.draw(st.integers(1, count - 1))) % count
    return changed(program, row, operand=version)


DAMAGES = [
    (1, a_job_on_another_worker, (), ()),
    (2, a_backward_before_everything, (), ("forward", "versions")),
    (3, one_less(Op.SEND), (), ()),
    (5, one_less(Op.STEP), (), ("forward", "versions")),
    (5, a_tie_less, ("tied",), ("forward",)),
    *further(
        (5, a_tie_twice, ("tied",), ("forward",)),
        (5, a_tie_before_one_of_its_sums, ("tied",), ("forward",)),
        (5, a_tie_behind_norm, ("tied",), ("forward",)),
        (6, a_tie_less_of_several, ("tied",), ("forward",)),
    ),
    (6, a_norm_less_of_several, (), ("forward", "versions")),
    (7, one_less(Op.FREE), (), ("versions",)),
    (7, one_less(Op.FREE, kinds=(Kind.SAVED,)), ("offload",), ()),
    (7, one_less(Op.RELOAD, kinds=(Kind.SAVED,)), ("offload",), ()),
    (7, one_less(Op.FREE, kinds=(Kind.SAVED,)), ("evict",), ()),
    (3, one_less(Op.SEND, kinds=(Kind.SAVED,)), ("evict",), ()),
    (1, an_offload_of_a_loan, ("evict",), ()),
    (2, one_less(Op.RELOAD, kinds=(Kind.OPT,)), ("offload optimizer",), ()),
    (5, one_less(Op.OFFLOAD, kinds=(Kind.OPT,)), ("offload optimizer",), ()),
    (5, an_offload_before_its_step, ("offload optimizer",), ()),
    (7, one_less(Op.FREE, kinds=(Kind.OPT,)), ("offload optimizer",), ()),
    (8, a_limit_that_is_less, ("memory limit",), ()),
    (9, a_job_with_another_version, ("versions",), ()),
    (10, one_less(Op.ALLREDUCE, kinds=(Kind.X, Kind.G)), ("slices",), ()),
]


def refused(program, rule):
    with pytest.raises(RefusedFile) as error:
        check(program)
    words = re.escape(f"(rule {rule}: {RULES[rule]})")
    assert re.fullmatch(rf"program:\d+: rank \d+: .* {words}", str(error.value)), str(error.value)


@pytest.mark.parametrize(
    ("rule", "damage", "features", "others"),
    DAMAGES,
    ids=[f"{rule}-{damage.__name__.replace('<lambda>', 'one_less')}" for rule, damage, *_ in DAMAGES],
)
@given(data=st.data())
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.filter_too_much])
def test_damage_of_a_rule_s_kind_is_refused_by_that_rule(rule, damage, features, others, data):
    refused(damage(data.draw(programs(*features, without=others)), data), rule)
