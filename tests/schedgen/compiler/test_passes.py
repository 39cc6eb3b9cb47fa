"""The lowering of any placement is right, and moves no more than the placement asks for."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from drawn_programs import cases
from hypothesis import given

from schedgen.checker import check
from schedgen.compiler.lower import emit_jobs, header_of
from schedgen.compiler.passes import PIPELINE
from schedgen.compiler.place import place
from schedgen.compiler.refine import refine
from schedgen.ir.instructions import COMPUTE, B, F, Kind, Op


@given(cases())
def test_no_more_copies_of_weights_are_held_than_there_are_slots(case):
    assert max(check(case.compile()).weight) <= case.weight_slots


@given(cases())
def test_jobs_stand_where_w_puts_them_in_the_order_they_start(case):
    program = case.compile()
    for rank in range(case.sizes.workers):
        jobs = [i for i in program.instructions(rank) if i.op in COMPUTE and i.op != Op.RECOMPUTE]
        direction = {Op.FWD: 0, Op.BWD: 1, Op.BWD_I: 1, Op.BWD_W: 2}
        emitted = Counter((direction[i.op], i.stage, i.mb) for i in jobs)
        assert emitted == Counter(zip(*map(np.ndarray.tolist, np.nonzero(case.compute == rank)), strict=True))


@given(cases())
def test_only_what_w_separates_travels_and_only_once(case):
    w, batches = case.compute, range(case.sizes.microbatches)
    expected = Counter()
    for p, c in case.edges:
        for b in batches:
            if w[B, c, b] != w[B, p, b]:
                expected[Kind.G, int(w[B, c, b]), int(w[B, p, b])] += 1
    # An activation goes once to a worker, however many consumers run there; per consumer, each of its outputs.
    parts = {
        (p, c * (p in case.per_consumer), b, int(w[d, c, b])) for p, c in case.edges for b in batches for d in (F, B)
    }
    for p, _, b, to in parts:
        if to != w[F, p, b]:
            expected[Kind.X, int(w[F, p, b]), to] += 1
    program = case.compile()
    rows = program.rows
    sends = [i for i in range(len(program)) if rows.op[i] == Op.SEND]
    sent = Counter((int(rows.kind[i]), int(rows.rank[i]), int(rows.to[i])) for i in sends)
    assert {key: count for key, count in sent.items() if key[0] in (Kind.X, Kind.G)} == dict(expected)
    # A worker returns the gradient of a foreign stage once, after its last backward of it.
    foreign = {
        (s, rank)
        for s, owners in enumerate(program.header.owners)
        for rank in np.unique(w[B, s]).tolist()
        if rank not in owners
    }
    returned = [(int(rows.stage[i]), int(rows.rank[i])) for i in sends if rows.kind[i] == Kind.DW]
    assert sorted(returned) == sorted(foreign)


def fewest_fetches(uses, slots):
    """The least number of fetches for foreign stages used in this order, by trying every eviction."""
    best = {frozenset(): 0}
    for stage in uses:
        after = {}
        for held, count in best.items():
            if stage in held:
                choices = [(held, count)]
            elif len(held) < slots:
                choices = [(held | {stage}, count + 1)]
            else:
                choices = [(held - {other} | {stage}, count + 1) for other in held]
            for choice, total in choices:
                after[choice] = min(total, after.get(choice, total))
        best = after
    return min(best.values())


def assert_fewest_fetches(program):
    for rank in range(program.header.workers):
        listed = program.instructions(rank)
        uses = [i.stage for i in listed if i.op in COMPUTE and rank not in program.header.owners[i.stage]]
        fetches = sum(i.op == Op.FETCH_W for i in listed)
        assert fetches == fewest_fetches(uses, program.header.lowering["weight_slots"])


@given(cases())
def test_no_eviction_would_fetch_less(case):
    assert_fewest_fetches(case.compile())


@pytest.mark.parametrize("S", [1, 2, 3, 4, 8, 16])
def test_with_two_slots_no_weight_of_fsdp_comes_late(run, tmp_path, S):
    # One microbatch a worker: S forwards of 1 and S backwards of 2 take 3 S if nobody ever waits.
    for W in range(1, 9):
        path = tmp_path / f"{W}.json"
        run("compile", "fsdp", "--stages", S, "--microbatches", W, "--weight-slots", 2, "-o", path)
        assert json.loads(run("stats", path, "--json").out)["latency"] == 3 * S, f"W={W}"


@given(cases())
def test_send_and_receive_stand_side_by_side_in_the_global_order(case):
    """Executing the global order one instruction after another works, even if every SEND blocks."""
    _, S, batches = case.compute.shape
    # Any start times that respect pred will do: forwards by stage, then backwards, then W.
    d, s, _ = np.indices(case.compute.shape)
    start = np.where(d == F, s, (d + 1) * S + (S - 1 - s)).ravel() * float(batches)
    placed = refine(place(case.scheme(), case.sizes, case.options(prefetch=0, recompute=())))
    program = emit_jobs(header_of(placed), start, placed)
    for insert in PIPELINE:
        program = insert(program, placed)
    posted = set()
    for row in range(len(program)):
        rank, i = int(program.rows.rank[row]), program.instruction(row)
        message = (i.kind, i.stage, i.mb, i.piece)
        if i.op == Op.SEND:
            later = program.instruction(row + 1)
            assert later.op in (Op.RECV, Op.FETCH_W) and later.source == rank and program.rows.rank[row + 1] == i.to
            assert message == (later.kind, later.stage, later.mb, later.piece)
            posted.add(row + 1)
        elif i.op in (Op.RECV, Op.FETCH_W):
            assert row in posted
