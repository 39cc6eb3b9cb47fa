"""A schedule as CSV for torch's pipelining: one row a rank, one compute action a cell, as in 2F0.

`schedgen.schemes.csv_scheme` reads such files and says what an action is.
"""

from __future__ import annotations

import csv
import io

from schedgen.ir.instructions import Op
from schedgen.ir.program import Program
from schedgen.util.errors import UsageError

LETTER = {Op.FWD: "F", Op.BWD: "B", Op.BWD_I: "I", Op.BWD_W: "W"}


def as_torch_csv(program: Program) -> str:
    """The jobs of every rank in the order of its list; torch has no action for a RECOMPUTE, so these are left out.

    Raises UsageError for stages in shards and for weight versions, which torch's schedules do not have.
    """
    if program.header.tensor_parallel.degree > 1:
        raise UsageError("torch's CSV has no shards of stages, which --tensor makes")
    versions = program.header.weight_versions
    if versions.count:
        raise UsageError(f"torch's CSV has no versions of weights, which --updates {versions.updates} makes")
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for rank in range(program.header.workers):
        instructions = program.instructions(rank)
        rows.writerow([f"{i.stage}{LETTER[Op(i.op)]}{i.mb}" for i in instructions if i.op in LETTER])
    return text.getvalue()
