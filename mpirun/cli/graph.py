"""`python -m mpirun graph`: writes which stages read which, and ties, for the option `--graph` of schedgen."""

from __future__ import annotations

from mpi4py import MPI

from mpirun.cli.options import GraphOptions
from mpirun.comm.fail_together import on_rank_0
from mpirun.comm.output import print_notes, write_output
from mpirun.model.load_model import load_model
from schedgen.util.files import check_writable


class Graph:
    """The command. It has no schedule, so rank 0 does all of it."""

    def __init__(self, comm: MPI.Intracomm, options: GraphOptions) -> None:
        self.comm, self.options = comm, options

    def position(self) -> str:
        """Empty: no instruction is executed."""
        return ""

    def execute(self) -> int:
        """Write the file; returns the exit code. Collective."""
        with print_notes(self.comm):
            on_rank_0(self.comm, self._write)
        return 0

    def _write(self) -> None:
        check_writable("--output", self.options.output)
        model = load_model(self.options.model, self.options.stages, seed=0, needs_batch=False)
        write_output("--output", self.options.output, model.graph().text().encode())
