"""`python -m mpirun profile`, `graph` and `machine`: files for schedgen's commands."""

from __future__ import annotations

import json
from functools import partial

from mpi4py import MPI

from mpirun.cli.optimizer import optimizer
from mpirun.cli.options import GraphOptions, MachineOptions, ProfileOptions
from mpirun.comm.fail_together import Stop, from_rank_0, on_rank_0, together
from mpirun.comm.machine_speed import measure_machine
from mpirun.comm.output import write_output
from mpirun.engine.options import RunOptions, SetupOptions, values_of
from mpirun.engine.recipe import Recipe
from mpirun.engine.setup import set_up, text_microbatches, use_host
from mpirun.model.load_model import load_model
from mpirun.training import profile
from schedgen.checker import checked
from schedgen.ir.header import Header
from schedgen.util.errors import RefusedFile, UsageError
from schedgen.util.files import check_writable


class Graph:
    """Which stages of a model read which, and ties. There is no schedule, so rank 0 does all of it."""

    def __init__(self, comm: MPI.Intracomm, options: GraphOptions) -> None:
        self.comm, self.options = comm, options

    def execute(self) -> None:
        """Write the file. Collective."""
        on_rank_0(self.comm, self._write)

    def _write(self) -> None:
        check_writable("--output", self.options.output)
        model = load_model(self.options.model, self.options.stages, seed=0, needs_batch=False)
        write_output("--output", self.options.output, model.graph().text().encode())


class Machine:
    """The machine of the ranks that run it."""

    def __init__(self, comm: MPI.Intracomm, options: MachineOptions) -> None:
        if comm.size == 1:
            raise Stop("one rank has no links: launch a rank on every device, with mpiexec or srun")
        self.comm, self.output = comm, options.output
        on_rank_0(comm, lambda: check_writable("--output", options.output))
        self.host = use_host(comm, options)
        together(comm, lambda: self.host.device.try_messages(comm))

    def execute(self) -> None:
        """Measure, and write the file on rank 0. Collective."""
        machine = measure_machine(self.comm, self.host.device, self.host.crowded)
        text = json.dumps(machine, indent=1) + "\n"
        on_rank_0(self.comm, lambda: write_output("--output", self.output, text.encode()))


class Profile(profile.Profile):
    """One rank's part of the command."""

    def __init__(self, comm: MPI.Intracomm, options: ProfileOptions) -> None:
        header, self.steps = from_rank_0(comm, lambda: _header(options)), options.steps
        host = use_host(comm, options)
        stages = options.stages or 1 if header is None else header.model_stages
        model = together(comm, lambda: load_model(options.model, stages, options.seed))
        source = text_microbatches(comm, model, options, profile.MICROBATCHES)
        recipe, of_run = Recipe(partial(optimizer, options), clip=options.clip), values_of(options, SetupOptions)
        prepare = partial(set_up, comm, source=source, options=RunOptions(**of_run), recipe=recipe, host=host)
        super().__init__(comm, model, header, prepare, ("--output", options.output))

    def execute(self) -> None:
        """Measure, and write the file on rank 0. Collective."""
        self.write(self.steps)


def _header(options: ProfileOptions) -> Header | None:
    if options.schedule is None:
        return None
    try:
        header = checked(options.schedule).header
    except OSError as error:
        raise RefusedFile(f"{options.schedule}: {error.strerror}") from None
    if options.stages not in (None, header.model_stages):
        raise UsageError(f"--stages {options.stages}: {options.schedule} has {header.model_stages}")
    return header
