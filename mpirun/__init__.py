"""mpirun: executes schedules written by schedgen, with mpi4py and torch.

mpiexec -n W python -m mpirun FILE --model MODULE:FUNCTION
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpirun.model.contract import Model

__all__ = ["Model"]


def __getattr__(name: str) -> Any:
    """`Model`, when it is asked for: torch is slow to import, and neither --help nor the guard needs it."""
    if name == "Model":
        from mpirun.model.contract import Model

        return Model
    raise AttributeError(f"module mpirun has no attribute {name}")
