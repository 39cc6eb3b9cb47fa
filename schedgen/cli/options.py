"""What the `schedgen` command takes: its subcommands and their options."""

from __future__ import annotations

import argparse
import math
from typing import NoReturn

import schedgen
from schedgen.cli import commands
from schedgen.ir.instructions import DIRECTIONS
from schedgen.ir.weight_versions import UPDATES
from schedgen.planner.candidates import SEARCHED
from schedgen.schemes import SCHEMES
from schedgen.schemes.orders import ORDERS
from schedgen.util.errors import one_line
from schedgen.util.option_types import (
    amount,
    amounts,
    count,
    counts,
    natural,
    stage_list,
    stages_or_all,
    time,
    topology,
)

FILE, AS_JSON = "a schedule; - is standard input", "print JSON"


class Parser(argparse.ArgumentParser):
    """Errors in one line: the sentence and where to read more."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {one_line(message)} (see {self.prog} --help)\n")


def _searched(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in SEARCHED:
            raise argparse.ArgumentTypeError(f"'{name}' is none of {', '.join(SEARCHED)}")
    return names


def _add_costs(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add("--cost", type=cost, metavar="F=1,B=2", help="durations; default: those in the file")
    add("--alpha", type=time, default=0.0, metavar="T", help="time a message takes, in the same unit; default: 0")
    add("--beta", type=time, default=0.0, metavar="T", help="and time each of its bytes takes; default: 0")
    add("--activation", type=count, default=1, metavar="N", help="bytes of an activation or its gradient; default: 1")
    add("--weight", type=count, default=1, metavar="N", help="bytes of a stage's weights or their gradient; default: 1")
    add("--saved", type=count, default=1, metavar="N", help="bytes a forward keeps for its backward; default: 1")
    add("--profile", metavar="P", help="JSON with all of these and more by name, times and bytes also by stage")


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="schedgen",
        description="Static schedules for distributed training, as text.",
        epilog="schedgen COMMAND --help: its options and an example",
    )
    top.add_argument("--version", action="version", version=f"schedgen {schedgen.__version__}")
    subparsers = top.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: object, summary: str, example: str, more: str = "") -> argparse.ArgumentParser:
        sub = subparsers.add_parser(
            name, help=summary, description="; ".join(filter(None, (summary, more))), epilog=f"example: {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        sub.set_defaults(run=run, trouble=1)
        sub.add_argument("-q", "--quiet", action="store_true", help="no progress bars on a terminal")
        return sub

    sub = command(
        "compile", commands.run_compile, "write the schedule of a scheme",
        "schedgen compile 1f1b --stages 4 --microbatches 8 -o 1f1b.json",
    )  # fmt: skip
    sub.add_argument(
        "scheme", metavar="SCHEME|FILE", help=f"{', '.join(SCHEMES)}, FILE.py with w and n, or torch's FILE.csv"
    )
    sub.add_argument("--stages", type=count, metavar="S", help="of the model; needed unless the file is a CSV")
    sub.add_argument("--microbatches", type=count, metavar="B", help="of a step; needed unless the file is a CSV")
    sub.add_argument("--workers", type=count, metavar="W", help="ranks; default: what the scheme needs")
    sub.add_argument("--groups", type=count, metavar="G", help="groups of workers (lpp, fslpp)")
    sub.add_argument("--chunks", type=count, metavar="V", help="stages a worker (looped schemes)")
    sub.add_argument("--replicas", type=counts, metavar="R,R,...", help="workers of each stage (1f1b-rr, pipedream)")
    sub.add_argument(
        "--shards", type=counts, metavar="K",
        help="parts of the weights of a stage (K,K,...: of each), each on the next worker; default: 1",
    )  # fmt: skip
    sub.add_argument(
        "--layers", type=counts, metavar="L,L,...", help="layers of the model in each stage; default: mpirun's cut"
    )
    sub.add_argument(
        "--parts", type=count, default=1, metavar="P",
        help="stages of the model in each stage, one behind the other; default: 1",
    )  # fmt: skip
    sub.add_argument(
        "--tensor", type=count, default=1, metavar="T",
        help="shards of every stage, each on a worker, that make a sum of it; default: 1",
    )  # fmt: skip
    sub.add_argument(
        "--whole", type=stage_list, default=(), metavar="S,...",
        help="stages that all shards compute alike instead; the last always is",
    )  # fmt: skip
    sub.add_argument("--mode", choices=("greedy", "strict"), help="what n means; default: the scheme's own")
    sub.add_argument("--n", choices=tuple(ORDERS), help="what goes first; default: the scheme's own order")
    sub.add_argument(
        "--cost", type=cost, metavar="F=1,B=2", help="durations that greedy orders by; default: F=1,B=2 or F=1,I=1,W=1"
    )
    sub.add_argument(
        "--weight-slots", type=count, default=2, metavar="K", help="foreign weight copies held at a time; default: 2"
    )
    sub.add_argument(
        "--fan-out",
        type=count,
        default=2,
        metavar="K",
        help="copies of a stage one worker sends, others relay; default: 2",
    )
    sub.add_argument(
        "--prefetch", type=natural, default=1, metavar="K", help="jobs by which receives stand earlier; default: 1"
    )
    sub.add_argument(
        "--recompute",
        type=stages_or_all,
        default=(),
        metavar="all|S,...",
        help="stages that redo their forward; default: none",
    )
    sub.add_argument(
        "--memory-limit", type=count, metavar="M", help="saved forwards a worker may hold (greedy); default: no limit"
    )
    sub.add_argument(
        "--tied", type=stage_list, action="append", default=[], metavar="S,S,...",
        help="stages that share parameters; once a tie; default: none",
    )  # fmt: skip
    sub.add_argument(
        "--graph", metavar="FILE",
        help="stages, edges, apart and ties of a model that is no chain, from mpirun graph; default: a chain",
    )  # fmt: skip
    sub.add_argument(
        "--updates", choices=tuple(UPDATES),
        help="when weights change: once a list, or behind every microbatch, with stashed versions or vertical sync; "
        "default: the scheme's own",
    )  # fmt: skip
    sub.add_argument("-o", "--output", required=True, metavar="FILE", help="the schedule; - is standard output")

    sub = command(
        "check", commands.run_check, "prove schedules right, or say what is wrong", "schedgen check 1f1b.json"
    )
    sub.add_argument("files", nargs="+", metavar="FILE", help=FILE)

    sub = command(
        "seal", commands.run_seal, "re-hash and re-format a schedule edited by hand", "schedgen seal 1f1b.json"
    )
    sub.add_argument("file", metavar="FILE", help="is rewritten in place; - is standard input, and output then")

    sub = command(
        "stats", commands.run_stats, "latency, bubble, memory and messages", "schedgen stats 1f1b.json --json"
    )
    sub.add_argument("file", metavar="FILE", help=FILE)
    sub.add_argument("--json", action="store_true", help=AS_JSON)
    sub.add_argument("--cycles", action="store_true", help="instead, the jobs that start together, a line a time")
    costs = sub.add_mutually_exclusive_group()
    costs.add_argument("--cost", type=cost, metavar="F=1,B=2", help="durations; default: those in the file")
    costs.add_argument("--profile", metavar="P", help="JSON with durations and bytes: the memory a worker needs, too")
    costs.add_argument("--measured", metavar="TRACE", help="the seconds of a run, from what mpirun --trace wrote")

    sub = command(
        "simulate", commands.run_simulate, "execute a schedule against a cost model",
        "schedgen simulate 1f1b.json --cost F=1,B=2 --alpha 0.01 --beta 1e-9 --activation 1000000 --trace trace.json",
    )  # fmt: skip
    sub.add_argument("file", metavar="FILE", help=FILE)
    _add_costs(sub)
    sub.add_argument("--json", action="store_true", help=AS_JSON)
    sub.add_argument("--trace", metavar="OUT", help="Chrome trace events, for Perfetto")
    sub.add_argument("--measured", metavar="TRACE", help="durations as mpirun --trace found them; OUT has both")

    sub = command(
        "draw", commands.run_draw, "a picture of a schedule, or of two on one time axis",
        "schedgen draw gpipe.json 1f1b.json --alpha 0.1 -o both.html",
    )  # fmt: skip
    sub.add_argument("file", metavar="FILE", help=FILE)
    sub.add_argument("other", metavar="FILE2", nargs="?", help="another, drawn below on the same time axis")
    sub.add_argument("-o", "--output", metavar="OUT", help="OUT.svg, OUT.png or OUT.html; default: in the terminal")
    sub.add_argument(
        "--by", choices=("microbatch", "stage"),
        help="what colours say; default: the microbatch, or the stage where a worker has several",
    )  # fmt: skip
    sub.add_argument("--transfers", action="store_true", help="messages as arrows (in OUT.html: at first)")
    _add_costs(sub)
    sub.add_argument("--measured", metavar="TRACE", help="what mpirun --trace wrote, drawn over its simulation")

    sub = command(
        "export",
        commands.run_export,
        "write a schedule for other tools",
        "schedgen export 1f1b.json --to chrome -o trace.json",
    )
    sub.add_argument("file", metavar="FILE", help=FILE)
    sub.add_argument(
        "--to", required=True, choices=("chrome", "chakra", "csv"),
        help="events of a simulation, for Perfetto; MLCommons Chakra traces of it, one a rank; torch's compute actions",
    )  # fmt: skip
    sub.add_argument("-o", "--output", required=True, metavar="OUT", help="- is standard output")
    _add_costs(sub)

    sub = command(
        "diff", commands.run_diff, "what changed between two schedules", "schedgen diff old.json new.json",
        "exit code: 0 nothing, 1 they differ, 2 trouble",
    )  # fmt: skip
    sub.set_defaults(trouble=2)
    sub.add_argument("a", metavar="A", help=FILE)
    sub.add_argument("b", metavar="B", help="another, compiled or edited later")

    sub = command(
        "compare", commands.run_compare, "all schemes that fit, side by side",
        "schedgen compare --stages 8 --microbatches 8 --workers 4 --memory 12",
    )  # fmt: skip
    sub.add_argument("--stages", type=count, required=True, metavar="S", help="of the model")
    sub.add_argument("--microbatches", type=count, required=True, metavar="B", help="of a step")
    sub.add_argument("--workers", type=count, required=True, metavar="W", help="ranks")
    sub.add_argument("--memory", type=count, metavar="M", help="saved forwards a worker may hold; default: no limit")
    sub.add_argument("--cost", type=cost, metavar="F=1,B=2", help="durations; a split backward has half of B each")
    sub.add_argument("--json", action="store_true", help=AS_JSON)
    sub.add_argument("-o", "--output", metavar="OUT.svg", help="a plot of latency against memory; - is standard output")

    sub = command(
        "plan", commands.run_plan, "where to cut a model, and the schedules that train it best",
        "schedgen plan profile.json --workers 2 --bandwidth 1.25e9 --microbatches 4 -o plan.json",
    )  # fmt: skip
    sub.add_argument(
        "profile",
        metavar="PROFILE",
        help="layers and their costs: PipeDream's file, or mpirun profile's with a stage a layer; - is standard input",
    )
    sub.add_argument("--workers", type=count, metavar="W", help="ranks; this or --topology is needed")
    sub.add_argument(
        "--topology",
        type=topology,
        metavar="4x4",
        help="workers of a level, groups of those in the next, and so on",
    )
    sub.add_argument(
        "--bandwidth",
        type=amounts,
        metavar="1e10,1.25e9",
        help="bytes a second of links, by level; default: the profile's",
    )
    sub.add_argument(
        "--memory", type=amount, default=math.inf, metavar="M", help="bytes a worker may hold; default: no limit"
    )
    sub.add_argument(
        "--partition-only",
        action="store_true",
        help="only where to cut, and replicas; no search: with -o PipeDream's own schedule",
    )
    sub.add_argument("--microbatches", type=count, metavar="B", help="of a step; a microbatch is what was profiled")
    sub.add_argument("--schemes", type=_searched, metavar="NAME,...", help="only these; default: all that are searched")
    sub.add_argument("--json", action="store_true", help=AS_JSON)
    sub.add_argument("-o", "--output", metavar="FILE", help="the fastest schedule; - is standard output")

    sub = command("new", commands.run_new, "write a scheme of your own to begin with", "schedgen new mine")
    sub.add_argument("name", metavar="NAME", help="of the scheme; the file is NAME.py")

    command("schemes", commands.run_schemes, "the built-in schemes and their parameters", "schedgen schemes")
    return top


def cost(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, digits = part.partition("=")
        try:
            value = float(digits)
        except ValueError:
            value = 0.0
        if name in found or not 1e-12 < value < 1e12:
            raise argparse.ArgumentTypeError(
                f"'{text}': give every direction once, as in F=1,B=2, with positive numbers"
            )
        found[name] = int(value) if value.is_integer() else value
    names = next((names for names in DIRECTIONS.values() if set(names) == set(found)), None)
    if names is None:
        raise argparse.ArgumentTypeError(f"'{text}': give F and B, or F, I and W")
    return {name: found[name] for name in names}
