"""OFFLOAD, FREE and RELOAD of what forwards save, and of the state of optimizers.

`offload`: what forwards save is in host memory until the backward.

The copies have the time of `prefetch` jobs each, on a link that computes nothing:

    FWD s.b   OFFLOAD   1 ... prefetch jobs   FREE   jobs ...   RELOAD   1 ... prefetch jobs   BWD s.b

FREE waits for the copy out, and the backward for the copy back. FREE comes directly before a job, behind what the job
before it sends. A split backward has a second wait, between BWD_I and BWD_W. Where no job would run between FREE and
RELOAD the rank keeps what is saved: this would need as much memory, and bandwidth besides. So the last stage of 1F1B,
whose backward follows at once, offloads nothing. Ranks are independent of one another here, so this pass works on the
projected program.

`offload_optimizer`: the state of optimizers lives in host memory. While one unit steps, the state of the next is on its
way to the device, and that of the last on its way back, so a rank holds that of three units at most:

    RELOAD opt.0   NORM   RELOAD opt.1   STEP 0   OFFLOAD opt.0   RELOAD opt.2   STEP 1   OFFLOAD opt.1   FREE opt.0 ...
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from schedgen.compiler.place import PlacedScheme
from schedgen.ir.instructions import COMPUTE, Kind, Op
from schedgen.ir.program import Program, Rows, concatenate, rows
from schedgen.util.arrays import Flags, Numbers
from schedgen.util.errors import UsageError


def offload(program: Program, placed: PlacedScheme) -> Program:
    """A projected program that offloads what `placed.offload` asks for; its header names what does go to the host.

    UsageError if nothing does. A forward that is redone saves nothing, and has nothing to offload.
    """
    if not placed.offload.any():
        return program
    jobs, ahead = program.rows_of(*COMPUTE), placed.options.prefetch
    place = np.zeros(len(program) + 1, np.int64)  # by row: its place among all jobs; of -1, no row, as of the first
    place[jobs] = np.arange(len(jobs))
    new, rows_before, gone = list[Rows](), list[Numbers](), np.zeros_like(placed.offload)
    for job, user in ((Op.FWD,), (Op.BWD, Op.BWD_I)), ((Op.BWD_I,), (Op.BWD_W,)):
        first, last = (place[program.job_rows(*ops)] for ops in (job, user))
        goes = placed.offload & ~placed.redone & (last - first >= 2 * ahead + 2)
        gone |= goes
        stage, mb = (column.astype(np.int32) for column in np.nonzero(goes))
        first, last = first[goes], last[goes]
        rank = program.rows.rank[jobs[first]]
        new += [rows(op, rank, kind=Kind.SAVED, stage=stage, mb=mb) for op in (Op.OFFLOAD, Op.FREE, Op.RELOAD)]
        rows_before += [jobs[first], jobs[first + ahead + 1] - 1, jobs[last - ahead] - 1]
    if not gone.any():
        raise UsageError(
            f"--offload: what these forwards save is needed at most {2 * ahead + 1} jobs later, or they are redone: "
            "nothing would be on the host while a job runs"
        )
    header = replace(program.header, lowering={**program.header.lowering, "offload": named_forwards(gone)})
    return Program(header, program.rows).insert(concatenate(new), after=np.concatenate(rows_before))


def offload_optimizer(program: Program) -> Program:
    """A projected program whose STEPs each find the state of their optimizer on the device, if its header says so."""
    if not program.header.offloads_optimizer:
        return program
    table, steps, norms = program.rows, program.rows_of(Op.STEP), program.rows_of(Op.NORM)  # a NORM for each rank
    rank, count = table.rank[steps], np.bincount(table.rank[steps], minlength=program.header.workers)
    end = np.cumsum(count)  # of each rank's steps, among all
    place, last = np.arange(len(steps)), end[rank] - 1
    is_first = place == last + 1 - count[rank]
    is_free = place + 2 <= last  # before the STEP of the unit after the next, else at the end
    after = (
        steps,
        np.where(is_free, steps[np.minimum(place + 2, last)] - 1, steps[last]),
        np.where(is_first, norms[rank], steps[place - 1]) - 1,
    )
    new = [
        rows(op, rank, kind=Kind.OPT, stage=table.stage[steps], piece=table.piece[steps])
        for op in (Op.OFFLOAD, Op.FREE, Op.RELOAD)  # in this order where they meet
    ]
    return program.insert(concatenate(new), after=np.concatenate(after))


def named_forwards(chosen: Flags) -> list[int | list[int]]:
    """Stages whose forwards are all chosen, and pairs of a stage and a microbatch where only some are."""
    named: list[int | list[int]] = []
    for stage, of_stage in enumerate(chosen):
        named += [stage] if of_stage.all() else [[stage, mb] for mb in np.flatnonzero(of_stage).tolist()]
    return named
