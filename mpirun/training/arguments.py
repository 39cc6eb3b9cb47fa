"""Converts the arguments of `Engine` to what it works with: the model, the optimizer's recipe, the log."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from mpirun.checkpoint.disk_format import refusing
from mpirun.checkpoint.pretrained import Pretrained
from mpirun.data.dataset_loaders import FunctionLoader
from mpirun.data.loader import Batch, Loader
from mpirun.engine.options import DEVICES, GPU_MESSAGES, ON_NAN
from mpirun.engine.recipe import Factory, Recipe
from mpirun.model.contract import Model
from mpirun.model.frontend.split_result import Cut
from mpirun.model.load_model import check_model, join_stages
from mpirun.model.loss import of_last_stage
from mpirun.training.event_log import EventLog
from schedgen.util.errors import UsageError

Log = Callable[[int, Mapping[str, float]], None]  # takes the number of steps done, and a step's numbers by name
Optimizers = Factory | type[torch.optim.Optimizer] | partial[torch.optim.Optimizer]
Models = Model | Cut | Sequence[nn.Module] | Callable[[int], Model | Cut]


def take_model(
    model: Models,
    loss: Callable[[Any, Any], Any] | None,
    stages: int | None,
    layers: Sequence[int] | None,
    weights: Path | None,
    seed: int,
) -> Model:
    """A script's model as a Model.

    stages   how many there should be; None: as many as there are
    layers   how many of the model's own stages each stage joins; None: one
    weights  a directory that parameters and buffers are read from
    seed     for the modules that a function makes

    UsageError if the arguments make no such model.
    """
    if callable(model) and not isinstance(model, Model | Cut | nn.Module):
        if stages is None:
            raise UsageError("stages: say how many the function is to make")
        torch.manual_seed(seed)
        model = model(sum(layers) if layers else stages)
    if isinstance(model, Cut):
        if loss is None:
            raise UsageError("loss: say what it is, a split module has none")
        model = model.model(loss)
    elif not isinstance(model, Model):
        if loss is None:
            raise UsageError("loss: say what it is, modules have none")
        given, model = model, Model(list(model) if isinstance(model, Iterable) else [model], loss)
        wanted = sum(layers) if layers else stages
        if isinstance(given, nn.Module) and wanted and wanted != len(model.stages):
            split = f"split it first, mpirun.split(model, example, stages={wanted})"
            raise UsageError(f"the model, a {type(given).__name__}, is not in {wanted} stages: {split}")
    elif loss is not None:
        model = model._replace(loss=of_last_stage(loss, model.origin.rebuild))
    if layers is not None:
        model = join_stages(model, layers)
    model = check_model(model, len(model.stages) if stages is None else stages)
    return model if weights is None else model._replace(weights=Pretrained(weights))


def directory_of(what: str, name: object) -> Path:
    """`name` as an absolute Path, which stays the same when the script changes its working directory.

    UsageError if it is not a name. `what`: the method or argument that got it, for the message.
    """
    if not isinstance(name, str | os.PathLike):
        raise UsageError(f"{what}: give the name of a directory, not a {type(name).__name__}")
    with refusing(path := Path(name)):
        return path.absolute()


def make_recipe(
    optimizer: Optimizers | None,
    lr: float | Callable[[int], float] | None,
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None,
    clip: float | None,
    elementwise: bool = False,
) -> Recipe:
    """The optimizer, its rate and clipping, as `Engine` takes them; UsageError if one is wrong or two conflict."""
    if lr is not None and scheduler is not None:
        raise UsageError("lr and scheduler both say what the learning rate is: give one of them")
    if clip is not None and not (isinstance(clip, Real) and clip > 0):
        raise UsageError(f"clip should be a positive number, not {clip!r}")
    is_number = isinstance(lr, Real) and not isinstance(lr, bool)
    if lr is not None and not callable(lr) and not (is_number and 0 <= lr < math.inf):
        raise UsageError(f"lr should be a number of at least 0, or a function of the step, not {lr!r}")

    def rate_of(step: int) -> float:
        value = lr(step) if callable(lr) else lr
        try:
            number = float(value)  # type: ignore[arg-type]  # checked here, as a function may return anything
        except (TypeError, ValueError):
            number = math.nan
        if not 0 <= number < math.inf:
            least = " of at least 0" if number < 0 else ""
            raise UsageError(f"the learning rate of step {step + 1} is {value!r}, not a number{least}")
        return number

    rate = None if lr is None else rate_of
    made: Any = optimizer or torch.optim.AdamW
    if not callable(made):
        what = f"an object of {type(made).__name__}"
        raise UsageError(f"optimizer: give a class, or a function of a list of NamedParameters, not {what}")
    kind = made.func if isinstance(made, partial) else made
    of_class = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    factory: Factory = (lambda named: made([entry.parameter for entry in named])) if of_class else made
    recorded = {"clip": None if clip is None else float(clip), "lr": float(lr) if is_number else None}  # type: ignore[arg-type]
    return Recipe(factory, rate, scheduler, clip, "", recorded, elementwise)


def check_options(
    autocast: str | None,
    accumulate: int,
    on_nan: str,
    device: str,
    gpu_messages: str,
    threads: int | None,
    seed: int,
    timeout: float,
) -> None:
    """UsageError if one of these options of an Engine has a wrong value."""
    if device not in DEVICES:
        raise UsageError(f"device: {device!r} is none of 'auto', 'cpu' and 'cuda'")
    if gpu_messages not in GPU_MESSAGES:
        raise UsageError(f"gpu_messages: {gpu_messages!r} is none of 'auto', 'direct' and 'host'")
    if threads is not None and (type(threads) is not int or threads < 1):
        raise UsageError(f"threads should be a whole number of at least 1, not {threads!r}")
    if type(seed) is not int or not 0 <= seed < 2**31:
        raise UsageError(f"seed should be a whole number from 0 to 2**31 - 1, not {seed!r}")
    if not (isinstance(timeout, Real) and timeout >= 0):
        raise UsageError(f"timeout should be a number of at least 0, not {timeout!r}")
    if autocast not in (None, "bf16"):
        raise UsageError(f"autocast: {autocast!r} is not 'bf16'")
    if type(accumulate) is not int or accumulate < 1:
        raise UsageError(f"accumulate should be a whole number of at least 1, not {accumulate!r}")
    if on_nan not in ON_NAN:
        raise UsageError(f"on_nan: {on_nan!r} is neither 'stop' nor 'skip'")


def check_data(data: object) -> None:
    """UsageError if `data` is neither None nor a Loader, whose position a checkpoint can record."""
    if data is not None and not isinstance(data, Loader):
        raise UsageError(f"data: give what loader(...) returns, not a {type(data).__name__}")


def check_saving(data: object, keep: object) -> None:
    """UsageError as in `check_data`, or if `keep` is no number of checkpoints."""
    check_data(data)
    if type(keep) is not int or keep < 1:
        raise UsageError(f"keep should be a whole number of at least 1, not {keep!r}")


def check_tolerance(tolerance: float | None) -> None:
    """UsageError if `tolerance` is neither None nor a relative difference."""
    if tolerance is not None and not (isinstance(tolerance, Real) and tolerance >= 0):
        raise UsageError(f"tolerance should be a number of at least 0, not {tolerance!r}")


def check_batches(loader: object, batches: object) -> None:
    """UsageError unless `loader` gives batches to evaluate, and `batches` says how many; None: all, if they end."""
    if batches is not None and (type(batches) is not int or batches < 0):
        raise UsageError(f"batches should be a whole number, not {batches!r}")
    if not isinstance(loader, Iterable):
        raise UsageError(f"a {type(loader).__name__} gives no batches: take what loader(...) returns")
    if batches is None and isinstance(loader, FunctionLoader):
        raise UsageError("a function that makes microbatches has no end: say how many steps of it, batches=")
    tensors = isinstance(loader, tuple) and any(isinstance(x, Tensor) for x in loader)
    if tensors or isinstance(loader, Mapping | Batch):
        raise UsageError("this is one batch: give a list of batches, or what loader(...) returns")


def make_log(log: Log | str | os.PathLike[str] | None, ending: ExitStack) -> Log | None:
    """The function that takes each step's numbers; a directory gets TensorBoard events. `ending` closes it."""
    if log is None or callable(log):
        return log
    events = EventLog(str(log))
    ending.callback(events.close)
    return events
