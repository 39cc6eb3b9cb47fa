"""Each rule of `check` on random programs: damage of its kind is refused by its number, and nothing else is refused.

`make test-check` runs the last two of these on 10,000 programs each, and all other tests of random programs on more
than here: every compiled program is accepted, and the reference machine executes every mutation that the checker
accepts, so the checker refuses whatever the machine cannot execute.
"""

import re

import hypothesis.strategies as st
import numpy as np
import pytest
from edited_programs import taken
from examples import examples
from hypothesis import assume, given, settings

from schedgen.checker import RULES, check
from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.ir.instructions import COMPUTE, Kind, Op
from schedgen.ir.program import Program
from schedgen.schemes import load
from schedgen.schemes.scheme import Sizes
from schedgen.util.errors import RefusedFile


def having(program, *ops):
    return np.flatnonzero(np.isin(program.rows.op, ops))


def pick(data, rows):
    assume(len(rows))
    return int(data.draw(st.sampled_from(list(map(int, rows)))))


def moved(program, row, to):
    """The program with row `row` moved to where row `to` is now, on the same rank."""
    return taken(program, np.insert(np.delete(np.arange(len(program)), row), to, row))


def a_job_on_another_worker(program, data):
    assume(program.header.workers > 1)
    row = pick(data, having(program, Op.FWD, Op.BWD, Op.BWD_I, Op.BWD_W))
    rank = program.rows.rank.copy()
    rank[row] = (rank[row] + data.draw(st.integers(1, program.header.workers - 1))) % program.header.workers
    return Program(program.header, program.rows._replace(rank=rank)).project()


def a_backward_before_everything(program, data):
    row = pick(data, having(program, Op.BWD, Op.BWD_I))
    return moved(program, row, int(program.bounds[program.rows.rank[row]]))


def a_send_less(program, data):
    row = pick(data, having(program, Op.SEND))
    return taken(program, np.delete(np.arange(len(program)), row))


def a_step_less(program, data):
    row = pick(data, having(program, Op.STEP))
    return taken(program, np.delete(np.arange(len(program)), row))


def a_free_less(program, data):
    row = pick(data, having(program, Op.FREE))
    return taken(program, np.delete(np.arange(len(program)), row))


DAMAGES = [
    (1, a_job_on_another_worker),
    (2, a_backward_before_everything),
    (3, a_send_less),
    (5, a_step_less),
    (7, a_free_less),
]


def refused(program, rule):
    with pytest.raises(RefusedFile) as error:
        check(program)
    words = re.escape(f"(rule {rule}: {RULES[rule]})")
    assert re.fullmatch(rf"program:\d+: rank \d+: .* {words}", str(error.value)), str(error.value)


@pytest.mark.parametrize(("rule", "damage"), DAMAGES, ids=[f"rule {rule}" for rule, _ in DAMAGES])
@given(data=st.data())
def test_damage_of_a_rule_s_kind_is_refused_by_that_rule(cases, rule, damage, data):
    refused(damage(data.draw(cases).compile(), data), rule)


@given(data=st.data())
def test_two_ranks_that_wait_for_each_other_are_refused_by_rule_4(data):
    """A RECV of a gradient stands after a SEND whose receiver must first send that gradient."""
    S, batches = data.draw(st.integers(2, 5)), data.draw(st.integers(3, 8))
    program = compile(load("1f1b", Sizes(S, batches)), Sizes(S, batches), Options(prefetch=0))
    table = program.rows
    found = []
    for row in having(program, Op.RECV)[table.kind[having(program, Op.RECV)] == Kind.G]:
        rank, peer, mb = table.rank[row], table.operand[row], table.mb[row]
        mine = np.arange(program.bounds[rank], program.bounds[rank + 1])
        theirs = np.arange(program.bounds[peer], program.bounds[peer + 1])
        use = mine[(table.op[mine] == Op.BWD) & (table.mb[mine] == mb)][0]
        gives = theirs[(table.op[theirs] == Op.SEND) & (table.kind[theirs] == Kind.G) & (table.mb[theirs] == mb)][0]
        later = theirs[(table.op[theirs] == Op.RECV) & (table.kind[theirs] == Kind.X) & (theirs > gives)]
        sends = mine[(table.op[mine] == Op.SEND) & (table.kind[mine] == Kind.X) & (mine > row) & (mine < use)]
        found += [(int(row), int(send)) for send in sends if table.mb[send] in table.mb[later]]
    assume(found)
    row, send = data.draw(st.sampled_from(found))
    refused(moved(program, row, send), 4)


@given(data=st.data())
def test_collectives_that_ranks_enter_differently_are_refused_by_rule_6(data):
    S, groups = data.draw(st.integers(2, 4)), data.draw(st.integers(2, 4))
    sizes = Sizes(S, data.draw(st.integers(groups, 8)), groups, groups)
    program = compile(load("lpp", sizes), sizes)
    row = pick(data, having(program, Op.ALLREDUCE))
    mine = having(program, Op.ALLREDUCE)
    mine = mine[program.rows.rank[mine] == program.rows.rank[row]]
    other = pick(data, mine)
    order = np.arange(len(program))
    if other == row:
        order = np.delete(order, row)
    else:
        # Swap the two; both sums are complete after the rank's last job.
        last = int(
            max(having(program, *COMPUTE)[program.rows.rank[having(program, *COMPUTE)] == program.rows.rank[row]])
        )
        assume(min(row, other) > last)
        order[[row, other]] = other, row
    refused(taken(program, order), 6)


@given(data=st.data())
@settings(max_examples=examples(200, as_asked=True))
def test_no_false_alarm(cases, runs_as_proved, data):
    """The reference machine executes whatever is compiled, with the peaks that the checker reports."""
    runs_as_proved(data.draw(cases).compile())


@given(data=st.data())
@settings(max_examples=examples(300, as_asked=True))
def test_what_is_accepted_runs(cases, runs_if_accepted, data):
    """Swaps and changed operands may do no harm; where `check` accepts them, the program runs to a right end."""
    program = data.draw(cases).compile()
    rows, length = program.rows, len(program)
    for _ in range(data.draw(st.integers(1, 3))):
        i = data.draw(st.integers(0, length - 1))
        column = data.draw(st.sampled_from(["order", "next", "rank", "stage", "mb", "operand"]))
        if column in ("order", "next"):
            j = min(i + 1, length - 1) if column == "next" else data.draw(st.integers(0, length - 1))
            order = np.arange(length)
            order[[i, j]] = j, i
            ranks = rows.rank
            rows = rows.take(order)._replace(rank=ranks)
            continue
        values = getattr(rows, column).copy()
        limits = {"rank": program.header.workers, "stage": program.header.stages, "mb": program.header.microbatches}
        if values[i] >= 0 and not (column == "operand" and rows.op[i] in (Op.ALLREDUCE, Op.NORM)):  # groups stay
            limit = limits.get(column, program.header.workers)
            if column == "stage" and rows.kind[i] == Kind.T:
                limit = len(program.header.tied)
            values[i] = data.draw(st.integers(0, limit - 1))
        rows = rows._replace(**{column: values})
    runs_if_accepted(Program(program.header, rows).project())
