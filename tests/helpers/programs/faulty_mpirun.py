"""mpirun with a fault that a correct interpreter and a checked schedule do not have.

lost       rank 1 leaves out the SEND of x.1.7 in the second step
unchecked  the schedule is not checked
"""

from __future__ import annotations

import itertools
import sys

from mpi4py import MPI

import mpirun.engine.core.interpreter
import mpirun.engine.read_schedule
from mpirun.cli.main import main
from mpirun.engine.core.context import Act
from mpirun.engine.core.messages import Transfers
from schedgen.ir.instructions import Instruction


class Forgetful(Transfers):
    """Leaves out LOST in the second step."""

    def send(self, row: int, i: Instruction) -> Act:
        """As Transfers.send."""
        act, steps = super().send(row, i), itertools.count()
        return (lambda: next(steps) == 1 or act()) if str(i) == LOST else act


LOST = '{"op": "SEND", "buf": "x.1.7", "to": 2}'
fault, *arguments = sys.argv[1:]
if fault == "lost" and MPI.COMM_WORLD.rank == 1:
    mpirun.engine.core.interpreter.Transfers = Forgetful
elif fault == "unchecked":
    mpirun.engine.read_schedule.check = lambda *_: None
sys.exit(main(arguments))
