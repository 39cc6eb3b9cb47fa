"""The options of both commands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn, TypeVar

from mpi4py import MPI

from mpirun.comm.fail_together import Stop
from schedgen.util.option_types import number

T = TypeVar("T", int, float)

LR = 1e-3


EXAMPLES = """built-in models: mpirun.models.gpt:tiny, :small, :tied and :tensor; mpirun.models.mlp:tiny and :small;
mpirun.models.seq2seq:tiny and :small

python -m mpirun profile --help: measure what a model's stages and messages cost
python -m mpirun graph --help: what a model's stages read of one another

example: mpiexec -n 4 python -m mpirun 1f1b.json --model mpirun.models.gpt:tiny --steps 20"""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Stop(f"{message} (see {self.prog} --help)", 2, speaker=0)


def train_options(comm: MPI.Comm, arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m mpirun",
        description="Train a model by a schedule, one MPI rank a worker.",
        epilog=EXAMPLES,
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("file", metavar="FILE", nargs="?", help="a schedule, written by schedgen compile")
    _common(parser)
    add("--steps", type=_count, default=20, metavar="N", help="of the optimizer; default: 20")
    add(
        "--seed",
        type=_count,
        metavar="N",
        help="of the weights and of the microbatches' places in the text; default: 0, or the checkpoint's",
    )
    add("--lr", type=_positive, default=LR, metavar="X", help=f"learning rate; default: {LR}")
    add("--lr-schedule", choices=("constant", "linear", "cosine"), default="constant", help="default: constant")
    add("--warmup", type=_count, default=0, metavar="N", help="steps in which the learning rate rises; default: 0")
    add("--verify", action="store_true", help="do the same steps in one process and compare; exit 1 if they differ")
    add(
        "--tolerance",
        type=_fraction,
        metavar="X",
        help="relative difference that --verify allows; default: 1e-5, 1e-2 with --autocast, 5e-2 where parameters "
        "are narrower than float32",
    )
    add("--canonical", action="store_true", help="add gradients in microbatch order: the bits of one process")
    add("--accumulate", type=_positive_count, default=1, metavar="N", help="walks through the schedule before a step")
    add("--save", metavar="DIR", help="write checkpoints there")
    add("--every", type=_positive_count, default=100, metavar="N", help="steps between two; default: 100")
    add("--keep", type=_positive_count, default=3, metavar="K", help="so many, the newest; default: 3")
    add("--resume", metavar="DIR", help="go on from the newest whole checkpoint there; --steps counts from the first")
    add(
        "--on-nan",
        choices=("stop", "skip"),
        default="stop",
        help="what to do about a loss or a gradient that is "
        "not finite: stop, or leave out the optimizer's step; default: stop",
    )
    add(
        "--timeout",
        type=_fraction,
        default=600.0,
        metavar="S",
        help="seconds after which a run in which nothing moves is ended; 0: never; default: 600",
    )
    add("--memory", action="store_true", help="say the most bytes of tensors on each rank; slow on a CPU")
    add("--metrics", metavar="FILE", help="one JSON object a step: step, loss, grad_norm, seconds, tokens")
    add("--trace", metavar="FILE", help="when ranks did what, for Perfetto and schedgen stats --measured")
    add("--trace-steps", type=_positive_count, default=1, metavar="K", help="trace the last K steps; default: 1")
    options = _parsed(comm, parser, arguments, file="FILE", model="--model")
    if options.trace and not options.steps:
        parser.error("--trace: there is nothing to trace in 0 steps")
    for name in ("save", "resume"):
        if getattr(options, name) == "":
            parser.error(f"--{name}: the folder has no name")
    return options


def profile_options(comm: MPI.Comm, arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m mpirun profile",
        description="Measure what a model's stages and messages cost here, on all ranks at once:\n"
        "a profile for schedgen simulate --profile.",
        epilog="example: mpiexec -n 4 python -m mpirun profile --model mpirun.models.gpt:tiny --stages 4 -o tiny.json",
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--stages", type=_positive_count, metavar="S", help="how many the model is cut into, as a chain")
    add("--schedule", metavar="FILE", help="take stages, edges and whether backwards are split from a schedule")
    add("--split", action="store_true", help="time the two halves of a backward, I and W, not B")
    add("-o", "--output", metavar="PROFILE", help="the file to write")
    _common(parser)
    add("--steps", type=_count, default=10, metavar="N", help="that are timed; default: 10")
    add("--seed", type=_count, default=0, metavar="N", help="of the weights, and of places in the text; default: 0")
    options = _parsed(comm, parser, arguments, model="--model", output="--output")
    if options.stages is None and options.schedule is None:
        parser.error("--stages or --schedule is missing")
    options.accumulate, options.canonical = 1, False
    options.lr, options.lr_schedule, options.warmup = LR, "constant", 0  # a step costs the same with any
    if not options.steps:
        parser.error("--steps: nothing is measured in 0 steps")
    return options


def graph_options(comm: MPI.Comm, arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m mpirun graph",
        description="Which stages of a model read which others, and share parameters:\n"
        "a file for schedgen compile --graph.",
        epilog="example: python -m mpirun graph --model mymodel:unet --stages 4 -o unet.graph",
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _model(parser)
    parser.add_argument("--stages", type=_positive_count, metavar="S", help="how many the model is cut into")
    parser.add_argument("-o", "--output", metavar="FILE", help="the file to write; - is standard output")
    options = parser.parse_args(arguments)
    return _complete(comm, parser, options, model="--model", stages="--stages", output="--output")


def _model(parser: Parser) -> None:
    add = parser.add_argument
    add("-h", "--help", action="store_true", help="show this and exit")
    add("--model", metavar="MODULE:FUNCTION", help="a function: number of stages -> mpirun.Model")
    add("--traceback", action="store_true", help="where a rank fails, show the whole traceback")


def _common(parser: Parser) -> None:
    """The options of the model and of its training."""
    add = parser.add_argument
    _model(parser)
    add("--text", metavar="FILE", help="the training text; default: the sources of Python's standard library")
    add("--optimizer", choices=("adamw", "sgd"), default="adamw", help="default: adamw")
    add("--momentum", type=_fraction, default=0.0, metavar="X", help="of sgd; default: 0")
    add("--weight-decay", type=_fraction, default=0.01, metavar="X", help="default: 0.01")
    add("--autocast", choices=("bf16",), help="forwards in mixed precision; weights stay as they are")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU where every rank has one")
    add("--clip", type=_positive, metavar="X", help="largest norm of the whole gradient; default: no limit")
    add("--threads", type=_threads, default=0, metavar="N", help="of torch on each rank; default: cores / ranks")


def _parsed(comm: MPI.Comm, parser: Parser, arguments: Sequence[str], **needed: str) -> argparse.Namespace:
    """The options; `needed`: those that must be there, and what they are called."""
    options = _complete(comm, parser, parser.parse_args(arguments), **needed)
    if options.momentum and options.optimizer != "sgd":
        parser.error("--momentum is of --optimizer sgd")
    return options


def _complete(comm: MPI.Comm, parser: Parser, options: argparse.Namespace, **needed: str) -> argparse.Namespace:
    """The same, unless help is asked for or something that must be there is missing."""
    if options.help:
        if comm.rank == 0:
            parser.print_help()
        raise Stop("", 0, speaker=-1)
    for name, words in needed.items():
        if getattr(options, name) is None:
            parser.error(f"{words} is missing")
    return options


_count = number("a whole number of at least 0", int, 0, 2**31)
_positive_count = number("a whole number of at least 1", int, 1, 2**31)
_threads = number("a number from 1 to 1024", int, 1, 1025)
_positive = number("a positive number", float, 1e-300, float("inf"))
_fraction = number("a number of at least 0", float, 0, float("inf"))
