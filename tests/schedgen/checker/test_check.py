"""A schedule damaged in one place is refused, at that place and for the reason of the rule it breaks."""

from __future__ import annotations

import json

import pytest
from damage import NORM, I, both, drop, edit, everywhere, free, job, move, put, recv, send, swap, twice

from schedgen.checker import RULES

# A damage edits `ranks`, the list of every rank's instructions, and returns nothing.


STEP_0 = {"op": "STEP", "stage": 0}
ALLREDUCE_0 = {"op": "ALLREDUCE", "buf": "dw.0", "group": 0}

# fsdp: rank 1 owns stage 1; ranks 0 and 2 send it their dw.1. With this, rank 0's goes to rank 2 instead.
ASTRAY = both(edit(0, send("dw.1", 1), to=2), drop(1, **recv("dw.1", 0)), drop(1, **recv("dw.1", 0, "ADD")))

DAMAGES = [
    # Rule 1
    ("FWD twice", "gpipe", twice(0, **job("FWD", 0, 3)), 1, "this job is listed twice"),
    ("FWD removed", "gpipe", drop(0, **job("FWD", 0, 3)), 1, "FWD of stage 0, microbatch 3 is missing"),
    ("FWD on another rank", "ddp", move(0, job("FWD", 0, 4), to=1, before=job("FWD", 0, 5)), 1, "on worker 0"),
    ("BWD as half a BWD", "1f1b", edit(2, job("BWD", 2, 0), op="BWD_I"), 1, "the backward is not split"),
    # Rule 2
    ("RECV after its use", "gpipe", move(1, recv("x.0.0", 0), after=job("FWD", 1, 0)), 2, "x.0.0 is not defined"),
    ("STEP without weights", "gpipe", put(1, STEP_0, after=NORM), 2, "w.0 is not defined"),
    ("a share of one consumer", "gpipe", edit(1, send("g.0.0", 0), buf="g.0.0.1"), 2, "there is no such buffer"),
    # Rule 3
    ("SEND removed", "gpipe", drop(0, **send("x.0.0", 1)), 3, "the next message of this kind from rank 0"),
    ("last SEND removed", "gpipe", drop(0, **send("x.0.7", 1)), 3, "rank 0 never sends this"),
    ("SEND to oneself", "gpipe", edit(0, send("x.0.0", 1), to=0), 3, "a rank does not send to itself"),
    # Rule 5
    ("STEP removed", "gpipe", drop(0, **STEP_0), 5, "STEP of stage 0 is missing"),
    ("STEP twice", "gpipe", twice(0, **STEP_0), 5, "this stage steps twice"),
    (
        "STEP on a non-owner that holds a copy",
        "fsdp",
        put(0, I(op="STEP", stage=3), after=job("BWD", 3, 4)),
        5,
        "this rank does not own the stage",
    ),
    ("STEP before NORM", "gpipe", swap(0, NORM, STEP_0), 5, "this STEP comes before NORM"),
    ("no NORM at all", "gpipe", everywhere(lambda rank: drop(rank, "NORM")), 5, "NORM is missing"),
    ("NORM twice", "gpipe", everywhere(lambda rank: twice(rank, "NORM")), 5, "every rank must enter exactly one NORM"),
    ("NORMs of groups", "lpp", everywhere(lambda rank: edit(rank, NORM, group=1 + rank % 2)), 5, "NORM, of all ranks"),
    ("ADD after NORM", "fsdp", move(0, NORM, before=recv("dw.0", 3, "ADD")), 5, "adds to dw.0 after NORM"),
    (
        "a weight gradient for a non-owner that has sent its own",
        "fsdp",
        both(
            ASTRAY,
            put(2, recv("dw.1", 0), after=send("dw.1", 1)),
            put(2, recv("dw.1", 0, "ADD"), after=recv("dw.1", 0)),
        ),
        5,
        "this sum is not complete here",
    ),
    (
        "a weight gradient that stays",
        "fsdp",
        both(drop(0, **send("dw.1", 1)), drop(1, **recv("dw.1", 0)), drop(1, **recv("dw.1", 0, "ADD"))),
        5,
        "dw.1 is never sent to an owner",
    ),
    (
        "a weight gradient sent to two",
        "fsdp",
        both(
            put(0, send("dw.1", 2), after=send("dw.1", 1)),
            put(2, recv("dw.1", 0), before=send("dw.1", 1)),
            put(2, recv("dw.1", 0, "ADD"), before=send("dw.1", 1)),
        ),
        5,
        "this sum is sent twice",
    ),
    (
        "an owner that sends its sum away",
        "fsdp",
        both(
            put(1, send("dw.1", 0), before=send("dw.0", 0)),
            put(0, recv("dw.1", 1), before=send("dw.1", 1)),
            put(0, recv("dw.1", 1, "ADD"), before=send("dw.1", 1)),
        ),
        5,
        "an owner keeps its sum",
    ),
    (
        "weights sent after STEP",
        "fsdp",
        move(0, send("w.0", 1, last=True), after=STEP_0),
        5,
        "this stage has stepped",
    ),
    ("no ALLREDUCE", "ddp", everywhere(lambda rank: drop(rank, "ALLREDUCE", buf="dw.0")), 5, "ALLREDUCE of dw.0"),
    (
        "ALLREDUCE twice",
        "ddp",
        everywhere(lambda rank: twice(rank, "ALLREDUCE", buf="dw.0")),
        5,
        "this sum is reduced twice",
    ),
    (
        "ALLREDUCE of a stage with one owner",
        "gpipe",
        both(
            everywhere(lambda rank: put(rank, ALLREDUCE_0, before=NORM)),
            *(put(rank, free("dw.0"), after=NORM) for rank in (1, 2, 3)),
        ),
        5,
        "this stage has one owner, so there is nothing to sum",
    ),
    # Rule 6
    ("no NORM on one rank", "gpipe", drop(2, "NORM"), 6, "rank 2 of group 0 does not enter this"),
    (
        "ALLREDUCEs swapped on one rank",
        "ddp",
        swap(1, I(op="ALLREDUCE", buf="dw.3"), I(op="ALLREDUCE", buf="dw.2")),
        6,
        "in place of this, rank 0 enters",
    ),
    (
        "ALLREDUCE of others",
        "lpp",
        put(0, I(op="ALLREDUCE", buf="dw.0", group=2), before=NORM),
        6,
        "this rank is not in group 2",
    ),
    # Rule 7
    ("FREE removed", "1f1b", drop(0, **free("g.0.0")), 7, "g.0.0 is never freed"),
    ("FREE twice", "1f1b", twice(0, **free("g.0.0")), 7, "g.0.0 is used again after its end"),
    ("FREE of own weights", "gpipe", put(0, free("w.0"), after=STEP_0), 7, "belongs to this rank"),
    (
        "a copy fetched twice",
        "fsdp",
        both(twice(0, "FETCH_W", stage=1), twice(1, **send("w.1", 0))),
        7,
        "w.1 is defined twice",
    ),
    # Rule 4
    (
        "RECV too late",
        "1f1b",
        move(0, recv("g.0.1", 1), after=send("x.0.4", 1)),
        4,
        "waits forever, in a cycle with line",
    ),
]


