"""`python -m mpirun machine`: the machine file of the ranks that run it, for `--machine` of schedgen's commands."""

from __future__ import annotations

import json

from mpi4py import MPI

from mpirun.cli.options import MachineOptions
from mpirun.comm.fail_together import Stop, on_rank_0, together
from mpirun.comm.machine_speed import measure_machine
from mpirun.comm.output import write_output
from mpirun.engine.setup import use_host
from schedgen.util.files import check_writable


class Machine:
    """One rank's part of the command."""

    def __init__(self, comm: MPI.Intracomm, options: MachineOptions) -> None:
        if comm.size == 1:
            raise Stop("one rank has no links: launch a rank on every device, with mpiexec or srun")
        self.comm, self.output = comm, options.output
        on_rank_0(comm, lambda: check_writable("--output", options.output))
        self.host = use_host(comm, options)
        together(comm, lambda: self.host.device.try_messages(comm))

    def position(self) -> str:
        """Of no instruction."""
        return ""

    def execute(self) -> int:
        """Measure, and write the file on rank 0; returns the exit code. Collective."""
        machine = measure_machine(self.comm, self.host.device, self.host.crowded)
        text = json.dumps(machine, indent=1) + "\n"
        on_rank_0(self.comm, lambda: write_output("--output", self.output, text.encode()))
        return 0
