"""mpirun: executes schedules written by schedgen, with mpi4py and torch.

mpiexec -n W python -m mpirun FILE --model MODULE:FUNCTION
"""

from mpirun.model import Model

__all__ = ["Model"]
