"""mpirun with a fault that a right interpreter and a checked schedule do not have.

lost       rank 1 leaves out the SEND of x.1.7 in the second step
unchecked  the schedule is not checked
"""

from __future__ import annotations

import sys

from mpi4py import MPI

import mpirun.engine.read_schedule
from mpirun.cli.main import main
from mpirun.engine.forward_backward import Act
from mpirun.engine.interpreter import Interpreter
from schedgen.ir.instructions import Instruction


class Forgetful(Interpreter):
    def send(self, i: Instruction) -> Act:
        act = super().send(i)
        return (lambda: self.compute.now == 1 or act()) if str(i) == LOST else act


LOST = '{"op": "SEND", "buf": "x.1.7", "to": 2}'
fault, *arguments = sys.argv[1:]
if fault == "lost" and MPI.COMM_WORLD.rank == 1:
    import mpirun.engine.build

    mpirun.engine.build.Interpreter = Forgetful
elif fault == "unchecked":
    mpirun.engine.read_schedule.check = lambda *_: None
sys.exit(main(arguments))
