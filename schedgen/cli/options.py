"""The options of every subcommand of `schedgen`: a frozen dataclass for each, whose fields are its arguments."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from schedgen.compiler.options import Redone
from schedgen.ir.cost import REDO
from schedgen.ir.instructions import DIRECTIONS
from schedgen.ir.weight_versions import UPDATES
from schedgen.planner.candidates import SEARCHED
from schedgen.planner.order_search.question import BUDGET, OBJECTIVES
from schedgen.schemes import SCHEMES
from schedgen.schemes.orders import ORDERS
from schedgen.simulator.machine import Machine
from schedgen.util import option_types as types
from schedgen.util.errors import UsageError
from schedgen.util.option_fields import READ, WRITTEN, argument, option, switch

NOT_FILES = tuple(SCHEMES)  # what may be given where a FILE is read
LAYERS_GRAPH = "that of the layers in P, if the schedule was planned with one; - is standard input"
_MACHINE_FIELDS = ("alpha", "beta", "activation", "weight", "saved")  # those that are options


def costs(text: str) -> dict[str, float]:
    """A type for argparse: the duration of every direction, as in F=1,B=2, and R, that of a RECOMPUTE."""
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, digits = part.partition("=")
        try:
            value = float(digits)
        except ValueError:
            value = 0.0
        if name in values or not (1e-12 < value < 1e12 or (name == REDO and value == 0)):
            raise argparse.ArgumentTypeError(
                f"'{text}': give every direction once, as in F=1,B=2, with positive numbers"
            )
        values[name] = int(value) if value.is_integer() else value
    known = (*DIRECTIONS.values(), ("F", "B", "I", "W"))
    names = next((names for names in known if set(names) == set(values) - {REDO}), None)
    if names is None:
        raise argparse.ArgumentTypeError(f"'{text}': give F and B, or F, I and W, or all four, or F of forwards alone")
    return {name: values[name] for name in (*names, *({REDO} & set(values)))}


def searched_schemes(text: str) -> list[str]:
    """A type for argparse: names of schemes that `plan` searches, as in 1f1b,gpipe."""
    names = text.split(",")
    for name in names:
        if name not in SEARCHED:
            raise argparse.ArgumentTypeError(f"'{name}' is none of {', '.join(SEARCHED)}")
    return names


@dataclass(frozen=True)
class InputFile:
    """The schedule that a command reads."""

    file: str = argument("FILE", "a schedule; - is standard input")


@dataclass(frozen=True)
class Form:
    """The form in which a command prints numbers."""

    json: bool = switch("--json", "print JSON")


@dataclass(frozen=True)
class CostOptions:
    """What jobs and messages cost."""

    cost: Mapping[str, float] | None = option("--cost F=1,B=2", "durations; default: those in the file", costs)
    alpha: float | None = option("--alpha T", "latency of a message, in the same unit; default: 0", types.time)
    beta: float | None = option("--beta T", "time for each byte of a message; default: 0", types.time)
    activation: int | None = option("--activation N", "bytes of an activation or its gradient; default: 1", types.count)
    weight: int | None = option("--weight N", "bytes of a stage's weights or their gradient; default: 1", types.count)
    saved: int | None = option("--saved N", "bytes a forward keeps for its backward; default: 1", types.count)
    profile: str | None = option(
        "--profile P", "JSON with all of these and more by name; times and bytes may be lists by stage", file=READ
    )
    graph: str | None = option("--graph FILE", LAYERS_GRAPH, file=READ)

    def __post_init__(self) -> None:
        """UsageError if a profile would silently override another option."""
        if self.profile is not None and len(self.given) > 1:
            raise UsageError(f"--profile has all costs: leave --{self.given[1]} out")

    @property
    def given(self) -> list[str]:
        """Which of these options were given, by name."""
        return [name for name in ("profile", "cost", *_MACHINE_FIELDS) if getattr(self, name) is not None]

    @property
    def machine(self) -> Machine:
        """Links and sizes from the options, without the profile's."""
        return Machine(**{name: getattr(self, name) for name in _MACHINE_FIELDS if getattr(self, name) is not None})


