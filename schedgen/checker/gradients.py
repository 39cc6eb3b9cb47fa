"""Rule 5: every gradient reaches every owner exactly once, every owner steps once.

dw.s on a rank takes in that rank's backwards and the partials it adds. Then
it either is sent on, once and complete, or (on an owner) ends in STEP. Sums
move forward in time only, so each ends at an owner, and every gradient is in
exactly one sum; owners, where there are several, sum up once among themselves.
Of divided weights this holds for every part: a backward adds to them all.
Owners of tied stages then sum up what these share, once for every tie.
"""

from __future__ import annotations

import numpy as np

from schedgen.analysis.subject import BACKWARD, Numbers, Subject
from schedgen.ir.instructions import Ints, Kind, Op


def rule_5(subject: Subject) -> None:
    """Where weights have no versions; else rule 9 comes with it."""
    if subject.header.weight_versions.count:
        return
    header, owner = subject.header, subject.owner
    several = np.array([not header.part_owners and len(ranks) > 1 for ranks in header.owners])[subject.stage_of]
    groups = {ranks: group for group, ranks in enumerate(header.groups)}
    group_of = np.array([groups.get(ranks, -1) for ranks in header.owners])[subject.stage_of]

    backwards, adds = subject.having(Op.BWD, Op.BWD_W), subject.having(Op.ADD)
    sends = subject.having(Op.SEND)
    sends = sends[subject.kind[sends] == Kind.DW]
    sums, steps = subject.having(Op.ALLREDUCE), subject.having(Op.STEP)
    sums, ties = sums[subject.kind[sums] == Kind.DW], sums[subject.kind[sums] == Kind.T]
    last_add, last_send, last_sum, last_step = (_last(subject, rows) for rows in (adds, sends, sums, steps))
    last_part = np.maximum(last_add, _of_stage(subject, _last(subject, backwards)))

    def at(rows: Numbers) -> tuple[Ints, Numbers]:
        return subject.rank[rows], subject.unit(rows)

    for rows, wrong, words in (
        (sends, owner[at(sends)], "an owner keeps its sum and does not send it"),
        (sends, sends < last_send[at(sends)], "this sum is sent twice"),
        (sends, sends < last_part[at(sends)], "this sum is not complete here"),
        (sums, ~several[subject.unit(sums)], "this stage has one owner"),
        (sums, subject.peer[sums] != group_of[subject.unit(sums)], "this is not the group of the stage's owners"),
        (sums, sums < last_sum[at(sums)], "this sum is reduced twice"),
        (sums, sums < last_part[at(sums)], "this sum is not complete here"),
        (steps, ~owner[at(steps)], "this rank does not own the stage"),
        (steps, steps < last_step[at(steps)], "this stage steps twice"),
        (steps, steps < np.maximum(last_part[at(steps)], last_sum[at(steps)]), "this sum is not complete here"),
    ):
        for row in rows[wrong][:1]:
            subject.refuse(5, int(row), words)
    for missing, words in (
        (owner & (last_step < 0), "STEP of w.{} is missing" if header.part_owners else "STEP of stage {} is missing"),
        (owner & several & (last_sum < 0), "ALLREDUCE of dw.{} is missing"),
        (~owner & (last_part >= 0) & (last_send < 0), "dw.{} never leaves for an owner"),
    ):
        for rank, unit in np.argwhere(missing)[:1].tolist():
            subject.refuse_rank(5, rank, words.format(_said(subject, unit)))
    last_of_sum = np.maximum(last_part, last_sum)
    norm = norms(subject, last_of_sum, last_step)
    _ties(subject, ties, last_of_sum, norm)
    uses = np.flatnonzero(np.isin(subject.op, (Op.FWD, Op.RECOMPUTE, *BACKWARD)) | (subject.kind == Kind.W))
    stepped = last_step[at(uses)]
    if header.part_owners:  # a job uses all parts
        compute = subject.kind[uses] != Kind.W
        owned = np.where(last_step < 0, len(subject.program), last_step)
        first = np.minimum.reduceat(owned, subject.first_unit[:-1], axis=1)[subject.rank[uses], subject.stage[uses]]
        stepped = np.where(compute, first, stepped)
    for row in uses[(stepped >= 0) & (stepped < uses)][:1]:
        subject.refuse(5, int(row), "this stage has stepped: its weights are the next step's")


def _last(subject: Subject, rows: Numbers) -> Ints:
    """The last of `rows` for every (rank, unit); -1 where there is none. A job counts for the first of its stage."""
    last = np.full(subject.owner.shape, -1, np.int32)
    np.maximum.at(last, (subject.rank[rows], subject.unit(rows)), rows)
    return last


def _of_stage(subject: Subject, last: Ints) -> Ints:
    """What counts for the first unit of each stage, for all of them."""
    return last[:, subject.first_unit[subject.stage_of]] if subject.header.part_owners else last


def _said(subject: Subject, unit: int) -> str:
    """What follows w. and dw. in the name of a unit."""
    stage, via = subject.header.weight_shards.units[unit]
    return f"{stage}/{via}" if via >= 0 else f"{stage}"


def norms(subject: Subject, last_sum: Ints, last_step: Ints) -> Numbers:
    """NORM once on every rank, of all ranks, behind every sum and before every STEP: its row by rank."""
    everyone = tuple(range(subject.header.workers))
    right = [ranks == everyone for ranks in subject.header.groups]
    norm = np.full(len(everyone), -1, np.int64)
    for row in subject.having(Op.NORM).tolist():
        if norm[subject.rank[row]] >= 0 or not right[subject.peer[row]]:
            subject.refuse(5, row, "every rank enters one NORM, of all ranks")
        norm[subject.rank[row]] = row
    for rank in np.flatnonzero(norm < 0)[:1]:
        subject.refuse_rank(5, int(rank), "NORM is missing")
    for rank, unit in np.argwhere(last_sum > norm[:, None])[:1].tolist():
        subject.refuse(5, int(last_sum[rank, unit]), f"this adds to dw.{_said(subject, unit)} behind NORM")
    for rank, unit in np.argwhere((last_step >= 0) & (last_step < norm[:, None]))[:1]:
        subject.refuse(5, int(last_step[rank, unit]), "this STEP stands before NORM")
    return norm


def _ties(subject: Subject, rows: Numbers, last_sum: Ints, norm: Numbers) -> None:
    """Every owner of a tied stage enters each of its ties, behind its sums of the tie's stages and before NORM.

    None enters one twice: that is refused where buffers are followed.
    """
    header = subject.header
    rows = rows[np.argsort(subject.stage[rows], kind="stable")]
    bounds = np.searchsorted(subject.stage[rows], np.arange(len(header.tied) + 1))
    for k, stages in enumerate(header.tied):
        at, sharers, entered = list(stages), header.ties.sharers(k), set[int]()
        mine = rows[bounds[k] : bounds[k + 1]]
        right = {group: header.groups[group] == sharers for group in np.unique(subject.peer[mine]).tolist()}
        for row in mine.tolist():
            rank = int(subject.rank[row])
            complete = last_sum[rank, at][subject.owner[rank, at]].max(initial=-1)
            for wrong, words in (
                (not right[int(subject.peer[row])], "this is not the group of the tie's owners"),
                (row < complete, "the sums of the tie's stages are not complete here"),
                (row > norm[rank], f"this adds to t.{k} behind NORM"),
            ):
                if wrong:
                    subject.refuse(5, row, words)
            entered.add(rank)
        for rank in sharers:
            if rank not in entered:
                subject.refuse_rank(5, rank, f"ALLREDUCE of t.{k} is missing")
