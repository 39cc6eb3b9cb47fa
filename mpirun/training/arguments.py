"""The arguments of `Engine`: checks and converts them, and compares those of all ranks before anything depends on them.

Plain values are compared as they are, functions by their names, other objects by those of their classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from numbers import Number, Real
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from mpirun.checkpoint.disk_format import refusing
from mpirun.comm.fail_together import Stop, first_difference
from mpirun.data.loader import Batch, Loader
from mpirun.engine.recipe import Factory, Recipe, is_plain
from mpirun.training.schedule_and_model import is_scheme
from schedgen.util.errors import UsageError, clip

Optimizers = Factory | type[torch.optim.Optimizer] | partial[torch.optim.Optimizer]

# Arguments of an Engine that ranks may be given otherwise: the model's values are compared when they are first used,
# hosts may have other numbers of cores, and rank 0 alone logs, and reads the text.
MAY_DIFFER = ("self", "comm", "model", "options", "threads", "log", "text")


def directory_of(what: str, name: object) -> Path:
    """`name` as an absolute Path, which stays the same when the script changes its working directory.

    UsageError if it is not a name. `what`: the method or argument that got it, for the message.
    """
    if not isinstance(name, str | PathLike):
        raise UsageError(f"{what}: give the name of a directory, not a {type(name).__name__}")
    with refusing(path := Path(name)):
        return path.absolute()


def make_recipe(
    optimizer: Optimizers | Recipe | None,
    lr: float | Callable[[int], float] | None,
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None,
    clip: float | None,
    elementwise: bool = False,
) -> Recipe:
    """The optimizer, its rate and clipping, as `Engine` takes them; UsageError if one is wrong or two conflict."""
    if isinstance(optimizer, Recipe):
        return optimizer
    if callable(lr) and scheduler is not None:
        raise UsageError("lr and scheduler both say what the rate of a step is: give a number as lr, or one of them")
    is_number = isinstance(lr, Real) and not isinstance(lr, bool)
    if lr is not None and not callable(lr) and not is_number:
        raise UsageError(f"lr should be a number or a function of the step, not {lr!r}")
    rate: Callable[[int], float] | None = None
    if lr is not None:
        rate = (lambda step: float(lr(step))) if callable(lr) else (lambda step: float(lr))
    made: Any = optimizer or torch.optim.AdamW
    if not callable(made):
        ways = "a class, partial(torch.optim.SGD, lr=0.1), or a function of a list of NamedParameters"
        raise UsageError(f"optimizer: give {ways}, not an object of {type(made).__name__}")
    kind = made.func if isinstance(made, partial) else made
    of_class = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    factory: Factory = (lambda named: made([entry.parameter for entry in named])) if of_class else made
    recorded = {"clip": clip, "lr": float(lr) if is_number else None}  # type: ignore[arg-type]
    return Recipe(factory, rate, scheduler, clip, recorded, elementwise)


def check_data(data: object) -> None:
    """UsageError if `data` is neither None nor a Loader, whose position a checkpoint can record."""
    if data is not None and not isinstance(data, Loader):
        raise UsageError(f"data: give what loader(...) returns, not a {type(data).__name__}")


def check_batches(loader: object) -> None:
    """UsageError if `loader` is one batch."""
    tensors = isinstance(loader, tuple) and any(isinstance(x, Tensor) for x in loader)
    if tensors or isinstance(loader, Mapping | Batch):
        raise UsageError("this is one batch: give a list of batches, or what loader(...) returns")


def options_to_compare(given: Mapping[str, Any]) -> dict[str, Any]:
    """Of the arguments of an Engine, by name, what has to be the same on all ranks."""
    options = {name: value for name, value in given.items() if name not in MAY_DIFFER}
    options["weights"] = given["weights"] is not None  # hosts may call the folder otherwise
    if isinstance(schedule := given["schedule"], str | PathLike):
        kind = "scheme" if is_scheme(fspath(schedule)) else "file"
        options["schedule"] = f"the {kind} {Path(schedule).name}"
    return options


def check_same_options(comm: MPI.Intracomm, options: Mapping[str, Any]) -> None:
    """Stop if ranks were given different options. Collective."""
    own = {name: _in_words(value) for name, value in options.items()}
    if (difference := first_difference(comm, own)) is not None:
        name, one, other, *texts = difference
        raise Stop(f"ranks {one} and {other} were given different `{name}`: {' and '.join(map(clip, texts))}")


def _in_words(value: Any) -> str:
    """The same text on all ranks that were given the same."""
    if value is None or isinstance(value, Number) or is_plain(value):
        return repr(value)
    if isinstance(value, partial):
        given = [*map(_in_words, value.args), *(f"{name}={_in_words(x)}" for name, x in value.keywords.items())]
        return f"{_in_words(value.func)}({', '.join(given)})"
    return str(getattr(value, "__qualname__", type(value).__qualname__))
