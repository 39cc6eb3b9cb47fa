"""One step of mpirun, whose arguments these are; rank 0 prints what every rank owns, in bytes, as JSON.

weights and state: of its parts, and what the optimizer keeps for them; gradient: where their sums are gathered.
"""

import json
import sys

from mpi4py import MPI

from mpirun.cli.options import run_options
from mpirun.cli.run import Run

interpreter = Run(MPI.COMM_WORLD, run_options(MPI.COMM_WORLD, [*sys.argv[1:], "--timeout", "0"])).session.interpreter
interpreter.run_first(0)
units = [(index, part) for index, stage in interpreter.stages.items() for part in stage.owned]
owned = {
    "weights": sum(interpreter.stages[stage].owned[part].untyped_storage().nbytes() for stage, part in units),
    "state": sum(
        value.untyped_storage().nbytes()
        for unit in units
        for state in interpreter.optimizer.state(unit)
        for value in state.values()
    ),
    "gradient": sum(interpreter.context.grad_buffers.of_unit(unit).total.untyped_storage().nbytes() for unit in units),
}
by_rank = MPI.COMM_WORLD.gather(owned)
if by_rank is not None:
    print(json.dumps(by_rank))
