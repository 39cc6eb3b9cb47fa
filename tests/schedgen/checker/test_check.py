"""A schedule damaged in one place is refused, at that place and for the reason of the rule it breaks."""

from __future__ import annotations

import json

import pytest
from damage import (
    NORM,
    I,
    allreduce,
    append,
    both,
    drop,
    edit,
    everywhere,
    free,
    job,
    move,
    put,
    recv,
    send,
    step,
    swap,
    twice,
)

from schedgen.checker import RULES

# fsdp: rank 1 owns stage 1; ranks 0 and 2 send it their dw.1. With this, rank 0's goes to rank 2 instead.
ASTRAY = both(edit(0, send("dw.1", 1), to=2), drop(1, **recv("dw.1", 0)), drop(1, **recv("dw.1", 0, "ADD")))
SUM = allreduce("dw.0", 1)  # of replicas: of ranks 0 and 1, which have stage 0
X_SUM, G_SUM = {"op": "ALLREDUCE", "buf": "x.2.0"}, {"op": "ALLREDUCE", "buf": "g.0.0"}  # of slices
T_0, T_1 = {"op": "ALLREDUCE", "buf": "t.0"}, {"op": "ALLREDUCE", "buf": "t.1"}


def on_both(make):
    """The same damage on ranks 0 and 1."""
    return both(make(0), make(1))


def used(op, stage, mb, version):
    return job(op, stage, mb) | I(version=version)


