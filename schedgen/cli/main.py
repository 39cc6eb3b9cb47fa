"""The `schedgen` command: finds the subcommand, runs it, and reports errors.

Exit codes: 0 done; 1 a file is refused; 2 wrong usage, or sizes and functions that make no schedule. Those of `diff`
are diff(1)'s: 0 no difference, 1 a difference, 2 trouble. An error is one sentence on stderr.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import schedgen
from schedgen.cli import make_schedules, options, read_schedules
from schedgen.schemes import SCHEMES
from schedgen.util.errors import RefusedFile, UsageError, one_line
from schedgen.util.files import prepare_streams
from schedgen.util.option_fields import Parser, add_arguments, check_files, read
from schedgen.util.progress import allow


class Command(NamedTuple):
    """A subcommand."""

    name: str
    options: type[Any]  # a dataclass of options.py
    run: Callable[[Any], int]  # takes these options; returns the exit code
    summary: str
    example: str
    refused: int = 1  # exit code if a file is refused or cannot be read
    exit_codes: str = ""  # what its exit codes mean, if not the same as for all others


COMMANDS = (
    Command("compile", options.CompileOptions, make_schedules.run_compile, "write the schedule of a scheme",
        "schedgen compile 1f1b --stages 4 --microbatches 8 -o 1f1b.json"),
    Command("check", options.CheckOptions, read_schedules.run_check, "prove schedules right, or say what is wrong",
        "schedgen check 1f1b.json"),
    Command("repair", options.RepairOptions, read_schedules.run_repair, "order messages to be safe on a transport",
        "schedgen repair 1f1b.json --transport in-order:pair -o safe.json"),
    Command("seal", options.SealOptions, read_schedules.run_seal, "re-hash and re-format a schedule edited by hand",
        "schedgen seal 1f1b.json"),
    Command("stats", options.StatsOptions, read_schedules.run_stats, "latency, bubble, memory and messages",
        "schedgen stats 1f1b.json --json"),
    Command("simulate", options.SimulateOptions, read_schedules.run_simulate, "execute a schedule against a cost model",
        "schedgen simulate 1f1b.json --cost F=1,B=2 --alpha 0.01 --beta 1e-9 --activation 1000000 --trace trace.json"),
    Command("draw", options.DrawOptions, read_schedules.run_draw, "a picture of a schedule, or of two on one time axis",
        "schedgen draw gpipe.json 1f1b.json --alpha 0.1 -o both.html"),
    Command("export", options.ExportOptions, read_schedules.run_export, "write a schedule for other tools",
        "schedgen export 1f1b.json --to chakra -o trace"),
    Command("diff", options.DiffOptions, read_schedules.run_diff, "what changed between two schedules",
        "schedgen diff old.json new.json", 2, "exit code: 0 nothing, 1 they differ, 2 trouble"),
    Command("compare", options.CompareOptions, make_schedules.run_compare, "built-in schemes that fit, beside your own",
        "schedgen compare --stages 8 --microbatches 8 --workers 4 --memory-limit 12"),
    Command("plan", options.PlanOptions, make_schedules.run_plan, "where to cut a model, and what trains it",
        "schedgen plan profile.json --workers 2 --bandwidth 1.25e9 --microbatches 4 -o plan.json"),
    Command("search", options.SearchOptions, make_schedules.run_search, "the order that ends first, and a bound",
        "schedgen search zb-v --stages 8 --microbatches 8 --cost F=10,I=12,W=8 --memory-limit 4 -o found.json"),
    Command("new", options.NewOptions, make_schedules.run_new, "write a template for a scheme of your own",
        "schedgen new mine"),
    Command("schemes", options.SchemesOptions, make_schedules.run_schemes, "the built-in schemes and their parameters",
        "schedgen schemes"),
)  # fmt: skip


def parser() -> Parser:
    """The parser of the command line; it sets `command` to the Command."""
    top = Parser(
        prog="schedgen",
        description="Static schedules for distributed training, as text.",
        epilog="schedgen COMMAND --help: its options and an example",
    )
    top.add_argument("--version", action="version", version=f"schedgen {schedgen.__version__}")
    subparsers = top.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.name,
            help=command.summary,
            description="; ".join(filter(None, (command.summary, command.exit_codes))),
            epilog=f"example: {command.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        subparser.set_defaults(command=command)
        subparser.add_argument("-q", "--quiet", action="store_true", help="no progress bars on a terminal")
        add_arguments(subparser, command.options)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `schedgen ARGUMENTS`, by default those of this process; return the exit code."""
    prepare_streams()
    gc.set_threshold(50_000)  # a program's tuples are no cycles, and looking for some took a third of a compile
    values = vars(parser().parse_args(arguments))
    allow(values["quiet"])
    command: Command = values["command"]
    try:
        given = read(command.options, values)
        check_files(given, not_files=SCHEMES)
        code = command.run(given)
        sys.stdout.flush()
        return code
    except (UsageError, RefusedFile) as error:
        print(f"schedgen: {one_line(error)}", file=sys.stderr)
        return max(error.code, command.refused)
    except BrokenPipeError:  # the reader of our output is gone, as in `schedgen stats F | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except OSError as error:
        name = error.filename or "standard output"
        print(f"schedgen: {one_line(name)}: {error.strerror}", file=sys.stderr)
        return command.refused
    except MemoryError:
        print("schedgen: out of memory", file=sys.stderr)
        return command.refused
