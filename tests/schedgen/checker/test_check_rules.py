"""Each rule of `check` on random programs: damage of its kind is refused by its number, and nothing else is refused.

`make test-check` runs the last of these on 10,000 programs.
"""

import os
import re

import hypothesis.strategies as st
import numpy as np
import pytest
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


def taken(program, order):
    return Program(program.header, program.rows.take(np.asarray(order, np.int64))).project()


def moved(program, row, to):
    """Row `row` stands where row `to` is now, on the same rank."""
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
    """A RECV of a gradient behind a SEND whose receiver first wants to be rid of that gradient."""
    S, batches = data.draw(st.integers(2, 5)), data.draw(st.integers(3, 8))
    program = compile(load("1f1b", Sizes(S, batches)), Sizes(S, batches), Options(prefetch=0))
    table = program.rows
    found = []
    for row in having(program, Op.RECV)[table.kind[having(program, Op.RECV)] == Kind.G]:
        rank, peer, mb = table.rank[row], table.peer[row], table.mb[row]
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
        # The later of the two first; both sums are complete at the rank's last job.
        last = int(
            max(having(program, *COMPUTE)[program.rows.rank[having(program, *COMPUTE)] == program.rows.rank[row]])
        )
        assume(min(row, other) > last)
        order[[row, other]] = other, row
    refused(taken(program, order), 6)


@given(data=st.data())
@settings(max_examples=int(os.environ.get("SCHEDGEN_EXAMPLES", "200")))
def test_no_false_alarm(cases, data):
    check(data.draw(cases).compile())