# A schedule, what is done to it, the rule that it breaks then, and words of the reason.
DAMAGES = [
    # Rule 1
    ("gpipe", "FWD twice", twice(0, **job("FWD", 0, 3)), 1, "this job is listed twice"),
    ("gpipe", "FWD removed", drop(0, **job("FWD", 0, 3)), 1, "FWD of stage 0, microbatch 3 is missing"),
    ("ddp", "FWD on another rank", move(0, job("FWD", 0, 4), to=1, before=job("FWD", 0, 5)), 1, "on worker 0"),
    ("1f1b", "BWD as half a BWD", edit(2, job("BWD", 2, 0), op="BWD_I"), 1, "the backward is not split"),
    # FWD computes the loss: where the backward recomputes it, nothing but the loss needs the last stage's FWD.
    *(
        ("redone", f"FWD behind {op}",
         both(move(1, free("x.1.1"), after=job(op, 1, 1)), move(1, job("FWD", 1, 1), after=job(op, 1, 1))),
         1, "this forward comes after its RECOMPUTE")
        for op in ("RECOMPUTE", "BWD")
    ),
    ("forwards of slices", "FWD again", append(3, job("FWD", 3, 0)), 1, "this job is listed twice"),
    *(
        ("forwards of slices", f"{i['op']} {i.get('buf', '')}", append(rank, i), 1, "this instruction trains")
        for rank, i in (
            (3, job("BWD", 3, 0)), (3, job("BWD_W", 3, 0)), (3, job("RECOMPUTE", 3, 0)), (0, step(0)),
            (0, send("dw.0", 1)), (0, recv("g.0.0", 1)), (0, NORM | I(group=0)), (0, allreduce("dw.0", 0)),
        )
    ),
    # Rule 2
    ("gpipe", "RECV after its use", move(1, recv("x.0.0", 0), after=job("FWD", 1, 0)), 2, "x.0.0 is not defined"),
    ("gpipe", "STEP without weights", put(1, step(0), after=NORM), 2, "w.0 is not defined"),
    ("gpipe", "a share of one consumer", edit(1, send("g.0.0", 0), buf="g.0.0.1"), 2, "there is no such buffer"),
    ("outputs", "an output of all", edit(0, send("x.0.0.3", 3), buf="x.0.0"), 2, "there is no such buffer"),
    ("outputs", "an output of no consumer", edit(0, send("x.0.0.3", 3), buf="x.0.0.2"), 2, "there is no such buffer"),
    ("outputs", "the output of one of one", edit(1, send("x.1.0", 2), buf="x.1.0.2"), 2, "there is no such buffer"),
    ("stash", "FREE of no version yet", move(0, free("w.0@2"), before=step(0, 2)), 2, "w.0@2 is not defined"),
    ("slices", "FWD after its sum", move(0, job("FWD", 2, 0), after=X_SUM), 2, "x.2.0 is not defined"),
    ("slices", "a sum of another rank's", edit(0, X_SUM, buf="x.4.0"), 2, "x.4.0 is not defined"),
    # Rule 3
    ("gpipe", "SEND removed", drop(0, **send("x.0.0", 1)), 3, "the next message of this kind from rank 0"),
    ("gpipe", "last SEND removed", drop(0, **send("x.0.7", 1)), 3, "rank 0 never sends this"),
    ("gpipe", "SEND to oneself", edit(0, send("x.0.0", 1), to=0), 3, "a rank does not send to itself"),
    # Rule 4
    ("1f1b", "RECV too late", move(0, recv("g.0.1", 1), after=send("x.0.4", 1)), 4,
     'waits forever, in a cycle with line 96: rank 1: {"op": "SEND", "buf": "g.0.1", "to": 0}'),
    # Rule 5: steps
    ("gpipe", "STEP removed", drop(0, **step(0)), 5, "STEP of stage 0 is missing"),
    ("gpipe", "STEP twice", twice(0, **step(0)), 5, "this stage steps twice"),
    ("fsdp", "STEP on a non-owner that holds a copy", put(0, step(3), after=job("BWD", 3, 4)), 5,
     "this rank does not own the stage"),
    ("gpipe", "STEP before NORM", swap(0, NORM, step(0)), 5, "this STEP comes before NORM"),
    ("gpipe", "no NORM at all", everywhere(lambda rank: drop(rank, "NORM")), 5, "NORM is missing"),
    ("gpipe", "NORM twice", everywhere(lambda rank: twice(rank, "NORM")), 5, "every rank must enter exactly one NORM"),
    ("lpp", "NORMs of groups", everywhere(lambda rank: edit(rank, NORM, group=1 + rank % 2)), 5, "NORM, of all ranks"),
    ("fsdp", "weights sent after STEP", move(0, send("w.0", 1, last=True), after=step(0)), 5, "this stage has stepped"),
    ("buffers", "STEP before a gradient of its two", move(1, step(1, 1), before=job("BWD", 1, 1)), 5, "belongs to the"),
    ("stash", "STEP missing", drop(0, **step(0, 2)), 5, "the next step of this stage here makes version 2"),
    ("stash", "last STEP missing", drop(0, **step(0, 4)), 5, "STEP of stage 0 to version 4 is missing"),
    ("replicas", "a round too many", on_both(lambda rank: put(rank, step(0, 3), after=step(0, 2))), 5,
     "no gradient is left for this step"),
    ("stash", "STEP before its BWD", move(0, step(0, 2), before=job("BWD", 0, 1)), 5, "belongs to the step to version"),
    ("stash", "STEP on no owner", put(1, step(0, 1), after=step(1, 1)), 5, "this rank does not own the stage"),
    ("stash", "NORM before STEP", move(0, NORM, before=step(0, 4)), 5, "after NORM"),
    ("stash", "no NORM", on_both(lambda rank: drop(rank, "NORM")), 5, "NORM is missing"),
    # Rule 5: sums
    ("fsdp", "ADD after NORM", move(0, NORM, before=recv("dw.0", 3, "ADD")), 5, "adds to dw.0 after NORM"),
    ("fsdp", "a weight gradient for a non-owner that has sent its own",
     both(ASTRAY, put(2, recv("dw.1", 0), after=send("dw.1", 1)),
          put(2, recv("dw.1", 0, "ADD"), after=recv("dw.1", 0))),
     5, "this sum is not complete here"),
    ("fsdp", "a weight gradient that stays",
     both(drop(0, **send("dw.1", 1)), drop(1, **recv("dw.1", 0)), drop(1, **recv("dw.1", 0, "ADD"))),
     5, "dw.1 is never sent to an owner"),
    ("fsdp", "a weight gradient sent to two",
     both(put(0, send("dw.1", 2), after=send("dw.1", 1)), put(2, recv("dw.1", 0), before=send("dw.1", 1)),
          put(2, recv("dw.1", 0, "ADD"), before=send("dw.1", 1))),
     5, "this sum is sent twice"),
    ("fsdp", "an owner that sends its sum away",
     both(put(1, send("dw.1", 0), before=send("dw.0", 0)), put(0, recv("dw.1", 1), before=send("dw.1", 1)),
          put(0, recv("dw.1", 1, "ADD"), before=send("dw.1", 1))),
     5, "an owner keeps its sum"),
    ("ddp", "no ALLREDUCE", everywhere(lambda rank: drop(rank, "ALLREDUCE", buf="dw.0")), 5, "ALLREDUCE of dw.0"),
    ("ddp", "ALLREDUCE twice", everywhere(lambda rank: twice(rank, "ALLREDUCE", buf="dw.0")), 5,
     "this sum is reduced twice"),
    ("gpipe", "ALLREDUCE of a stage with one owner",
     both(everywhere(lambda rank: put(rank, allreduce("dw.0", 0), before=NORM)),
          *(put(rank, free("dw.0"), after=NORM) for rank in (1, 2, 3))),
     5, "this stage has one owner, so there is nothing to sum"),
    ("replicas", "no ALLREDUCE", on_both(lambda rank: drop(rank, **SUM, last=True)), 5, "of dw.0 is missing"),
    ("replicas", "ALLREDUCE behind the last STEP", on_both(lambda rank: put(rank, SUM, before=NORM)), 5,
     "one ALLREDUCE belongs to each"),
    ("replicas", "ALLREDUCE before its BWD", on_both(lambda rank: move(rank, SUM, before=job("BWD", 0, rank))), 5,
     "this sum is not complete here"),
    ("replicas", "ALLREDUCE of all", edit(0, SUM, group=0), 5, "this is not the group of the stage's owners"),
    ("stash", "ALLREDUCE of one owner", put(0, allreduce("dw.0", 0), before=step(0, 1)), 5,
     "this stage has one owner, so there is nothing to sum"),
    ("replicas", "ALLREDUCE of others", put(2, SUM, before=step(1, 1)), 5, "this rank does not own the stage"),
    ("stash", "no FREE of a sum", drop(0, **free("dw.0")), 5, "dw.0 still holds the gradient of the step before"),
    ("stash", "FREE of a sum twice", twice(0, **free("dw.0")), 5, "no STEP has used this sum yet"),
    ("ties", "ties that change places",
     both(*(edit(rank, T_0, buf="t.1") for rank in (0, 3)), *(edit(rank, T_1, buf="t.0") for rank in (1, 2))),
     5, "this is not the group of the tie's owners"),
    # Rank 1 sends its sum to rank 0, frees it, and adds the total; nothing stands between the last two.
    ("two sums", "a sum that is sent and kept", drop(1, **free("dw.0")), 5, "this sum is not complete here"),
    ("two sums", "a gradient behind the sum that is sent", move(1, job("BWD", 0, 4), before=recv("dw.0", 0, "ADD")), 5,
     "what follows a sum that is sent must be the total"),
    # Rule 6
    ("gpipe", "no NORM on one rank", drop(2, "NORM"), 6, "rank 2 of group 0 does not enter this"),
    ("ddp", "ALLREDUCEs swapped on one rank", swap(1, allreduce("dw.3"), allreduce("dw.2")), 6,
     "in place of this, rank 0 enters"),
    ("lpp", "ALLREDUCE of others", put(0, allreduce("dw.0", 2), before=NORM), 6, "this rank is not in group 2"),
    ("ties", "a tie among others", both(edit(0, T_0, group=2), edit(3, T_0, group=2)), 6, "not in group 2, [1, 2]"),
    ("ties of all", "ties in another order on one rank", swap(0, T_0, T_1), 6, "in place of this, rank 0 enters"),
    ("ties of all", "a stage in place of the tie with its number", edit(0, T_0, buf="dw.0"), 6,
     "in place of this, rank 0 enters"),
    # Rule 7
    ("1f1b", "FREE removed", drop(0, **free("g.0.0")), 7, "g.0.0 is never freed"),
    ("1f1b", "FREE twice", twice(0, **free("g.0.0")), 7, "g.0.0 is used again after its end"),
    ("gpipe", "FREE of own weights", put(0, free("w.0"), after=step(0)), 7, "belongs to this rank"),
    ("fsdp", "a copy fetched twice", both(twice(0, "FETCH_W", stage=1), twice(1, **send("w.1", 0))), 7,
     "w.1 is defined twice"),
    ("stash", "no FREE of the last sum", drop(0, **free("dw.0"), last=True), 7, "dw.0 is never freed"),
    ("stash", "no FREE of a version", drop(0, **free("w.0@0")), 7, "w.0@0 is used again after its end"),
    ("stash", "FREE of the last version", put(0, free("w.0@4"), after=step(0, 4)), 7,
     "these are the newest weights, which are never freed"),
    ("tie of one", "a sum freed before its tie", move(0, free("dw.7"), before=T_0), 7,
     "dw.7 is never freed after this, its last use"),
    # Rule 9
    ("stash", "FWD with an older version", edit(0, job("FWD", 0, 2), version=0), 9, "version 1 is the newest here"),
    ("vertical", "FWD with the newest version", edit(1, job("FWD", 1, 1), version=1), 9,
     "version 0 is the one with which the microbatch entered"),
    ("stash", "BWD with the newest version", edit(0, job("BWD", 0, 1), version=1), 9, "its forward uses version 0"),
    ("stash", "FWD before the STEP", move(0, used("FWD", 0, 2, 1), before=step(0, 1)), 9, "version 0 is the newest"),
    ("buffers", "jobs with the newest of two buffers",
     both(edit(1, job("FWD", 1, 3), version=1), edit(1, job("BWD", 1, 3), version=1)),
     9, "version 0 is the one that the update before the last made"),
    # Rule 10
    ("slices", "no sum of an output", drop(0, **X_SUM), 10, "ALLREDUCE of x.2.0 is missing"),
    ("slices", "no sum of a gradient", drop(0, **G_SUM), 10, "ALLREDUCE of g.0.0 is missing"),
    ("slices", "an output summed twice", twice(0, **X_SUM), 10, "this is summed twice"),
    ("slices", "a gradient summed twice", twice(0, **G_SUM), 10, "this is summed twice"),
    ("slices", "a sum after its SEND", move(0, X_SUM, after=send("x.2.0", 2)), 10, "x.2.0 is only a slice's part here"),
    ("slices", "a sum after its FWD", move(0, allreduce("x.0.0"), after=job("FWD", 2, 0)), 10,
     "x.0.0 is only a slice's part here"),
    ("slices", "a sum after its BWD", move(0, G_SUM, after=job("BWD", 0, 0)), 10, "g.0.0 is only a slice's part here"),
    ("slices", "a sum of what is replicated", put(2, allreduce("x.6.0", 2), after=job("FWD", 6, 0)), 10,
     "the stage that computes this is not sliced"),
    ("slices", "a sum of what a replicated stage gives", put(2, allreduce("g.4.0", 2), after=job("BWD", 6, 0)), 10,
     "the stage that computes this is not sliced"),
    ("slices", "a sum in the group of all", edit(0, X_SUM, group=0), 10, "this is not the group of the stage's slices"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "damage", "rule", "words"),
    [(name, *row) for name, _, *row in DAMAGES],
    ids=[f"{row[0]}: {row[1]}" for row in DAMAGES],
)
def test_damage_is_refused_where_it_is(name, damage, rule, words, bases, refused_where_it_is):
    file = json.loads(bases[name])
    damage(file["programs"])
    refused_where_it_is(file, rule, words)


