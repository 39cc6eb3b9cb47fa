"""From an nn.Module to the stages of a model and what each of them reads."""

from typing import TYPE_CHECKING, Any

from mpirun.frontend.batch_coupling import batch_coupled
from mpirun.frontend.cut import Cut
from mpirun.frontend.errors import MpirunWarning
from mpirun.frontend.split_module import split
from mpirun.frontend.split_sequential import split_sequential

if TYPE_CHECKING:
    from torch.distributed.pipelining import pipe_split

__all__ = ["Cut", "MpirunWarning", "batch_coupled", "pipe_split", "split", "split_sequential"]


def __getattr__(name: str) -> Any:
    """torch's own mark, for a model that uses it: its package takes a second to import."""
    if name != "pipe_split":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torch.distributed.pipelining import pipe_split

    return pipe_split
