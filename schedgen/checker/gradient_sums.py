"""Rule 5: every gradient reaches every owner exactly once, every owner steps once.

dw.s on a rank collects that rank's backwards and the partials it adds. Then it either is sent on, once and complete,
or (on an owner) is used by STEP. Sums move forward in time only, so each ends at an owner, and every gradient is in
exactly one sum. Several owners of a stage then all-reduce their sums once, or sum them by messages, too. For divided
weights or gradients this holds for every part: a backward adds to all of them. Owners of tied stages then all-reduce
what these share, once for every tie.

With messages among owners, a life of dw.s that begins with a partial and gets nothing more is a copy: its value is that
of the life it came from. Every other life is a sum, a value of its own. Each sum but one is added, by itself or by one
of its copies, to exactly one other sum; so all ways lead to that one, and every gradient is in it once. All owners
step with it or with a copy of it, so that their gradients are equal to the bit. The state of an optimizer that lives
in the memory of the host goes back there once, after the STEP.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedgen.checker.proof import Proof, Touches
from schedgen.ir.effects import Buffer, Effect
from schedgen.ir.instructions import Kind, Op, buffer_name
from schedgen.util.arrays import Ints, Numbers


def rule_5(proof: Proof) -> None:
    """Refuse a gradient that is lost or counted twice, in a program with a flush; without one, rule 9 includes this.

    In a list of forwards alone rule 1 has already refused everything that could break this.
    """
    header, owner = proof.header, proof.header.owns_gradient
    if header.is_forward or not header.has_flush:
        return
    stage_of = header.gradient_units.stage_of
    several = np.array(header.several_owners)[stage_of]
    group_of = np.array([header.group_numbers.get(ranks, -1) for ranks in header.owners])[stage_of]
    adds = proof.touches(Buffer.DW, Effect.ADD)
    reduced = proof.op[adds.rows] == Op.ALLREDUCE
    parts, sums = adds.by(~reduced), adds.by(reduced & (proof.kind[adds.rows] == Kind.DW))
    sends = proof.touches(Buffer.DW, Effect.SEND)
    steps = proof.touches(Buffer.DW, Effect.READ)
    last_part, last_sum, last_step = (each.last(owner.shape) for each in (parts, sums, steps))
    keeps, lives = owner & ~(several & header.sums_by_messages), _Lives.of(proof)
    part_of, sent, none = lives.find(parts), lives.find(sends), np.full(len(lives.key), -1, np.int32)
    added, first_sent = none.copy(), none
    added[part_of], first_sent[sent[::-1]] = parts.rows, sends.rows[::-1]  # of several rows, the one written last stays

    def of(last: Ints, touches: Touches) -> Ints:
        return last[touches.rank, touches.number]

    for touches, wrong, words in (
        (sends, keeps[sends.rank, sends.number], "an owner keeps its sum and does not send it"),
        (sends, (sends.rows > first_sent[sent]) & ~owner[sends.rank, sends.number], "this sum is sent twice"),
        (sends, sends.rows < added[sent], "this sum is not complete here"),
        (sums, ~several[sums.number], "this stage has one owner, so there is nothing to sum"),
        (sums, np.full(len(sums.rows), header.sums_by_messages), "the header says that owners sum by messages"),
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
        (owner & several & (last_sum < 0) & (not header.sums_by_messages), "ALLREDUCE of dw.{} is missing"),
    ):
        for rank, unit in np.argwhere(missing)[:1].tolist():
            proof.refuse_rank(5, rank, words.format(stage_of[unit] if header.parts else _said(proof, unit)))
    _state_goes_back(proof, last_step)
    _counted_once(proof, lives, (parts, part_of), (sends, sent), sums, steps)
    last_of_sum = np.maximum(last_part, last_sum)
    norm = norms(proof, last_of_sum, last_step)
    _sums_of_ties(proof, last_of_sum, norm)
    uses = proof.touches(Buffer.W, Effect.READ, Effect.SEND, Effect.RECEIVE, Effect.END)
    stepped = of(last_step[:, header.gradient_units.first_unit[:-1]] if header.parts else last_step, uses)
    late = uses.rows[(stepped >= 0) & (stepped < uses.rows)]
    proof.refuse_any(5, late, "this stage has stepped: its weights are the next step's")


class _Lives(NamedTuple):
    """The lives of weight gradients, by rank, unit and begin."""

    rank: Ints
    number: Ints  # the unit
    begin: Ints
    key: Numbers  # ascending: of rank, unit and begin
    size: tuple[int, int]  # units, rows

    @classmethod
    def of(cls, proof: Proof) -> _Lives:
        """Those of a program that has passed rules 2 and 7."""
        lifetimes = proof.analysis.lifetimes
        lives = np.flatnonzero(lifetimes.buffer == Buffer.DW)
        rank, number, begin = (column[lives] for column in (lifetimes.rank, lifetimes.number, lifetimes.begin))
        size = proof.header.owns_gradient.shape[1], len(proof.program)
        key = (rank.astype(np.int64) * size[0] + number) * size[1] + begin
        order = np.argsort(key)
        return cls(rank[order], number[order], begin[order], key[order], size)

    def find(self, touches: Touches) -> Numbers:
        """The life that each access belongs to."""
        key = (touches.rank.astype(np.int64) * self.size[0] + touches.number) * self.size[1] + touches.rows
        return np.searchsorted(self.key, key, side="right") - 1


def _counted_once(
    proof: Proof, lives: _Lives, parts: tuple[Touches, Numbers], sends: tuple[Touches, Numbers], sums: Touches,
    steps: Touches,
) -> None:  # fmt: skip
    """Prove that every gradient is in the one sum that all owners of its unit step with, once.

    parts, sends: each with the lives that they touch
    """
    count, analysis = len(lives.key), proof.analysis
    life, sent_by = np.full((2, len(proof.program)), -1, np.int64)  # by row of a SEND or ADD; by row of its RECV
    for touches, touched in (parts, sends):
        life[touches.rows] = touched
    sent_by[analysis.messages.receives] = analysis.messages.sends
    adding = proof.op[analysis.lifetimes.users] == Op.ADD
    rows, received = analysis.lifetimes.users[adding], analysis.lifetimes.received[adding]
    source, target = life[sent_by[received]], life[rows]
    terms = np.bincount(parts[1], minlength=count)
    is_copy = (terms == 1) & (np.bincount(target, minlength=count) == 1)
    again = np.append(False, (lives.rank[1:] == lives.rank[:-1]) & (lives.number[1:] == lives.number[:-1]))[:count]
    wrong = again & ~(is_copy & proof.header.owns_gradient[lives.rank, lives.number])
    words = "what follows a sum that is sent must be the total, which one owner has from another"
    proof.refuse_any(5, np.sort(lives.begin[wrong]), words)
    # By life: the sum that it is, or is a copy of. Copies of copies are followed to their sum in log-many rounds.
    value = np.arange(count)
    value[target[is_copy[target]]] = source[is_copy[target]]
    for _ in range(count.bit_length()):
        value = value[value]
    is_term, summed = ~is_copy[target], lives.find(sums)
    used = np.concatenate([value[source[is_term]], value[summed]])
    user = np.concatenate([rows[is_term], sums.rows])
    order = np.lexsort((user, used))
    twice = order[1:][used[order][1:] == used[order][:-1]]
    proof.refuse_any(5, np.sort(user[twice]), "what this adds is counted already")
    all_reduced, stepped = np.zeros(count, bool), lives.find(steps)
    all_reduced[summed] = True
    total = np.where(all_reduced[stepped], count, value[stepped])  # a stage's ALLREDUCE has one total
    of_unit = np.full(lives.size[0], -1, np.int64)
    of_unit[steps.number[::-1]] = total[::-1]
    proof.refuse_any(5, steps.rows[total != of_unit[steps.number]], "another owner steps with another sum")
    lost = ~is_copy
    lost[used] = lost[total[total < count]] = False
    for k in np.flatnonzero(lost)[:1].tolist():
        proof.refuse_rank(5, int(lives.rank[k]), f"dw.{_said(proof, int(lives.number[k]))} is never sent to an owner")


def _state_goes_back(proof: Proof, last_step: Ints) -> None:
    """Prove that an optimizer's state goes back to the host once, after its STEP, if that is where it lives."""
    sends, header = proof.touches(Buffer.OPT, Effect.SEND), proof.header
    comes = proof.touches(Buffer.OPT, Effect.RECEIVE)
    if not header.offloads_optimizer:
        proof.refuse_any(5, comes.rows, "the header says that the state of optimizers stays on the device")
        return
    step = last_step[:, header.gradient_units.first_unit[header.weight_shards.stage_of]] if header.parts else last_step
    for touches in (comes, sends):
        owns = header.is_owner[touches.rank, touches.number]
        proof.refuse_any(5, touches.rows[~owns], "this rank does not own the stage")
    again = np.ones(len(sends.rows), bool)
    again[np.unique(sends.rank.astype(np.int64) * step.shape[1] + sends.number, return_index=True)[1]] = False
    proof.refuse_any(5, sends.rows[again], "this state goes back twice")
    early = sends.rows < step[sends.rank, sends.number]
    proof.refuse_any(5, sends.rows[early], "this state has its STEP to come")
    for rank, unit in np.argwhere(header.is_owner & (sends.last(step.shape) < 0))[:1].tolist():
        stage, shard = header.weight_shards.units[unit]
        proof.refuse_rank(5, rank, f"OFFLOAD of {buffer_name(Kind.OPT, stage, piece=shard)} is missing")


def _said(proof: Proof, unit: int) -> str:
    """The part of a unit's name that follows w. and dw."""
    stage, part = proof.header.gradient_units.units[unit]
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