@pytest.mark.parametrize(
    ("scheme", "damage", "rule", "words"), [row[1:] for row in DAMAGES], ids=[f"{row[1]}: {row[0]}" for row in DAMAGES]
)
def test_damage_is_refused_where_it_is(scheme, damage, rule, words, golden, refused_where_it_is):
    file = json.loads(golden[scheme])
    damage(file["programs"])
    refused_where_it_is(file, rule, words)


def test_a_deadlock_names_both_ranks_and_what_each_waits_for(golden, judge):
    file = json.loads(golden["1f1b"])
    move(0, recv("g.0.1", 1), after=send("x.0.4", 1))(file["programs"])
    message = judge(file)[0].err
    assert 'rank 0: {"op": "SEND", "buf": "x.0.4", "to": 1}' in message
    assert 'rank 1: {"op": "SEND", "buf": "g.0.1", "to": 0}' in message


def test_a_weight_gradient_may_travel_through_another_worker(golden, judge):
    """The checker proves the rules, not that a file looks like the compiler's."""
    file = json.loads(golden["fsdp"])
    both(
        ASTRAY,
        put(2, recv("dw.1", 0), before=send("dw.1", 1)),
        put(2, recv("dw.1", 0, "ADD"), before=send("dw.1", 1)),
    )(file["programs"])
    assert judge(file)[0].code == 0


