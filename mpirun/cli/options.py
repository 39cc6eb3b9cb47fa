"""The options of the three commands: declared for argparse, and converted to frozen dataclasses once.

A mistake is a `Stop`, which ends all ranks and which rank 0 prints; so is --help, with exit code 0.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from mpi4py import MPI

from mpirun.comm.fail_together import Stop, on_rank_0
from mpirun.engine.options import DEVICES, GPU_MESSAGES, ON_NAN, SetupOptions
from schedgen.util.errors import UsageError
from schedgen.util.option_fields import Number as number
from schedgen.util.option_fields import Parser, refuse_overwriting

EXAMPLES = """built-in models: mpirun.examples.gpt:tiny, :small, :tied and :tensor; mpirun.examples.mlp:tiny and :small;
mpirun.examples.seq2seq:tiny and :small

python -m mpirun profile --help: measure what a model's stages and messages cost
python -m mpirun graph --help: what a model's stages read of one another

example: mpiexec -n 4 python -m mpirun 1f1b.json --model mpirun.examples.gpt:tiny --steps 20"""


Options = TypeVar("Options", "RunOptions", "ProfileOptions", "GraphOptions", SetupOptions)


@dataclass(frozen=True)
class RunOptions:
    """Options of `python -m mpirun FILE`; those without a comment mean what --help says."""

    setup: SetupOptions
    file: str
    traceback: bool
    seed: int | None  # None: the checkpoint's; without one `setup.seed`
    verify: bool
    tolerance: float | None  # None: the default for the types that are computed in
    save: str | None
    every: int
    keep: int
    resume: str | None
    timeout: float
    memory: bool
    metrics: str | None
    trace: str | None
    trace_steps: int


@dataclass(frozen=True)
class ProfileOptions:
    """Options of `python -m mpirun profile`. `stages`, `schedule` or both are given."""

    setup: SetupOptions
    traceback: bool
    stages: int | None
    schedule: str | None
    output: str


@dataclass(frozen=True)
class GraphOptions:
    """Options of `python -m mpirun graph`."""

    model: str
    traceback: bool
    stages: int
    output: str


class RanksParser(Parser):
    """A parser whose errors end all ranks and are printed by rank 0 alone."""

    def error(self, message: str) -> NoReturn:
        """End all ranks with this message and a hint at --help."""
        raise Stop(f"{message} (see {self.prog} --help)")


def run_options(comm: MPI.Comm, arguments: Sequence[str]) -> RunOptions:
    """The options from the arguments of `python -m mpirun`."""
    parser = _parser("", "Train a model by a schedule, one MPI rank a worker.", EXAMPLES)
    parser.add_argument("file", metavar="FILE", nargs="?", help="a schedule, written by schedgen compile")
    _common(parser)
    _of_run(parser)
    values = _values(comm, parser, arguments, file="FILE", model="--model")
    _check_company(parser, values)
    _check_files(comm, read=[values["file"], values["text"]], written=[values["metrics"], values["trace"]])
    for name in ("save", "resume", "metrics", "trace"):  # the model's module may change the working directory
        if values[name] not in (None, "-"):
            values[name] = str(Path(values[name]).absolute())
    if values["trace"] and not values["steps"]:
        parser.error("--trace: there is nothing to trace in 0 steps")
    return _made(RunOptions, values, setup=_made(SetupOptions, values, seed=values["seed"] or 0))


def profile_options(comm: MPI.Comm, arguments: Sequence[str]) -> ProfileOptions:
    """The options from the arguments after `profile`. A step's cost does not depend on --lr or --canonical."""
    parser = _parser(
        " profile",
        "Measure what a model's stages and messages cost here, on all ranks at once:\n"
        "a profile for --profile of schedgen's commands, and for plan.",
        "example: mpiexec -n 4 python -m mpirun profile --model mpirun.examples.gpt:tiny --stages 4 -o tiny",
    )
    add = parser.add_argument
    add("--stages", type=_positive_count, metavar="S", help="how many stages the model is cut into")
    add("--schedule", metavar="FILE", help="take stages and edges from a schedule")
    add("-o", "--output", metavar="PROFILE", help="the file to write")
    _common(parser)
    add("--steps", type=_count, default=10, metavar="N", help="steps that are timed; default: 10")
    add("--seed", type=_count, metavar="N", help="seed of the weights and of places in the text; default: 0")
    values = _values(comm, parser, arguments, model="--model", output="--output")
    if values["stages"] is None and values["schedule"] is None:
        parser.error("--stages or --schedule is missing")
    _check_files(comm, read=[values["schedule"], values["text"]], written=[values["output"]])
    if not values["steps"]:
        parser.error("--steps: nothing is measured in 0 steps")
    return _made(ProfileOptions, values, setup=_made(SetupOptions, values))


