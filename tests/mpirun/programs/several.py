"""Several runs of mpirun in one job. The argument is a JSON file with a list of argument lists.

Rank 0 prints a line a run: its exit code, the same on all ranks, and its stdout.
"""

import contextlib
import io
import json
import sys
from pathlib import Path

from mpi4py import MPI

from mpirun.__main__ import main

for arguments in json.loads(Path(sys.argv[1]).read_text()):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):  # stderr stays: a run that dies takes this program along
        code = main(arguments)
    codes = MPI.COMM_WORLD.allgather(code)
    if len(set(codes)) > 1:
        sys.exit(f"{arguments}: the ranks end with different codes: {codes}")
    if MPI.COMM_WORLD.rank == 0:
        print(f"run: {json.dumps([code, out.getvalue()])}", flush=True)
