"""Rule 5: every gradient reaches every owner exactly once, every owner steps once.

dw.s on a rank collects that rank's backwards and the partials it adds. Then it either is sent on, once and complete,
or (on an owner) is used by STEP. Sums move forward in time only, so each ends at an owner, and every gradient is in
exactly one sum. Several owners of a stage then all-reduce their sums once. For divided weights this holds for every
part: a backward adds to all of them. Owners of tied stages then all-reduce what these share, once for every tie.
"""

from __future__ import annotations

import numpy as np

from schedgen.checker.proof import Proof, Touches
from schedgen.ir.effects import Buffer, Effect
from schedgen.ir.instructions import Kind, Op
from schedgen.util.arrays import Ints, Numbers


def rule_5(proof: Proof) -> None:
    """Refuse a gradient that is lost or counted twice, in a program with a flush; without one, rule 9 includes this.

    In a list of forwards alone rule 1 has already refused everything that could break this.
    """
    header, owner = proof.header, proof.header.is_owner
    if header.is_forward or not header.has_flush:
        return
    stage_of = header.weight_shards.stage_of
    several = np.array(header.several_owners)[stage_of]
    group_of = np.array([header.group_numbers.get(ranks, -1) for ranks in header.owners])[stage_of]
    adds = proof.touches(Buffer.DW, Effect.ADD)
    reduced = proof.op[adds.rows] == Op.ALLREDUCE
    parts, sums = adds.by(~reduced), adds.by(reduced & (proof.kind[adds.rows] == Kind.DW))
    sends = proof.touches(Buffer.DW, Effect.SEND)
    steps = proof.touches(Buffer.DW, Effect.READ)
    last_part, last_send, last_sum, last_step = (each.last(owner.shape) for each in (parts, sends, sums, steps))

    def of(last: Ints, touches: Touches) -> Ints:
        return last[touches.rank, touches.number]

    for touches, wrong, words in (
        (sends, owner[sends.rank, sends.number], "an owner keeps its sum and does not send it"),
        (sends, sends.rows < of(last_send, sends), "this sum is sent twice"),
        (sends, sends.rows < of(last_part, sends), "this sum is not complete here"),
        (sums, ~several[sums.number], "this stage has one owner, so there is nothing to sum"),
        (sums, proof.group[sums.rows] != group_of[sums.number], "this is not the group of the stage's owners"),
        (sums, sums.rows < of(last_sum, sums), "this sum is reduced twice"),
        (sums, sums.rows < of(last_part, sums), "this sum is not complete here"),
        (steps, ~owner[steps.rank, steps.number], "this rank does not own the stage"),
        (steps, steps.rows < of(last_step, steps), "this stage steps twice"),
        (steps, steps.rows < np.maximum(of(last_part, steps), of(last_sum, steps)), "this sum is not complete here"),
    ):
        proof.refuse_any(5, touches.rows[wrong], words)
    for missing, words in (
        (owner & (last_step < 0), "STEP of w.{} is missing" if header.weight_shards else "STEP of stage {} is missing"),
        (owner & several & (last_sum < 0), "ALLREDUCE of dw.{} is missing"),
        (~owner & (last_part >= 0) & (last_send < 0), "dw.{} is never sent to an owner"),
    ):
        for rank, unit in np.argwhere(missing)[:1].tolist():
            proof.refuse_rank(5, rank, words.format(_said(proof, unit)))
    last_of_sum = np.maximum(last_part, last_sum)
    norm = norms(proof, last_of_sum, last_step)
    _sums_of_ties(proof, last_of_sum, norm)
    uses = proof.touches(Buffer.W, Effect.READ, Effect.SEND, Effect.RECEIVE, Effect.END)
    stepped = of(last_step, uses)
    late = uses.rows[(stepped >= 0) & (stepped < uses.rows)]
    proof.refuse_any(5, late, "this stage has stepped: its weights are the next step's")


def _said(proof: Proof, unit: int) -> str:
    """The part of a unit's name that follows w. and dw."""
    stage, part = proof.header.weight_shards.units[unit]
    return f"{stage}/{part}" if part >= 0 else f"{stage}"


def norms(proof: Proof, last_sum: Ints, last_step: Ints) -> Numbers:
    """Prove that every rank has one NORM, of all ranks, after losses and sums, before STEPs; return its row by rank."""
    everyone = tuple(range(proof.header.workers))
    right = [ranks == everyone for ranks in proof.header.groups]
    norm = np.full(len(everyone), -1, np.int64)
    for row in proof.rows_of(Op.NORM).tolist():
        if norm[proof.rank[row]] >= 0 or not right[proof.group[row]]:
            proof.refuse(5, row, "every rank must enter exactly one NORM, of all ranks")
        norm[proof.rank[row]] = row
    for rank in np.flatnonzero(norm < 0)[:1]:
        proof.refuse_rank(5, int(rank), "NORM is missing")
    forwards = proof.rows_of(Op.FWD)
    late = forwards[forwards > norm[proof.rank[forwards]]]
    proof.refuse_any(5, late, "this forward, and so its loss, comes after NORM")
    for rank, unit in np.argwhere(last_sum > norm[:, None])[:1].tolist():
        proof.refuse(5, int(last_sum[rank, unit]), f"this adds to dw.{_said(proof, unit)} after NORM")
    for rank, unit in np.argwhere((last_step >= 0) & (last_step < norm[:, None]))[:1]:
        proof.refuse(5, int(last_step[rank, unit]), "this STEP comes before NORM")
    return norm


def _sums_of_ties(proof: Proof, last_sum: Ints, norm: Numbers) -> None:
    """Prove that every owner of a tied stage enters each of its ties, after the sums of its stages and before NORM."""
    header, rows = proof.header, proof.rows_of(Op.ALLREDUCE)
    rows = rows[proof.kind[rows] == Kind.T]
    rows = rows[np.argsort(proof.stage[rows], kind="stable")]
    bounds = np.searchsorted(proof.stage[rows], np.arange(len(header.tied) + 1))
    for k, stages in enumerate(header.tied):
        at, sharers, entered = list(stages), header.sharers(k), set[int]()
        of_tie = rows[bounds[k] : bounds[k + 1]]
        right = {group: header.groups[group] == sharers for group in np.unique(proof.group[of_tie]).tolist()}
        for row in of_tie.tolist():
            rank = int(proof.rank[row])
            complete = last_sum[rank, at][header.is_owner[rank, at]].max(initial=-1)
            for wrong, words in (
                (rank in entered, "this tie is summed twice"),
                (not right[int(proof.group[row])], "this is not the group of the tie's owners"),
                (row < complete, "the sums of the tie's stages are not complete here"),
                (row > norm[rank], f"this adds to t.{k} after NORM"),
            ):
                if wrong:
                    proof.refuse(5, row, words)
            entered.add(rank)
        for rank in sharers:
            if rank not in entered:
                proof.refuse_rank(5, rank, f"ALLREDUCE of t.{k} is missing")