@dataclass(frozen=True)
class CompileOptions:
    """compile: a scheme, its sizes, and how it is ordered and lowered."""

    scheme: str = argument("SCHEME|FILE", f"{', '.join(SCHEMES)}, FILE.py with w and n, or torch's FILE.csv")
    stages: int | None = option("--stages S", "stages of the scheme; needed without a graph or a CSV", types.count)
    microbatches: int | None = option("--microbatches B", "microbatches of a step; needed without a CSV", types.count)
    workers: int | None = option("--workers W", "ranks; default: what the scheme needs", types.count)
    groups: int | None = option("--groups G", "groups of workers (lpp, fslpp)", types.count)
    chunks: int | None = option("--chunks V", "stages a worker (looped schemes, hanayo)", types.count)
    group: int | None = option(
        "--group N",
        "microbatches that pass a stage in turn (interleaved-1f1b), or of an update (pipedream-2bw)",
        types.count,
    )
    replicas: Sequence[int] | None = option(
        "--replicas R,R,...", "workers of each stage (1f1b-rr, pipedream, pipedream-2bw)", types.counts
    )
    shards: Sequence[int] | None = option(
        "--shards K", "parts of the weights of a stage (K,K,...: of each), each on the next worker; default: 1",
        types.counts,
    )  # fmt: skip
    tensor: int = option("--tensor T", "slices of every stage, each on a worker; default: 1", types.count, 1)
    mode: str | None = option("--mode", "what n means; default: the scheme's own", choices=("greedy", "strict"))
    n: str | None = option("--n", "which job goes first; default: the scheme's own order", choices=tuple(ORDERS))
    cost: Mapping[str, float] | None = option(
        "--cost F=1,B=2", "durations that greedy orders by; default: F=1,B=2 or F=1,I=1,W=1", costs
    )
    weight_slots: int = option("--weight-slots K", "foreign weight copies held at a time; default: 2", types.count, 2)
    fan_out: int = option("--fan-out K", "copies of a stage one worker sends, others relay; default: 2", types.count, 2)
    prefetch: int = option("--prefetch K", "how many jobs earlier receives are posted; default: 1", types.natural, 1)
    recompute: str | Sequence[Redone] = option(
        "--recompute all|except-last|S,S.B,...",
        "forwards redone before their backward: of a stage, of a stage and a microbatch, or of all microbatches "
        "but the last; default: none",
        types.redone,
        (),
    )
    memory_limit: int | None = option(
        "--memory-limit M", "saved forwards a worker may hold (greedy); default: no limit", types.count
    )
    graph: str | None = option(
        "--graph FILE",
        "a model's graph, written by mpirun graph: stages, edges, ties and more; - is standard input",
        file=READ,
    )
    forward: bool = switch("--forward", "forwards alone, for evaluation and prediction, on the workers of training")
    updates: str | None = option(
        "--updates",
        "when weights change: once a list (flush), after every microbatch with stashed versions (stash) or with "
        "vertical sync (vertical), or after every few with two versions (2bw); default: the scheme's own",
        choices=tuple(UPDATES),
    )
    dump_passes: str | None = option("--dump-passes DIR", "a new folder for the list after each pass of compiling")
    output: str = option("-o --output FILE", "the schedule; - is standard output", required=True, file=WRITTEN)


@dataclass(frozen=True)
class CheckOptions:
    """check: the schedules to prove."""

    files: Sequence[str] = argument("FILE", "a schedule; - is standard input", nargs="+")


@dataclass(frozen=True)
class SealOptions:
    """seal: the schedule to write again."""

    file: str = argument("FILE", "a schedule, rewritten in place; - reads standard input and writes standard output")


@dataclass(frozen=True)
class StatsOptions(Form, InputFile):
    """stats: a schedule, and what its jobs take."""

    cost: Mapping[str, float] | None = option(
        "--cost F=1,B=2", "durations; default: those in the file", costs, group="costs"
    )
    profile: str | None = option(
        "--profile P", "JSON with durations and bytes; also gives the memory a worker needs", group="costs", file=READ
    )
    graph: str | None = option("--graph FILE", LAYERS_GRAPH, file=READ)
    measured: str | None = option(
        "--measured TRACE", "an mpirun --trace file: print the seconds of that run", group="costs", file=READ
    )


@dataclass(frozen=True)
class SimulateOptions(Form, CostOptions, InputFile):
    """simulate: a schedule, its costs, and where its trace goes."""

    trace: str | None = option("--trace OUT", "Chrome trace events, for Perfetto", file=WRITTEN)
    measured: str | None = option("--measured TRACE", "durations of an mpirun --trace file; OUT gets both", file=READ)


@dataclass(frozen=True)
class DrawOptions(CostOptions, InputFile):
    """draw: one or two schedules, their costs, and what the picture looks like."""

    other: str | None = argument("FILE2", "another schedule, drawn below on the same time axis", nargs="?")
    output: str | None = option(
        "-o --output OUT", "OUT.svg, OUT.png or OUT.html; default: in the terminal", file=WRITTEN
    )
    by: str | None = option(
        "--by", "what colours show; default: the microbatch, or the stage where a worker has several",
        choices=("microbatch", "stage"),
    )  # fmt: skip
    transfers: bool = switch("--transfers", "messages as arrows (in OUT.html: initially shown)")
    measured: str | None = option("--measured TRACE", "an mpirun --trace file, drawn above its simulation", file=READ)


@dataclass(frozen=True)
class ExportOptions(CostOptions, InputFile):
    """export: a schedule, its costs, and the form it is written in."""

    to: str = option(
        "--to",
        "chrome: simulated events, for Perfetto; chakra: MLCommons Chakra traces, one per rank; csv: torch's actions",
        required=True,
        choices=("chrome", "chakra", "csv"),
    )
    output: str = option("-o --output OUT", "- is standard output", required=True, file=WRITTEN)


