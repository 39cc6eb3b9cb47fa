"""Sets up each of several runs, makes a step, and exports. Rank 0 prints the error of a run that stops.

An argument: {"file": a schedule, "model": MODULE:FUNCTION, "steps": 0 or 1, "to": directory, "source": one or null}.
"""

import json
import sys
from contextlib import redirect_stderr
from pathlib import Path

from mpi4py import MPI

from mpirun.checkpoint.pretrained import export
from mpirun.comm.fail_together import Stop
from mpirun.model.load_model import load_model
from mpirun.training.engine import Engine

sys.path.insert(0, str(Path.cwd()))
WORLD = MPI.COMM_WORLD
for line in sys.argv[1:]:
    run = json.loads(line)
    model = lambda stages: load_model(run["model"], stages, 0)  # noqa: E731
    try:
        with Engine(run["file"], model, device="cpu", threads=1, timeout=0) as engine:
            if run["steps"]:
                engine.step()
            session = engine.checkpoints.session
            with redirect_stderr(sys.stdout):  # notes are printed in order with errors
                export(session.part, run["to"], run["source"])
    except Stop as stop:
        if WORLD.rank == 0:
            print(stop, flush=True)
