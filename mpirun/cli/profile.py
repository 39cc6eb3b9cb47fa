"""`python -m mpirun profile`: the profile of a model that is given by its name."""

from __future__ import annotations

from functools import partial

from mpi4py import MPI

from mpirun.cli.optimizer import optimizer
from mpirun.cli.options import ProfileOptions
from mpirun.comm.fail_together import from_rank_0, together
from mpirun.engine.options import RunOptions, SetupOptions, values_of
from mpirun.engine.recipe import Recipe
from mpirun.engine.setup import set_up, text_microbatches, use_host
from mpirun.model.load_model import load_model
from mpirun.training import profile
from schedgen.checker import checked
from schedgen.ir.graph_file import ModelGraph
from schedgen.util.errors import RefusedFile, UsageError


class Profile(profile.Profile):
    """One rank's part of the command."""

    def __init__(self, comm: MPI.Intracomm, options: ProfileOptions) -> None:
        graph, self.steps = from_rank_0(comm, lambda: _graph(options)), options.steps
        host = use_host(comm, options)
        model = together(comm, lambda: load_model(options.model, graph.stages, options.seed))
        source = text_microbatches(comm, model, options, profile.MICROBATCHES)
        recipe, of_run = Recipe(partial(optimizer, options), clip=options.clip), values_of(options, SetupOptions)
        prepare = partial(
            set_up, comm, unsliced_model=model, source=source, options=RunOptions(**of_run), recipe=recipe, host=host
        )
        super().__init__(comm, graph, prepare, ("--output", options.output))

    def execute(self) -> int:
        """Measure, and write the file on rank 0; returns the exit code. Collective."""
        self.write(self.steps)
        return 0


def _graph(options: ProfileOptions) -> ModelGraph:
    if options.schedule is None:
        return load_model(options.model, options.stages or 1, options.seed).graph()
    try:
        header = checked(options.schedule).header
    except OSError as error:
        raise RefusedFile(f"{options.schedule}: {error.strerror}") from None
    if options.stages not in (None, header.model_stages):
        raise UsageError(f"--stages {options.stages}: {options.schedule} has {header.model_stages}")
    return profile.graph_of(header)
