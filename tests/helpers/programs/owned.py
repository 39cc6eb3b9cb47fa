"""One step of mpirun, whose arguments these are; rank 0 prints what every rank owns, in bytes, as JSON.

weights and state: of its parts, and what the optimizer keeps for them; gradient: where their sums are gathered.
"""

import json
import sys

from mpi4py import MPI

from mpirun.cli.options import run_options
from mpirun.cli.run import Run

one = Run(MPI.COMM_WORLD, run_options(MPI.COMM_WORLD, sys.argv[1:])).interpreter
one.run_first(0)
units = [(stage, via) for stage, of in one.optimizer.stages.items() for via in of.owned]
mine = {
    "weights": sum(one.stages[stage].owned[via].untyped_storage().nbytes() for stage, via in units),
    "state": sum(
        value.untyped_storage().nbytes()
        for unit in units
        for kept in one.optimizer.state(unit)
        for value in kept.values()
    ),
    "gradient": sum(one.context.grad_buffers.of_unit(unit).total.untyped_storage().nbytes() for unit in units),
}
every = MPI.COMM_WORLD.gather(mine)
if every is not None:
    print(json.dumps(every))
