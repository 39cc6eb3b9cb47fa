"""A schedule as CSV for torch's pipelining: one row per rank, one compute action per cell, as in 2F0.

`schedgen.schemes.csv_scheme` reads such files and defines what an action is.
"""

from __future__ import annotations

import csv
import io

import numpy as np

from schedgen.ir.instructions import COMPUTE, Kind, Op
from schedgen.ir.program import Program
from schedgen.ir.stage_graph import chain
from schedgen.util.errors import UsageError

LETTER = {Op.FWD: "F", Op.BWD: "B", Op.BWD_I: "I", Op.BWD_W: "W"}


def as_torch_csv(program: Program) -> str:
    """The jobs of every rank in the order of its list; torch has no action for RECOMPUTE, so RECOMPUTEs are left out.

    Raises UsageError for stages in shards and for weight versions, which torch's schedules do not have.
    """
    if program.header.model_stages < program.header.stages:
        raise UsageError("torch's CSV has no shards of stages, which --tensor makes")
    if not program.header.has_flush:
        updates = program.header.weight_versions.updates
        raise UsageError(f"torch's CSV has no versions of weights, which --updates {updates} makes")
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for rank in range(program.header.workers):
        instructions = program.instructions(rank)
        rows.writerow([f"{i.stage}{LETTER[Op(i.op)]}{i.mb}" for i in instructions if i.op in LETTER])
    return text.getvalue()


def lost_in_csv(program: Program) -> list[str]:
    """What a schedule has besides its jobs that torch's actions cannot express, in words; empty if there is nothing."""
    header = program.header
    weights = header.weights[: len(header.compute)]
    lost = {
        "the stage graph": header.graph.edges != chain(header.stages),
        "ties": bool(header.tied),
        "weights away from their jobs": bool(header.part_owners) or not np.array_equal(weights, header.compute),
        "forwards that are redone": bool((program.rows.op == Op.RECOMPUTE).any()),
        "sends that wait for the worker's next job": _has_delayed_sends(program),
    }
    return [words for words, is_lost in lost.items() if is_lost]


def _has_delayed_sends(program: Program) -> bool:
    """Whether a rank sends an activation after a job that follows the activation's forward."""
    table, jobs, sends = program.rows, program.rows_of(*COMPUTE), program.rows_of(Op.SEND)
    sends = sends[table.kind[sends] == Kind.X]
    before = jobs[np.searchsorted(jobs, sends) - 1]
    return bool(((table.stage[before] != table.stage[sends]) | (table.mb[before] != table.mb[sends])).any())
