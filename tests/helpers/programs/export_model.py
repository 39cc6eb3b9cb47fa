"""Sets up each of several runs, makes a step, and exports. Rank 0 prints the error of a run that stops.

An argument: {"file": a schedule, "model": MODULE:FUNCTION, "steps": 0 or 1, "to": directory, "source": one or null}.
"""

import json
import sys
from contextlib import redirect_stderr
from pathlib import Path

from mpi4py import MPI

from mpirun.checkpoint.export import export
from mpirun.comm.fail_together import Stop
from mpirun.engine.build import build_interpreter
from mpirun.engine.first_step import run_first
from mpirun.engine.options import SetupOptions
from mpirun.engine.read_schedule import read_schedule
from mpirun.engine.setup import set_up_command

sys.path.insert(0, str(Path.cwd()))
WORLD = MPI.COMM_WORLD
for line in sys.argv[1:]:
    run = json.loads(line)
    try:
        program = read_schedule(WORLD, run["file"]).program
        setup = set_up_command(WORLD, SetupOptions(run["model"], device="cpu", threads=1), program.header)
        interpreter = build_interpreter(WORLD, program, program.instructions(WORLD.rank), setup)
        if run["steps"]:
            run_first(interpreter, 0)
        with redirect_stderr(sys.stdout):  # notes are printed in order with errors
            export(WORLD, program.header, setup, interpreter.stages, run["to"], run["source"])
    except Stop as stop:
        if WORLD.rank == 0:
            print(stop, flush=True)