@dataclass(frozen=True)
class DiffOptions:
    """diff: the two schedules."""

    a: str = argument("A", "a schedule; - is standard input")
    b: str = argument("B", "another schedule, compiled or edited later")


@dataclass(frozen=True)
class CompareOptions(Form):
    """compare: schemes besides the built-in ones, and the sizes, durations and limit that all are compiled for."""

    files: Sequence[str] = argument(
        "FILE", "FILE.py with w and n, or torch's FILE.csv: shown beside all built-in schemes", nargs="*"
    )
    stages: int = option("--stages S", "stages of the model", types.count, required=True)
    microbatches: int = option("--microbatches B", "microbatches of a step", types.count, required=True)
    workers: int = option("--workers W", "ranks", types.count, required=True)
    memory_limit: int | None = option(
        "--memory-limit M", "saved forwards a worker may hold; default: no limit", types.count
    )
    cost: Mapping[str, float] | None = option("--cost F=1,B=2", "durations; I and W default to half of B", costs)
    output: str | None = option(
        "-o --output OUT.svg", "a plot of latency against memory; - is standard output", file=WRITTEN
    )


@dataclass(frozen=True)
class PlanOptions(Form):
    """plan: what layers cost, the machine, and what is searched."""

    profile: str = argument(
        "PROFILE",
        "layers and their costs: PipeDream's file, or mpirun profile's, where stages are layers; - is standard input",
    )
    graph: str | None = option(
        "--graph FILE", "the layers' graph, written by mpirun graph: edges and ties; - is standard input", file=READ
    )
    workers: int | None = option("--workers W", "ranks; this or --topology is needed", types.count)
    topology: Sequence[int] | None = option(
        "--topology 4x4", "workers in a group, groups in a group of the next level, and so on", types.topology
    )
    bandwidth: Sequence[float] | None = option(
        "--bandwidth 1e10,1.25e9", "bytes a second of links, by level; default: the profile's", types.bandwidths
    )
    memory: float = option("--memory BYTES", "bytes that a worker may hold; default: no limit", types.amount, math.inf)
    partition_only: bool = switch(
        "--partition-only", "only where to cut, and replicas, without a search; with -o PipeDream's own schedule"
    )
    microbatches: int | None = option("--microbatches B", "microbatches of a step, each as profiled", types.count)
    schemes: Sequence[str] | None = option(
        "--schemes NAME,...", "search only these schemes; default: all that plan knows", searched_schemes
    )
    search: int = option(
        "--search N",
        "also search for orders; N is the work for each placement: millions of job start times computed",
        types.count,
        0,
    )
    output: str | None = option("-o --output FILE", "the fastest schedule; - is standard output", file=WRITTEN)


@dataclass(frozen=True)
class SearchOptions(Form, CostOptions):
    """search: a placement and its sizes, what jobs cost, and what an order must keep to."""

    scheme: str = argument("SCHEME|FILE", "whose placement is used: a built-in scheme, or FILE.py with w and n")
    stages: int | None = option("--stages S", "stages of the scheme; needed unless a graph says it", types.count)
    microbatches: int = option("--microbatches B", "microbatches of a step", types.count, required=True)
    workers: int | None = option("--workers W", "ranks; default: what the scheme needs", types.count)
    chunks: int | None = option("--chunks V", "stages a worker (looped schemes, hanayo)", types.count)
    groups: int | None = option("--groups G", "groups of workers (lpp)", types.count)
    cost: Mapping[str, float] | None = option(
        "--cost F=1,B=2", "durations; default: F=1,B=2 or, if the scheme splits backwards, F=1,I=1,W=1", costs
    )
    graph: str | None = option(
        "--graph FILE", "a model's graph, written by mpirun graph: stages, edges, ties and layers; - is standard input",
        file=READ,
    )  # fmt: skip
    memory_limit: int | None = option(
        "--memory-limit M", "saved forwards a worker may hold, until the end of W; default: no limit", types.count,
        group="memory",
    )  # fmt: skip
    memory: float | None = option(
        "--memory BYTES", "bytes a worker may need, as simulate counts them (peak_bytes)", types.amount, group="memory"
    )
    objective: str = option(
        "--objective",
        "what to minimize: latency; or window, the longest time from a worker's first job to the end of its last; "
        "default: latency",
        choices=OBJECTIVES, default="latency",
    )  # fmt: skip
    recompute: bool = switch("--recompute", "redo forwards where that lets an order within the memory end sooner")
    budget: int = option(
        "--budget N", f"the work: millions of job start times computed; default: {BUDGET}", types.count, BUDGET
    )
    output: str | None = option("-o --output FILE", "the schedule; - is standard output", file=WRITTEN)


@dataclass(frozen=True)
class NewOptions:
    """new: the scheme to begin with."""

    name: str = argument("NAME", "name of the scheme; the file is NAME.py", file="")


@dataclass(frozen=True)
class SchemesOptions:
    """The options of `schemes`: none."""
