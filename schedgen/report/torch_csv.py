"""A schedule as CSV for torch's pipelining: one row per rank, one compute action per cell, as in 2F0.

`schedgen.schemes.csv_scheme` reads such files and defines what an action is. A forward whose output is sent only after
the backward that comes next shares a cell with this backward, as in (0F1;3B0)OVERLAP_F_B.
"""

from __future__ import annotations

import csv
import io
import itertools

import numpy as np

from schedgen.compiler.options import Options
from schedgen.ir.instructions import COMPUTE, LETTER, Kind, Op
from schedgen.ir.program import Program
from schedgen.ir.stage_graph import chain
from schedgen.util.arrays import Numbers
from schedgen.util.errors import UsageError


def as_torch_csv(program: Program) -> str:
    """The jobs of every rank in the order of its list; torch has no action for RECOMPUTE, so RECOMPUTEs are left out.

    Raises UsageError for stages in slices and for weight versions, which torch's schedules do not have.
    """
    if program.header.model_stages < program.header.stages:
        raise UsageError("torch's CSV has no slices of stages, which --tensor makes")
    if not program.header.has_flush:
        updates = program.header.weight_versions.updates
        raise UsageError(f"torch's CSV has no versions of weights, which --updates {updates} makes")
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    table, jobs, in_pair = program.rows, program.rows_of(*LETTER), np.zeros(len(program), bool)
    in_pair[_delayed_sends(program)] = True
    columns = (table.stage, table.op, table.mb)
    for begin, end in itertools.pairwise(np.searchsorted(jobs, program.bounds).tolist()):
        of_rank, cells, forward = jobs[begin:end], list[str](), ""
        numbers = zip(*(column[of_rank].tolist() for column in (*columns, in_pair)), strict=True)
        for action, joins in ((f"{stage}{LETTER[op]}{mb}", joins) for stage, op, mb, joins in numbers):
            if not joins:
                cells.append(f"({forward};{action})OVERLAP_F_B" if forward else action)
            forward = action if joins else ""
        rows.writerow(cells)
    return text.getvalue()


def lost_in_csv(program: Program) -> list[str]:
    """What a schedule has besides its jobs that torch's actions cannot express, in words; empty if there is nothing."""
    header = program.header
    weights = header.weights[: len(header.compute)]
    lost = {
        "the stage graph": header.graph.edges != chain(header.stages),
        "ties": bool(header.tied),
        "weights away from their jobs": bool(header.shard_owners) or not np.array_equal(weights, header.compute),
        "its prefetch": header.lowering["prefetch"] != Options().prefetch,
        "what is offloaded": bool((program.rows.op == Op.OFFLOAD).any()),
        "forwards that are redone": bool((program.rows.op == Op.RECOMPUTE).any()),
    }
    return [words for words, is_lost in lost.items() if is_lost]


def _delayed_sends(program: Program) -> Numbers:
    """The forwards whose output is sent after the next job, a backward."""
    table, jobs, sends = program.rows, program.rows_of(*COMPUTE), program.rows_of(Op.SEND)
    sends = sends[table.kind[sends] == Kind.X]
    place = np.searchsorted(jobs, sends) - 1
    before, earlier = jobs[place], jobs[place - 1]
    is_its_forward = (table.stage[earlier] == table.stage[sends]) & (table.mb[earlier] == table.mb[sends])
    is_its_forward &= table.op[earlier] == Op.FWD
    delayed: Numbers = earlier[is_its_forward & np.isin(table.op[before], (Op.BWD, Op.BWD_I))]
    return delayed
