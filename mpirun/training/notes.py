"""Notes to the user on a run, which continues: one line each, printed by rank 0."""

from __future__ import annotations

from collections.abc import Collection

from mpi4py import MPI

from mpirun.comm.output import note
from mpirun.engine.job_graphs import JobGraphs
from mpirun.engine.setup import Setup
from schedgen.util.errors import listed


def note_unreached(comm: MPI.Intracomm, setup: Setup, reached: Collection[tuple[int, str]], step: int) -> None:
    """Name the parameters that got no gradient in step `step`, from 0. Collective.

    `reached`: (stage, parameter) of those that got one on this rank.
    """
    model = setup.model
    of_ranks = comm.gather({model.entry_name(*parameter) for parameter in reached})
    if of_ranks is None:
        return
    trained = {model.entry_name(s, name) for s, shape in enumerate(setup.shapes) for name in shape.parameter_names}
    if unreached := sorted(trained.difference(*of_ranks)):
        note(
            comm,
            f"step {step + 1} gives no gradient to {listed(unreached)}: it counts as 0, so that weight decay and "
            "momentum change them, where torch would not; freeze what is never used (requires_grad_(False))",
        )


def note_left_out(comm: MPI.Intracomm, names: Collection[str]) -> None:
    """Name the parameters that no optimizer has; `names`: those of this rank. Collective."""
    if left_out := sorted(set().union(*comm.gather(names) or ())):
        note(comm, f"the optimizer leaves out {listed(left_out)}: this Engine does not train them")


def note_uncaptured(comm: MPI.Intracomm, graphs: JobGraphs | None) -> None:
    """Name, once and as soon as it is known, the stages that are not captured as graphs, and why. Collective."""
    if graphs is None or graphs.told or not graphs.looked:
        return
    graphs.told = True
    lines = comm.gather(graphs.refusals()) or ()
    for line in sorted({line for of_rank in lines for line in of_rank}):
        note(comm, line)
