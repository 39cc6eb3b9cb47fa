"""A schedule that a script names by its scheme: compiled on rank 0, for the graph of the model's stages."""

from __future__ import annotations

import warnings
from pathlib import Path

from mpirun.model.contract import Model
from mpirun.model.split.errors import warn_user
from schedgen.checker import check
from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.ir.program import Program
from schedgen.schemes import load
from schedgen.schemes.scheme import Sizes
from schedgen.util.errors import NeedsOption, SlowScheme, UsageError


def is_scheme(name: str) -> bool:
    """Whether a script names a scheme, built in or a file with w and n, and not a schedule."""
    return Path(name).suffix == ".py" or (Path(name).suffix != ".json" and not Path(name).is_file())


def compile_for(model: Model, scheme: str, microbatches: int | None, workers: int) -> Program:
    """The schedule of a scheme, checked. UsageError if these sizes make none."""
    if type(microbatches) is not int or microbatches < 1:
        raise UsageError(f"microbatches: say how many a step of {scheme} has, 1 at least")
    graph, sizes = model.graph(), Sizes(len(model.stages), microbatches, workers)
    with warnings.catch_warnings(record=True) as slow:
        warnings.simplefilter("always", SlowScheme)
        try:
            loaded = load(scheme, sizes)
            if model.reads is not None or loaded.edges is None:  # else the scheme's own edges say what stages read
                loaded = loaded._replace(edges=graph.edges, per_consumer=graph.per_consumer)
            program = compile(loaded, sizes, Options(tied=graph.tied))
        except NeedsOption as error:
            raise UsageError(
                f"{error}: an Engine has no such options, so give it a file that `schedgen compile {scheme}` has made "
                "with them"
            ) from None
    for warning in slow:
        warn_user(str(warning.message))
    check(program, f"the schedule {scheme}")
    return program
