"""OFFLOAD, FREE and RELOAD of what forwards save, so that it is in host memory until the backward.

The copies have the time of `prefetch` jobs each, on a link that computes nothing:

    FWD s.b   OFFLOAD   1 ... prefetch jobs   FREE   jobs ...   RELOAD   1 ... prefetch jobs   BWD s.b

FREE waits for the copy out, and the backward for the copy back. FREE comes directly before a job, behind what the job
before it sends. Where no job would run between FREE and RELOAD the forward keeps what it saves: this would need as much
memory, and bandwidth besides. So the last stage of 1F1B, whose backward follows at once, offloads nothing. Ranks are
independent of one another here, so this pass works on the projected program.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from schedgen.compiler.place import PlacedScheme
from schedgen.ir.instructions import COMPUTE, Kind, Op
from schedgen.ir.program import Program, concatenate, rows
from schedgen.util.arrays import Flags
from schedgen.util.errors import UsageError


def offload(program: Program, placed: PlacedScheme) -> Program:
    """A projected program that offloads what `placed.offload` asks for; its header names what does go to the host.

    UsageError if nothing does. A forward that is redone saves nothing, and has nothing to offload.
    """
    if not placed.offload.any():
        return program
    jobs, ahead = program.rows_of(*COMPUTE), placed.options.prefetch
    place = np.zeros(len(program) + 1, np.int64)  # by row: its place among all jobs
    place[jobs] = np.arange(len(jobs))
    first, backward = (place[program.job_rows(*ops)] for ops in ((Op.FWD,), (Op.BWD, Op.BWD_I)))
    goes = placed.offload & ~placed.redone & (backward - first >= 2 * ahead + 2)
    if not goes.any():
        raise UsageError(
            f"--offload: each forward's backward is at most {2 * ahead + 1} jobs later, redone or on another worker: "
            "nothing would be on the host while a job runs"
        )
    stage, mb = (column.astype(np.int32) for column in np.nonzero(goes))
    first, backward = first[goes], backward[goes]
    steps = ((Op.OFFLOAD, jobs[first]), (Op.FREE, jobs[first + ahead + 1] - 1), (Op.RELOAD, jobs[backward - ahead] - 1))
    new = [rows(op, program.rows.rank[jobs[first]], kind=Kind.SAVED, stage=stage, mb=mb) for op, _ in steps]
    header = replace(program.header, lowering={**program.header.lowering, "offload": named_forwards(goes)})
    return Program(header, program.rows).insert(concatenate(new), np.concatenate([after for _, after in steps]))


def named_forwards(chosen: Flags) -> list[int | list[int]]:
    """Stages whose forwards are all chosen, and pairs of a stage and a microbatch where only some are."""
    named: list[int | list[int]] = []
    for stage, of_stage in enumerate(chosen):
        named += [stage] if of_stage.all() else [[stage, mb] for mb in np.flatnonzero(of_stage).tolist()]
    return named