def graph_options(comm: MPI.Comm, arguments: Sequence[str]) -> GraphOptions:
    """The options from the arguments after `graph`."""
    parser = _parser(
        " graph",
        "Which stages of a model read which others, and share parameters:\n"
        "a file for --graph of schedgen compile, search and plan.",
        "example: python -m mpirun graph --model mymodel:unet --stages 4 -o unet.graph",
    )
    parser.add_argument("--stages", type=_positive_count, metavar="S", help="how many stages the model is cut into")
    parser.add_argument("-o", "--output", metavar="FILE", help="the file to write; - is standard output")
    return _made(GraphOptions, _values(comm, parser, arguments, model="--model", stages="--stages", output="--output"))


def _parser(command: str, description: str, epilog: str) -> Parser:
    """A parser with the options that all commands share; `command`: what follows `python -m mpirun`."""
    parser = RanksParser(
        prog=f"python -m mpirun{command}", description=description, epilog=epilog, add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("-h", "--help", action="store_true", help="show this and exit")
    add("--model", metavar="MODULE:FUNCTION", help="a function: number of stages -> mpirun.Model")
    add("--traceback", action="store_true", help="if a rank fails, show the whole traceback")
    return parser


def _common(parser: Parser) -> None:
    """Add the options of the model and of its steps that a run and a profile share.

    From here on, options of the names of SetupOptions' fields have their defaults.
    """
    parser.set_defaults(**{field.name: field.default for field in fields(SetupOptions) if field.default is not MISSING})
    add = parser.add_argument
    add("--text", metavar="FILE", help="the training text; default: modules of Python's standard library")
    add("--optimizer", choices=("adamw", "sgd"), help="default: adamw")
    add("--momentum", type=_fraction, metavar="X", help="momentum of sgd; default: 0")
    add("--weight-decay", type=_fraction, metavar="X", help="default: 0.01")
    add("--autocast", choices=("bf16",), help="forwards in mixed precision; weights stay as they are")
    add("--device", choices=DEVICES, help="default: a GPU where every rank has one")
    add("--gpu-messages", choices=GPU_MESSAGES,
        help="direct: MPI gets GPU memory; host: messages go through host memory; default: direct if MPI can and a "
        "trial shows that it does")  # fmt: skip
    add("--stream-words", action="store_true", help="order a GPU's kernels and messages by words in memory, not events")
    add("--clip", type=_positive, metavar="X", help="largest norm of the whole gradient; default: no limit")
    add("--threads", type=_threads, metavar="N", help="torch's threads on each rank; default: cores / ranks")


def _of_run(parser: Parser) -> None:
    """Add the options that a run alone has."""
    add = parser.add_argument
    # Steps
    add("--steps", type=_count, metavar="N", help="steps of the optimizer; default: 20")
    add("--seed", type=_count, default=None, metavar="N",
        help="seed of weights and of microbatches' places in the text; default: 0, or the checkpoint's")  # fmt: skip
    add("--lr", type=_positive, metavar="X", help=f"learning rate; default: {SetupOptions.lr}")
    add("--lr-schedule", choices=("constant", "linear", "cosine"), help="default: constant")
    add("--warmup", type=_count, metavar="N", help="steps in which the learning rate rises; default: 0")
    add("--accumulate", type=_positive_count, metavar="N", help="passes through the schedule before a step")
    add("--graphs", action="store_true", help="capture the kernels of each job once, on a GPU, and replay them")
    # The comparison with one process
    add("--verify", action="store_true", help="repeat the steps in one process and compare; exit 1 if results differ")
    add("--tolerance", type=_fraction, metavar="X",
        help="relative difference that --verify allows; default: 1e-5, 1e-2 with --autocast, 5e-2 where parameters "
        "are narrower than float32")  # fmt: skip
    add("--canonical", action="store_true", help="add gradients in microbatch order: the bits of one process")
    # Checkpoints
    add("--save", metavar="DIR", help="write checkpoints there")
    add("--every", type=_positive_count, metavar="N", help="steps between two checkpoints; default: 100")
    add("--keep", type=_positive_count, metavar="K", help="keep the K newest checkpoints; default: 3")
    add("--resume", metavar="DIR", help="resume from the newest whole checkpoint there; --steps includes its steps")
    # What goes wrong
    add("--on-nan", choices=ON_NAN,
        help="what to do about a loss or a gradient that is not finite: stop, or leave out the optimizer's step; "
        "default: stop")  # fmt: skip
    add("--timeout", type=_fraction, default=600.0, metavar="S",
        help="seconds without progress after which a run is ended; 0: never; default: 600")  # fmt: skip
    # Records
    add("--memory", action="store_true", help="print the peak bytes of tensors on each rank; slow on a CPU")
    add("--metrics", metavar="FILE",
        help="one JSON object a step: step, loss, grad_norm, seconds, tokens, and the loss's metrics; - is standard "
        "output")  # fmt: skip
    add("--trace", metavar="FILE", help="record when ranks do what, for Perfetto and schedgen stats --measured")
    add("--trace-steps", type=_positive_count, metavar="K", help="trace the last K steps; default: 1")


def _values(comm: MPI.Comm, parser: Parser, arguments: Sequence[str], **needed: str) -> dict[str, Any]:
    """The options' values by name; `needed`: required ones, with their spelling in messages."""
    values = vars(parser.parse_args(arguments))
    if values["help"]:
        if comm.rank == 0:
            parser.print_help()
        raise Stop("", 0, speaker=-1)
    for name, words in needed.items():
        if values[name] is None:
            parser.error(f"{words} is missing")
    for name in ("text", "schedule", "output", "metrics", "trace", "save", "resume"):
        if values.get(name) == "":  # such as from an unset variable of the shell
            parser.error(f"--{name}: the {'folder' if name in ('save', 'resume') else 'file'} has no name")
    if values.get("momentum") and values["optimizer"] != "sgd":
        parser.error("--momentum needs --optimizer sgd")
    return values


def _check_company(parser: Parser, values: dict[str, Any]) -> None:
    """Refuse options that need another one which is not given, and set the defaults of those that are not given."""
    for name, asked, default in (("every", "save", 100), ("keep", "save", 3), ("trace_steps", "trace", 1)):
        if values[name] is None:
            values[name] = default
        elif values[asked] is None:
            parser.error(f"--{name.replace('_', '-')} needs --{asked}")
    if values["tolerance"] is not None and not values["verify"]:
        parser.error("--tolerance needs --verify")


def _check_files(comm: MPI.Comm, read: Sequence[str | None], written: Sequence[str | None]) -> None:
    """Stop if a file that is read would be overwritten, or two outputs would go to one file. Collective."""

    def check() -> None:
        try:
            refuse_overwriting(read, written)
        except OSError as error:  # such as a name that is too long
            raise UsageError(f"{error.filename}: {error.strerror}") from None
        names = [name for name in written if name]
        if len({os.path.realpath(name) for name in names}) < len(names):
            raise UsageError(f"two outputs would be written to {names[0]}: give each its own name")

    on_rank_0(comm, check)


def _made(options: type[Options], values: dict[str, Any], **more: Any) -> Options:
    """A dataclass of options from the values of its fields."""
    names = {field.name for field in fields(options)}
    return options(**{name: value for name, value in values.items() if name in names} | more)


_count = number("a whole number of at least 0", int, 0, 2**31)
_positive_count = number("a whole number of at least 1", int, 1, 2**31)
_threads = number("a number from 1 to 1024", int, 1, 1025)
_positive = number("a positive number", float, 1e-300, float("inf"))
_fraction = number("a number of at least 0", float, 0, float("inf"))