# FWD computes the loss: if the backward recomputes the forward, nothing but the loss needs the last stage's FWD.


@pytest.mark.parametrize(("behind", "words"), [("RECOMPUTE", "after its RECOMPUTE"), ("BWD", "after its RECOMPUTE")])
def test_a_forward_behind_what_redoes_it_is_refused(behind, words, run, judge, refused):
    file = json.loads(run("compile", "1f1b", "--stages", 2, "--microbatches", 2, "--recompute", 1, "-o", "-").out)
    assert judge(file)[0].code == 0
    for what in (free("x.1.1"), job("FWD", 1, 1)):
        move(1, what, after=job(behind, 1, 1))(file["programs"])
    assert f"this forward comes {words} (rule 1: {RULES[1]})" in refused(judge(file)[0], 1)


def test_a_loss_behind_norm_is_refused(run, judge, refused, tmp_path):
    scheme = tmp_path / "apart.py"
    scheme.write_text("def w(s, b, d):\n    return d, d\n\n\ndef n(s, b, d):\n    return b + d\n")
    file = json.loads(run("compile", scheme, "--stages", 1, "--microbatches", 1, "--workers", 2, "-o", "-").out)
    assert judge(file)[0].code == 0
    for what in (free("x.0.0"), job("FWD", 0, 0)):
        move(0, what, after=NORM)(file["programs"])
    assert f"this forward, and so its loss, comes after NORM (rule 5: {RULES[5]})" in refused(judge(file)[0], 1)


# What the header claims, and what it does not have to prove.


def test_the_memory_limit_stands_in_the_header_and_is_held(run, judge, refused, tmp_path):
    sizes = ("--stages", 4, "--microbatches", 8, "--mode", "greedy")
    assert "memory_limit" not in run("compile", "gpipe", *sizes, "-o", "-").out
    file = json.loads(run("compile", "gpipe", *sizes, "--memory-limit", 4, "-o", "-").out)
    assert file["lowering"]["memory_limit"] == 4 and judge(file)[0].code == 0
    file["lowering"]["memory_limit"] = 3
    words = "the rank holds 4 saved forwards here, and memory_limit is 3"
    assert f"{words} (rule 8: {RULES[8]})" in refused(judge(file)[0], 1)
    # Backwards on another worker, every BWD_I before every BWD_W: none of them is held back.
    scheme = tmp_path / "elsewhere.py"
    scheme.write_text(
        "split = True\n\n\ndef w(s, b, d):\n    on = (d > 0) * 2 + (d == 0) * (b % 2)\n    return on, on\n\n\n"
        "def n(s, b, d):\n    return b + 9 * d\n"
    )
    sizes = ("--stages", 1, "--microbatches", 2, "--workers", 3, "--memory-limit", 1)
    assert "--memory-limit 1: a worker holds 2 saved forwards" in refused(run("compile", scheme, *sizes, "-o", "-"), 2)


@pytest.mark.parametrize(
    ("key", "change", "words"),
    [
        ("groups", lambda groups: groups + groups, "groups must be different, but [0, 1, 2, 3] is listed 2 times"),
        ("edges", lambda edges: edges[:-1], "no stage reads stage 2, and the loss reads the last, 3, alone"),
        ("scheme", lambda scheme: {**scheme, "layers": 7}, "layers must be a list of a number for each stage"),
        ("lowering", lambda lowering: {**lowering, "memory_limit": 0}, "memory_limit must be a whole number of at"),
        ("lowering", lambda lowering: {**lowering, "more": 1}, "and may have memory_limit, updates, accumulated"),
    ],
)
def test_a_header_that_cannot_be_is_refused(key, change, words, golden, run, refused, tmp_path):
    file = json.loads(golden["1f1b"])
    path = tmp_path / "file.json"
    path.write_text(json.dumps({**file, key: change(file[key])}))
    assert words in refused(run("seal", path), 1)
