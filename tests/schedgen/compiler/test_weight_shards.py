"""Weight shards: compiled, proved, run by the reference machine, which trusts nothing, and counted."""

from __future__ import annotations

import json

import hypothesis.strategies as st
import numpy as np
import pytest
from compiled import compiled
from edited_programs import written
from hypothesis import given

from schedgen.checker import check
from schedgen.ir.instructions import Kind, Op
from schedgen.ir.weights import shard_offsets
from schedgen.schemes.scheme import Sizes
from schedgen.simulator.buffer_sizes import BufferSizes
from schedgen.simulator.footprint import footprint
from schedgen.simulator.stats import stats

HAND = """
import numpy as np

def w(s, b, d, k, *, workers):
    return {weights}, {compute}

def n(s, b, d, *, stages):
    return b * 2 * stages + np.where(d == 0, s, 2 * stages - 1 - s)
"""


@given(st.integers(0, 10_000), st.integers(1, 70))
def test_parts_are_equal_but_for_the_last_and_begin_at_lines(size, shards):
    ends = shard_offsets(size, shards)
    lengths = np.diff(ends)
    assert (ends[0], ends[-1], len(ends)) == (0, size, shards + 1)
    some = lengths[lengths > 0]
    assert (np.array(ends) % 64 == 0)[np.array(ends) < size].all()
    assert not len(some) or ((some[:-1] == some[0]).all() and some[0] <= -(-size // shards) + 63)


def test_two_uneven_stages_leave_every_worker_a_quarter():
    sizes = Sizes(2, 8, 4, shards=(4,))
    program = compiled("fsdp", sizes)
    weight = np.array([1_000_000, 123_456])
    zero = np.zeros(2, np.int64)
    memory = footprint(program, BufferSizes(zero, weight, weight, zero, zero, {}, 3 * weight))
    assert memory.owned == pytest.approx([weight.sum()] * 4, rel=0.05)  # three copies and a gradient, a quarter each
    # Also the weights of both stages to compute with, a gradient or two, and what is received of these.
    assert (memory.slots <= 4 * weight.sum() + 2 * weight.max()).all()
    owners = program.header.shard_owners
    assert owners == ((0, 1, 2, 3), (1, 2, 3, 0)) and program.header.owners == ((0, 1, 2, 3),) * 2
    numbers = stats(program)
    assert [worker["weight_storage"] for worker in numbers["workers"]] == [0.5] * 4
    assert [worker["receives"]["weight"] for worker in numbers["workers"]] == [6] * 4
    assert [worker["receives"]["weight_gradient"] for worker in numbers["workers"]] == [6] * 4


def test_no_two_workers_ask_the_same_one_first():
    program = compiled("fsdp", Sizes(2, 8, 8, shards=(8,)), fan_out=1)
    for op, kind in ((Op.FETCH_W, Kind.W), (Op.SEND, Kind.W), (Op.SEND, Kind.DW)):
        first = [next(i.operand for i in program.instructions(r) if (i.op, i.kind) == (op, kind)) for r in range(8)]
        assert sorted(first) == list(range(8)), (op, kind, first)


def test_with_one_owner_of_all_parts_nothing_travels():
    program = compiled("gpipe", Sizes(1, 2, shards=(3,)))
    assert not np.isin(program.rows.op, (Op.SEND, Op.FETCH_W)).any()
    assert (program.rows.op == Op.STEP).sum() == 3
    check(program)


def test_w_says_where_parts_are(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(HAND.format(weights="(s + 2 * k) % workers", compute="b % workers + 0 * k"))
    sizes = Sizes(3, 4, 4, shards=(4, 1, 2))
    program = compiled(str(path), sizes)
    check(program)
    assert program.header.shard_owners == ((0, 2, 0, 2), (1,), (2, 0))
    assert json.loads(written(program))["scheme"]["shards"] == [4, 1, 2]
