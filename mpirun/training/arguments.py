"""The arguments of `Engine`: checks and converts them, and compares those of all ranks before anything depends on them.

The schedule and the model may each depend on the other. A function makes as many stages as the schedule has. A scheme,
which is named in place of a schedule, is compiled on rank 0 for the graph of the model's stages.

Plain values are compared as they are, functions by their names, other objects by those of their classes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Number, Real
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from mpirun.checkpoint.disk_format import refusing
from mpirun.checkpoint.pretrained import Pretrained
from mpirun.comm.fail_together import Stop, first_difference, on_rank_0, together
from mpirun.comm.waiting import RunComm
from mpirun.data.loader import Batch, Loader
from mpirun.engine.read_schedule import Schedule, check_for_run, read_schedule, share_program
from mpirun.engine.recipe import Factory, Recipe, is_plain
from mpirun.model.contract import Model
from mpirun.model.load_model import bare_model, check_model, join_stages
from mpirun.model.loss import of_last_stage
from mpirun.model.split.split_result import Cut
from schedgen.checker import check
from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.ir.program import Program
from schedgen.schemes import load as load_scheme
from schedgen.schemes.scheme import Sizes
from schedgen.util.errors import UsageError, clip

Models = Model | Cut | nn.Module | Sequence[nn.Module] | Callable[[int], Model | Cut]
DATA_PARALLEL = ("ddp", "fsdp")

# The options of `schedgen compile` that an Engine takes with a scheme's name.
SIZES = ("groups", "chunks", "group", "replicas", "shards")
ORDER = ("n", "mode", "weight_slots", "prefetch", "recompute", "offload", "evict", "memory_limit", "updates")


class Given(NamedTuple):
    """A script's model, and what it is made with."""

    model: Models
    loss: Callable[[Any, Any], Any] | None
    stages: int | None  # how many there should be; None: as many as there are
    weights: Path | None  # a directory that parameters and buffers are read from
    seed: int  # for the modules that a function makes
    loss_of: str | None = None  # in place of the model's

    def take(self, stages: int | None, layers: Sequence[int] | None = None) -> Model:
        """The Model; `layers`: how many of its own stages each stage joins; None: one. UsageError if there is none."""
        model, loss = self.model, self.loss
        if callable(model) and not isinstance(model, Model | Cut | nn.Module):
            if stages is None:
                raise UsageError("stages: say how many the function is to make")
            torch.manual_seed(self.seed)
            model = model(sum(layers) if layers else stages)
        if isinstance(model, Model):
            model = model if loss is None else model._replace(loss=of_last_stage(loss, model.origin.rebuild))
        elif loss is None:
            what = "a split module has" if isinstance(model, Cut) else "modules have"
            raise UsageError(f"loss: say what it is, {what} none")
        elif isinstance(model, Cut):
            model = model.model(loss)
        else:
            modules = list(model) if isinstance(model, Iterable) else [model]
            wanted = sum(layers) if layers else stages or len(modules)
            if isinstance(model, nn.Module) and is_bare(model) and wanted == 1:
                model = bare_model(model, loss)
            elif isinstance(model, nn.Module) and wanted != len(modules):
                split = f"split it first, mpirun.split(model, example, stages={wanted})"
                raise UsageError(f"the model, a {type(model).__name__}, is not in {wanted} stages: {split}")
            else:
                model = Model(modules, loss)
        if layers is not None:
            model = join_stages(model, layers)
        if self.loss_of is not None:
            model = model._replace(loss_of=self.loss_of)
        model = check_model(model, len(model.stages) if stages is None else stages)
        return model if self.weights is None else model._replace(weights=Pretrained(self.weights))


def load(
    comm: RunComm,
    schedule: str | PathLike[str] | Program | Schedule,
    microbatches: int | None,
    given: Given,
    options: Mapping[str, Any],
) -> tuple[Schedule, Model]:
    """The schedule, read or compiled, and the model for it. Collective; Stop if one is refused, or they do not fit.

    `options`: of SIZES and ORDER, for a scheme's name.
    """
    name = "the schedule" if isinstance(schedule, Program | Schedule) else fspath(schedule)
    scheme = name if isinstance(schedule, str | PathLike) and is_scheme(name) else None
    if options and scheme is None:
        given_to = "to schedgen compile, or with a scheme's name"
        raise Stop(f"{name} is compiled already: give {', '.join(options)} {given_to}")
    if isinstance(schedule, Schedule):
        file = schedule
    elif isinstance(schedule, Program):
        on_rank_0(comm, lambda: check_for_run(schedule, name, comm.size))
        file = share_program(comm, schedule if comm.rank == 0 else None)
    elif scheme is not None:
        stages = given.stages or (1 if scheme in DATA_PARALLEL and is_bare(given.model) else None)
        model = together(comm, lambda: given.take(stages))
        program = on_rank_0(comm, lambda: _compile(model, scheme, microbatches, comm.size, options))
        return share_program(comm, program), model
    else:
        file = read_schedule(comm, name)
    header = file.program.header
    wanted = {"microbatches": (microbatches, header.microbatches), "stages": (given.stages, header.model_stages)}
    for what, (asked, has) in wanted.items():
        if asked not in (None, has):
            of_model = " of the model" if what == "stages" else ""
            raise Stop(f"{name} has {has} {what}{of_model}, not {asked}")
    return file, together(comm, lambda: given.take(header.model_stages, header.scheme.get("layers")))


def is_bare(model: object) -> bool:
    """Whether a model is one module, which has a forward."""
    return isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList)


def is_scheme(name: str) -> bool:
    """Whether a script names a scheme, built in or a file with w and n, and not a schedule."""
    return Path(name).suffix == ".py" or (Path(name).suffix != ".json" and not Path(name).is_file())


def _compile(model: Model, scheme: str, microbatches: int | None, workers: int, options: Mapping[str, Any]) -> Program:
    """The program of a scheme for a model; None: as many microbatches as workers."""
    graph, stages = model.graph(), len(model.stages)
    if scheme == "fsdp" and stages == 1:  # a bare module, of which each worker should own a part
        options = {"shards": workers, **options}
    if scheme in DATA_PARALLEL and model.loss_of == "minibatch":
        options = {"n": "breadth-first", **options}
    given = {name: options[name] for name in SIZES if name in options}
    if isinstance(given.get("shards"), int):
        given["shards"] = (given["shards"],)
    sizes = Sizes(stages, workers if microbatches is None else microbatches, workers, **given)
    of_order = {name: options[name] for name in ORDER if name in options}
    try:
        sizes = sizes.checked()
        loaded = load_scheme("1f1b-rr" if scheme == "1f1b" and isinstance(sizes.replicas, tuple) else scheme, sizes)
        if model.reads is not None or loaded.edges is None:  # else the scheme's own edges say what stages read
            loaded = loaded._replace(edges=graph.edges, per_consumer=graph.per_consumer)
        program = compile(loaded, sizes, Options(tied=graph.tied, **of_order))
    except UsageError as error:
        words = re.sub("--([a-z-]+)", lambda option: option[1].replace("-", "_"), str(error))
        raise UsageError(words) from None
    check(program, f"the schedule {scheme}")
    return program


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