def test_a_weight_gradient_may_travel_through_another_worker(bases, judge):
    """The checker proves the rules, not that a file looks like the compiler's."""
    file = json.loads(bases["fsdp"])
    received = put(2, recv("dw.1", 0), before=send("dw.1", 1)), put(2, recv("dw.1", 0, "ADD"), before=send("dw.1", 1))
    both(ASTRAY, *received)(file["programs"])
    assert judge(file)[0].code == 0


def test_owners_that_add_the_same_gradients_in_different_orders_are_refused(run, refused_where_it_is):
    """Both owners send their sum and add the other's: each gradient counts once, but the bits may differ."""
    sizes = ("--stages", 1, "--microbatches", 2, "--workers", 2)
    file = json.loads(run("compile", "ddp", *sizes, "--sums", "tree", "-o", "-").out)
    for rank, listed in enumerate(file["programs"]):
        norm = next(k for k, i in enumerate(listed) if i["op"] == "NORM")
        moves = [recv("dw.0", 1 - rank), send("dw.0", 1 - rank)]
        jobs = [i for i in listed[:norm] if i.get("buf") != "dw.0"]
        listed[:norm] = [*jobs, *(moves[::-1] if rank else moves), recv("dw.0", 1 - rank, "ADD")]
    refused_where_it_is(file, 5, "this sum is not complete here")


def test_a_loss_behind_norm_is_refused(run, judge, refused, tmp_path):
    scheme = tmp_path / "apart.py"
    scheme.write_text("def w(s, b, d):\n    return d, d\n\n\ndef n(s, b, d):\n    return b + d\n")
    file = json.loads(run("compile", scheme, "--stages", 1, "--microbatches", 1, "--workers", 2, "-o", "-").out)
    assert judge(file)[0].code == 0
    for what in (free("x.0.0"), job("FWD", 0, 0)):
        move(0, what, after=NORM)(file["programs"])
    assert f"this forward, and so its loss, comes after NORM (rule 5: {RULES[5]})" in refused(judge(file)[0], 1)
