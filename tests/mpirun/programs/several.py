"""Several runs of mpirun in one job. The argument is a JSON file with a list of argument lists.

Rank 0 prints a line a run: its exit code, the same on all ranks, its stdout, and
the stderr of all ranks.
"""

import contextlib
import io
import json
import sys
from pathlib import Path

from mpi4py import MPI

from mpirun.__main__ import main


class Heard(io.StringIO):
    """Keeps what is written, and passes it on: a run that dies takes this program along."""

    def write(self, text: str) -> int:
        sys.__stderr__.write(text)
        return super().write(text)


for arguments in json.loads(Path(sys.argv[1]).read_text()):
    out, err = io.StringIO(), Heard()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    codes = MPI.COMM_WORLD.allgather(code)
    if len(set(codes)) > 1:
        sys.exit(f"{arguments}: the ranks end with different codes: {codes}")
    outs, errs = (MPI.COMM_WORLD.gather(one.getvalue()) for one in (out, err))
    if MPI.COMM_WORLD.rank == 0:
        print(f"run: {json.dumps([code, ''.join(outs), ''.join(errs)])}", flush=True)
