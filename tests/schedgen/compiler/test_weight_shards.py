"""Weight shards: compiled, proved, run by the reference machine, which trusts nothing, and counted."""

from __future__ import annotations

import json
import re

import hypothesis.strategies as st
import numpy as np
import pytest
from edited_programs import written
from hypothesis import given

from schedgen.checker import check
from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.ir.file import parse
from schedgen.ir.instructions import Kind, Op
from schedgen.ir.weights import shard_offsets
from schedgen.schemes import load
from schedgen.schemes.scheme import Sizes
from schedgen.simulator.buffer_sizes import BufferSizes
from schedgen.simulator.footprint import footprint
from schedgen.simulator.stats import stats
from schedgen.util.errors import RefusedFile

HAND = """
import numpy as np

def w(s, b, d, k, *, workers):
    return {weights}, {compute}

def n(s, b, d, *, stages):
    return b * 2 * stages + np.where(d == 0, s, 2 * stages - 1 - s)
"""


def compiled(name, sizes, **options):
    return compile(load(name, sizes), sizes, Options(**options))


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


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            ("ddp", "--workers", "4"),
            "--shards: w names several owners of the weights of stage 0; each shard needs one owner, as in fsdp",
        ),
        (
            ("1f1b", "--updates", "stash"),
            "--shards does not go with --updates stash: an owner steps the weights of a stage as a whole",
        ),
        (("gpipe", "--shards", "2,2"), "--shards has 2 numbers, but there are 4 stages"),
        (("gpipe", "--shards", "0"), "argument --shards: '0' is not a whole number of at least 1"),
        (("gpipe", "--shards", "99999999"), "4 workers x 399999996 shards of weights are too many"),
    ],
)
def test_what_cannot_be_divided_is_refused(run, refused, arguments, reason):
    options = arguments if "--shards" in arguments else (*arguments, "--shards", "2")
    said = refused(run("compile", *options, "--stages", 4, "--microbatches", 8, "-o", "-"), 2)
    assert reason in said


def test_tied_weights_are_not_divided(run, refused, graph_file):
    options = ("--graph", graph_file(stages=4, tied=[[0, 3]]), "--microbatches", 8, "--workers", 4, "--shards", 2)
    reason = "--shards does not go with ties: stages that share parameters"
    assert reason in refused(run("compile", "fsdp", *options, "-o", "-"), 2)


def test_compute_must_not_depend_on_the_part(run, refused, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(HAND.format(weights="k % workers", compute="(b + k) % workers"))
    options = ("--stages", 2, "--microbatches", 4, "--workers", 2, "--shards", 2, "-o", "-")
    assert "whatever the shard k" in refused(run("compile", path, *options), 2)


def edited(program, **changes):
    raw = json.loads(written(program))
    raw.pop("sha256")
    return json.dumps(raw | changes)


@pytest.mark.parametrize(
    ("shards", "reason"),
    [
        ([[0, 1]], "shards must be a list of 2 lists of ranks"),
        ([[0, 1], []], "shards must name an owner in 0..1 of every shard of every stage"),
        ([[0, 2], [1, 0]], "shards must name an owner in 0..1"),
        ([[0], [1]], "shards must divide a stage, or be left out"),
        ([[1, 0], [1, 0]], "the first owner of each stage must be the worker that weights names"),
        ([[0, 0], [1, 0]], "owners do not agree with weights"),
        ([[0, 1, 1], [1, 0]], None),
    ],
)
def test_a_header_with_wrong_shards_is_refused(shards, reason):
    program = compiled("fsdp", Sizes(2, 2, 2, shards=(2,)))
    if reason is None:  # right as far as the header goes
        with pytest.raises(RefusedFile, match=r"dw?\.0/2|w\.0/2"):
            check(parse(edited(program, shards=shards), "file"))
        return
    with pytest.raises(RefusedFile, match=reason):
        parse(edited(program, shards=shards), "file")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"w.0/0"', '"w.0"', "the weights of this stage are divided: name a shard"),
        ('"w.0/0"', '"w.0/2"', "there is no such shard"),
        ('"x.0.0"', '"x.0.0/0"', "SEND is written as one of|RECV is written as one of|FREE is written as one of"),
        ('"op": "STEP", "stage": 0, "shard": 0', '"op": "STEP", "stage": 0', "divided: name a shard"),
        ('"stage": 0, "shard": 1, "from"', '"stage": 0, "shard": 7, "from"', "there is no such shard"),
        ('"w.0/0"', '"w.0/00"', "a number has leading zeros"),
    ],
)
def test_a_line_with_a_wrong_part_is_refused(run, refused, tmp_path, old, new, reason):
    text = written(compiled("fsdp", Sizes(2, 2, 2, shards=(2,)))).decode()
    assert old in text
    (tmp_path / "edited.json").write_text(text.replace(old, new, 1))
    assert re.search(reason, refused(run("check", tmp_path / "edited.json"), 1))


def test_a_file_without_parts_takes_none(run, refused, tmp_path):
    text = written(compiled("fsdp", Sizes(2, 2, 2))).decode()
    (tmp_path / "edited.json").write_text(text.replace('"w.0"', '"w.0/0"', 1))
    assert "have no shards" in refused(run("check", tmp_path / "edited.json"), 1)
    (tmp_path / "edited.json").write_text(text.replace('"STEP", "stage": 0', '"STEP", "stage": 0, "shard": 0', 1))
    assert "have no shards" in refused(run("check", tmp_path / "edited.json"), 1)
