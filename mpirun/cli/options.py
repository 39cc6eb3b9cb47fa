"""The commands and their options.

A mistake is a `Stop`, which ends all ranks and which rank 0 prints; so is --help, with exit code 0.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from mpi4py import MPI

from mpirun.comm.fail_together import Stop, on_rank_0
from mpirun.engine.options import SECONDS, HostOptions, RunOptions, SetupOptions
from schedgen.util.errors import UsageError
from schedgen.util.option_fields import (
    READ,
    WRITTEN,
    Parser,
    add_arguments,
    amount,
    argument,
    check_files,
    count,
    natural,
    option,
    read,
    switch,
)

EXAMPLES = """built-in models: mpirun.examples.gpt:tiny, :tied and :tensor; mpirun.examples.mlp:tiny;
mpirun.examples.seq2seq:tiny

python -m mpirun profile --help: measure what a model's stages and messages cost
python -m mpirun machine --help: measure the machine alone
python -m mpirun graph --help: what a model's stages read of one another

example: mpiexec -n 4 python -m mpirun 1f1b.json --model mpirun.examples.gpt:tiny --steps 20"""
STAGES = "how many stages the model is cut into"


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """What all commands take."""

    traceback: bool = switch("--traceback", "if a rank fails, show the whole traceback")


@dataclass(frozen=True, kw_only=True)
class ModelOptions(CommandOptions):
    """What all commands on a model take."""

    model: str = option("--model MODULE:FUNCTION", "a function: number of stages -> mpirun.Model")


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """The optimizer of the command line."""

    optimizer: str = option("--optimizer", "default: adamw", default="adamw", choices=("adamw", "sgd"))
    momentum: float = option("--momentum X", "momentum of sgd; default: 0", SECONDS, 0.0)
    weight_decay: float = option("--weight-decay X", "default: 0.01", SECONDS, 0.01)
    lr: float = option("--lr X", "learning rate", amount, 1e-3)


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions, OptimizerOptions, ModelOptions):
    """`python -m mpirun FILE`."""

    file: str = argument("FILE", "a schedule, written by schedgen compile", nargs="?")
    steps: int = option("--steps N", "steps of the optimizer", natural, 20)
    seed: int | None = option(  # type: ignore[assignment]  # the run's is never None
        "--seed N", "seed of weights and of microbatches' places in the text; default: 0, or the checkpoint's", natural
    )
    lr_schedule: str = option(
        "--lr-schedule", "default: constant", default="constant", choices=("constant", "linear", "cosine")
    )
    warmup: int = option("--warmup N", "steps in which the learning rate rises; default: 0", natural, 0)
    tolerance: float | None = option(
        "--tolerance X", "relative difference that --verify allows; default: 1e-5, 1e-2 with --autocast, 5e-2 where "
        "parameters are narrower than float32", SECONDS, needs="verify",
    )  # fmt: skip
    save: str | None = option("--save DIR", "write checkpoints there")
    every: int = option("--every N", "steps between two checkpoints", count, 100, needs="save")
    keep: int = option("--keep K", "keep the K newest checkpoints", count, 3, needs="save")
    resume: str | None = option(
        "--resume DIR", "resume from the newest whole checkpoint there; --steps includes its steps"
    )
    memory: bool = switch("--memory", "print the peak bytes of tensors on each rank, --verify's too; slow on a CPU")
    metrics: str | None = option(
        "--metrics FILE", "one JSON object a step: step, loss, grad_norm, seconds, tokens, and the loss's metrics; - is"
        " standard output", file=WRITTEN,
    )  # fmt: skip
    trace: str | None = option(
        "--trace FILE", "record when ranks do what, for Perfetto and schedgen stats --measured", file=WRITTEN
    )
    trace_steps: int = option("--trace-steps K", "trace the last K steps", count, 1, needs="trace")

    def __post_init__(self) -> None:
        """UsageError if options do not go together; places are absolute: a model may change the working directory."""
        if self.trace and not self.steps:
            raise UsageError("--trace: there is nothing to trace in 0 steps")
        for name in ("save", "resume", "metrics", "trace"):
            if (place := getattr(self, name)) not in (None, "", "-"):
                object.__setattr__(self, name, str(Path(place).absolute()))


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(SetupOptions, OptimizerOptions, ModelOptions):
    """`python -m mpirun profile`. `stages`, `schedule` or both are given."""

    stages: int | None = option("--stages S", STAGES, count)
    schedule: str | None = option("--schedule FILE", "take stages and edges from a schedule", file=READ)
    output: str = option("-o --output PROFILE", "the file to write", file=WRITTEN)
    steps: int = option("--steps N", "steps that are timed", natural, 10)

    def __post_init__(self) -> None:
        """UsageError if options do not go together."""
        if self.stages is None and self.schedule is None:
            raise UsageError("--stages or --schedule is missing")
        if not self.steps:
            raise UsageError("--steps: nothing is measured in 0 steps")


@dataclass(frozen=True, kw_only=True)
class GraphOptions(ModelOptions):
    """`python -m mpirun graph`."""

    stages: int = option("--stages S", STAGES, count)
    output: str = option("-o --output FILE", "the file to write; - is standard output", file=WRITTEN)


@dataclass(frozen=True, kw_only=True)
class MachineOptions(HostOptions, CommandOptions):
    """`python -m mpirun machine`."""

    output: str = option("-o --output FILE", "the file to write; - is standard output", file=WRITTEN)


class RanksParser(Parser):
    """A parser whose errors end all ranks and are printed by rank 0 alone."""

    def error(self, message: str) -> NoReturn:
        """End all ranks with this message and a hint at --help."""
        raise Stop(f"{message} (see {self.prog} --help)")


class Command(NamedTuple):
    """A command, which is what follows `python -m mpirun`."""

    options: type[CommandOptions]
    needed: Mapping[str, str]  # the required options, with their spelling in messages
    description: str
    epilog: str


COMMANDS = {
    "": Command(
        TrainOptions, {"file": "FILE", "model": "--model"}, "Train a model by a schedule, one MPI rank a worker.",
        EXAMPLES,
    ),
    "profile": Command(
        ProfileOptions, {"model": "--model", "output": "--output"},
        "Measure what a model's stages and messages cost here, on all ranks at once:\n"
        "a profile for --profile of schedgen's commands, and for plan.",
        "example: mpiexec -n 4 python -m mpirun profile --model mpirun.examples.gpt:tiny --stages 4 -o tiny",
    ),
    "machine": Command(
        MachineOptions, {"output": "--output"},
        "Measure links and devices, a rank on each device:\na file for --machine of schedgen's commands.",
        "example: mpiexec -n 8 python -m mpirun machine -o cluster.json",
    ),
    "graph": Command(
        GraphOptions, {"model": "--model", "stages": "--stages", "output": "--output"},
        "Which stages of a model read which others, and share parameters:\n"
        "a file for --graph of schedgen compile, search and plan.",
        "example: python -m mpirun graph --model mymodel:unet --stages 4 -o unet.graph",
    ),
}  # fmt: skip


def read_options(comm: MPI.Comm, name: str, arguments: Sequence[str]) -> Any:
    """The options of the command `name`, from the arguments after it. Collective."""
    command = COMMANDS[name]
    parser = RanksParser(
        prog=f"python -m mpirun {name}".rstrip(), description=command.description, epilog=command.epilog,
        add_help=False, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("-h", "--help", action="store_true", help="show this and exit")
    add_arguments(parser, command.options)
    values = vars(parser.parse_args(arguments))
    if values["help"]:
        if comm.rank == 0:
            parser.print_help()
        raise Stop("", 0, speaker=-1)
    for key, words in command.needed.items():
        if values[key] is None:
            parser.error(f"{words} is missing")
    try:
        options = read(command.options, values)
    except UsageError as error:
        parser.error(str(error))
    for key in ("save", "resume"):
        if values.get(key) == "":  # such as from an unset variable of the shell
            parser.error(f"--{key}: the folder has no name")
    if values.get("momentum") and values["optimizer"] != "sgd":
        parser.error("--momentum needs --optimizer sgd")
    on_rank_0(comm, lambda: _check_files(options))
    return options


def _check_files(options: CommandOptions) -> None:
    """UsageError if a file that is read would be overwritten, or two outputs would go to one file."""
    try:
        check_files(options)
    except OSError as error:  # such as a name that is too long
        raise UsageError(f"{error.filename}: {error.strerror}") from None
    files = [getattr(options, each.name) for each in fields(options) if each.metadata.get("file") == WRITTEN]
    names = [name for name in files if name]
    if len({os.path.realpath(name) for name in names}) < len(names):
        raise UsageError(f"two outputs would be written to {names[0]}: give each its own name")
