"""mpirun: executes schedules written by schedgen, with mpi4py and torch.

    mpiexec -n W python -m mpirun FILE --model MODULE:FUNCTION

`Engine` is the same as a library, for scripts with their own loop, data, optimizer and evaluation. To define a model,
use the contract (`Model`), the functions that split a module into stages (`split`, `split_sequential`,
`split_layers`), and the types that say what stages read (`Input`, `Value`). A wrong argument is a `UsageError`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.pipelining import pipe_split

    from mpirun.data.loader import Loader
    from mpirun.engine.recipe import NamedParameter
    from mpirun.model.contract import Model
    from mpirun.model.dataflow import Input, Value
    from mpirun.model.split.split_module import split
    from mpirun.model.split.split_result import Cut
    from mpirun.model.split.split_sequential import split_layers, split_sequential
    from mpirun.training.engine import Engine
    from mpirun.training.evaluation import Evaluation
    from mpirun.training.session import Result
    from schedgen.util.errors import MpirunWarning, UsageError

__all__ = [
    "Cut", "Engine", "Evaluation", "Input", "Loader", "Model", "MpirunWarning", "NamedParameter", "Result",
    "UsageError", "Value", "pipe_split", "split", "split_layers", "split_sequential",
]  # fmt: skip

_MODULES = {
    "Cut": "mpirun.model.split.split_result",
    "Engine": "mpirun.training.engine",
    "Evaluation": "mpirun.training.evaluation",
    "Input": "mpirun.model.dataflow",
    "Loader": "mpirun.data.loader",
    "Model": "mpirun.model.contract",
    "MpirunWarning": "schedgen.util.errors",
    "NamedParameter": "mpirun.engine.recipe",
    "Result": "mpirun.training.session",
    "UsageError": "schedgen.util.errors",
    "Value": "mpirun.model.dataflow",
    "pipe_split": "torch.distributed.pipelining",
    "split": "mpirun.model.split.split_module",
    "split_layers": "mpirun.model.split.split_sequential",
    "split_sequential": "mpirun.model.split.split_sequential",
}


def __getattr__(name: str) -> Any:
    """A public name, imported on first use: torch is slow to import, and --help does without it."""
    if name in ("Engine", "Evaluation", "Result"):  # these import MPI
        importlib.import_module("mpirun.comm.local_gpu").use_local_gpu()
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module mpirun has no attribute {name}")


def __dir__() -> list[str]:
    """The public names, for completion."""
    return [*globals(), *_MODULES]
