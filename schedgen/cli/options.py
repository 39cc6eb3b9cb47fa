"""The options of every subcommand of `schedgen`: a frozen dataclass for each, whose fields are its arguments."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from schedgen.compiler.options import Options
from schedgen.ir.cost import read_cost
from schedgen.ir.transport import NAMES
from schedgen.planner.candidates import SEARCHED
from schedgen.planner.order_search.question import BUDGET, OBJECTIVES
from schedgen.schemes import SCHEMES
from schedgen.simulator.machine import Machine
from schedgen.simulator.machine_file import read_network
from schedgen.simulator.network import Alpha, Network, topology
from schedgen.util.errors import UsageError
from schedgen.util.option_fields import (
    READ,
    WRITTEN,
    Number,
    amount,
    argument,
    count,
    duration,
    listed,
    natural,
    option,
    switch,
)

LAYERS_GRAPH = "that of the layers in P, if the schedule was planned with one; - is standard input"
MODEL_GRAPH = "a model's graph, written by mpirun graph: stages, edges, ties and more; - is standard input"
LIMIT = "saved forwards a worker may hold; default: no limit"
SCHEDULE = "the schedule; - is standard output"
SCHEDULE_FILE = "a schedule, or torch's FILE.csv; - is standard input"
TRANSPORTS = f"mpi, or in-order:{{{','.join(NAMES)},FILE}}, the last a JSON file of communicators, perhaps with +batch"
BANDWIDTH = Number("a bandwidth of at least 1e-18 bytes a second", float, 1e-18, 1e18)
SLOWER = Number("a factor of at least 1", float, 1, 1e6)
_MACHINE_FIELDS = ("alpha", "beta", "activation", "weight", "saved")  # those that are options
JOINED = ("machine", "topology")  # options that say what joins devices


def searched_schemes(text: str) -> list[str]:
    """A type for argparse: names of schemes that `plan` searches, as in 1f1b,gpipe."""
    names = text.split(",")
    if wrong := [name for name in names if name not in SEARCHED]:
        raise argparse.ArgumentTypeError(f"'{wrong[0]}' is none of {', '.join(SEARCHED)}")
    return names


def slowed(text: str) -> tuple[tuple[int, float], ...]:
    """A type for argparse: ranks, and how many times as long they take, as in 0=1.3,5=2."""
    parts = [part.partition("=") for part in text.split(",")]
    try:
        return tuple((natural(rank), SLOWER(times)) for rank, _, times in parts)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"'{text}' should be as 0=1.3: {error}") from None


def by(text: str) -> tuple[int, int]:
    """A type for argparse: two numbers, as in 4x8."""
    try:
        first, second = map(count, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' should be hosts x devices, as in 4x8") from None
    return first, second


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """The schedule that a command reads."""

    file: str = argument("FILE", SCHEDULE_FILE)


@dataclass(frozen=True, kw_only=True)
class Form:
    """The form in which a command prints numbers."""

    json: bool = switch("--json", "print JSON")


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """Which devices share a host."""

    machine: str | None = option("--machine FILE", "JSON of hosts, devices and links, by mpirun machine", file=READ)
    topology: tuple[int, int] | None = option(
        "--topology HxD", "H hosts of D devices, short for a machine file", by, without="machine"
    )

    def joined(self, alphas: Sequence[Alpha], betas: Sequence[float]) -> Network | None:
        """The network of the machine file, or of the topology with these alphas and betas; None: neither is given."""
        if self.machine is not None:
            return read_network(self.machine)
        return None if self.topology is None else topology(*self.topology, alphas, betas)


@dataclass(frozen=True, kw_only=True)
class MachineOptions(HostOptions):
    """The machine: its hosts and devices, and what joins them."""

    topology: tuple[int, int] | None = option(
        "--topology HxD", "the whole machine: H hosts of D devices", by, needs="bandwidth", without="machine"
    )
    bandwidth: Sequence[float] | None = option(
        "--bandwidth BYTES", "bytes a second of a link or, with --topology, inside,between hosts", listed(BANDWIDTH),
        without="machine",
    )  # fmt: skip

    def network(self, measured: Network) -> Network | None:
        """The network that these options describe; None: none. A topology has the alphas of the `measured` one."""
        bandwidth = self.bandwidth or ()
        if len(bandwidth) > (2 if self.topology and self.topology[0] > 1 else 1):
            raise UsageError("--bandwidth: give one number or, with a --topology of several hosts, inside,between")
        alphas = measured.levels[0].alpha, measured.levels[-1].alpha
        return self.joined(alphas, [1 / each for each in bandwidth])


@dataclass(frozen=True, kw_only=True)
class CostOptions(MachineOptions):
    """What jobs and messages cost."""

    cost: Mapping[str, float] | None = option("--cost F=1,B=2", "durations; default: those in the file", read_cost)
    alpha: float | None = option("--alpha T", "latency of a message, in the same unit; default: 0", duration)
    beta: float | None = option("--beta T", "time for each byte of a message; default: 0", duration)
    activation: int | None = option("--activation N", "bytes of an activation or its gradient; default: 1", count)
    weight: int | None = option("--weight N", "bytes of a stage's weights or their gradient; default: 1", count)
    saved: int | None = option("--saved N", "bytes a forward keeps for its backward; default: 1", count)
    profile: str | None = option("--profile P", "JSON with all of these and more, also by stage", file=READ)
    graph: str | None = option("--graph FILE", LAYERS_GRAPH, file=READ, needs="profile")

    def __post_init__(self) -> None:
        """UsageError if a profile would silently override another option."""
        if self.profile is not None and (other := [name for name in self.given[1:] if name not in JOINED]):
            raise UsageError(f"--profile has all costs: leave --{other[0]} out")
        if self.bandwidth is not None and (self.topology is None or self.beta is not None):
            raise UsageError("--bandwidth is that of a --topology: give one, as 1xW for one host, or give --beta")
        if self.machine is not None and (given := [name for name in self.given if name in ("alpha", "beta")]):
            raise UsageError(f"--machine has the links' times: leave --{given[0]} out")

    @property
    def given(self) -> list[str]:
        """Which of these options were given, by name."""
        return [name for name in ("profile", "cost", *_MACHINE_FIELDS, *JOINED) if getattr(self, name) is not None]

    @property
    def amounts(self) -> Machine:
        """Links and sizes from the options, without the profile's and the machine file's."""
        return Machine(**{name: getattr(self, name) for name in _MACHINE_FIELDS if getattr(self, name) is not None})


@dataclass(frozen=True, kw_only=True)
class SizeOptions:
    """The sizes that every command which compiles schemes takes."""

    stages: int | None = option("--stages S", "stages of the scheme; needed unless a graph or a CSV says it", count)
    microbatches: int | None = option("--microbatches B", "microbatches of a step; needed unless a CSV says it", count)
    workers: int | None = option("--workers W", "ranks; default: what the scheme needs", count)


@dataclass(frozen=True, kw_only=True)
class LoopOptions(SizeOptions):
    """Sizes, with those of placements that go round the workers."""

    groups: int | None = option("--groups G", "groups of workers (lpp, fslpp)", count)
    chunks: int | None = option("--chunks V", "stages a worker (looped schemes, hanayo)", count)


@dataclass(frozen=True, kw_only=True)
class CompileOptions(Options, LoopOptions, HostOptions):
    """compile: a scheme, its sizes, and how it is ordered and lowered."""

    scheme: str = argument("SCHEME|FILE", f"{', '.join(SCHEMES)}, FILE.py with w and n, or torch's FILE.csv")
    group: int | None = option("--group N", "microbatches in turn (interleaved-1f1b), or of an update (2bw)", count)
    replicas: int | Sequence[int] | None = option(
        "--replicas R", "replicas of the scheme, on W / R workers each; R,R,...: workers of each stage (1f1b-rr, ...)",
        lambda text: listed(count)(text) if "," in text else count(text),
    )  # fmt: skip
    interleave: bool = switch("--interleave", "replica r has ranks r, r+R, ...; default: consecutive ones", "replicas")
    shards: Sequence[int] | None = option(
        "--shards K", "shards of the weights of a stage (K,K,...: of each), each on the next worker; default: 1",
        listed(count),
    )  # fmt: skip
    graph: str | None = option("--graph FILE", MODEL_GRAPH, file=READ)
    profile: str | None = option(
        "--profile P", "JSON with durations by stage, in place of --cost", file=READ, without="cost"
    )
    dump_passes: str | None = option("--dump-passes DIR", "a new folder for the list after each pass of compiling")
    transport: str = option("--transport T", f"the list is safe on it, too: {TRANSPORTS}", default="mpi")
    output: str = option("-o --output FILE", SCHEDULE, required=True, file=WRITTEN)


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """check: the schedules to prove."""

    files: Sequence[str] = argument("FILE", SCHEDULE_FILE, nargs="+")
    transport: str = option("--transport T", f"what delivers messages: {TRANSPORTS}", default="mpi")


@dataclass(frozen=True, kw_only=True)
class RepairOptions(CostOptions, InputFile):
    """repair: a schedule, the transport it is to be safe on, and what its jobs and messages cost."""

    transport: str | None = option("--transport T", TRANSPORTS, group="remedy")
    fewest: bool = switch("--fewest", "move nothing: find few communicators that make it safe as it is")
    output: str | None = option("-o --output FILE", f"{SCHEDULE}; with --fewest the communicators", file=WRITTEN)


@dataclass(frozen=True, kw_only=True)
class SealOptions:
    """seal: the schedule to write again."""

    file: str = argument("FILE", "a schedule, rewritten in place; - reads standard input and writes standard output")


@dataclass(frozen=True, kw_only=True)
class StatsOptions(Form, InputFile):
    """stats: a schedule, and what its jobs take."""

    cost: Mapping[str, float] | None = option(
        "--cost F=1,B=2", "durations; default: those in the file", read_cost, group="costs"
    )
    profile: str | None = option("--profile P", "JSON with durations and bytes", group="costs", file=READ)
    graph: str | None = option("--graph FILE", LAYERS_GRAPH, file=READ, needs="profile")
    measured: str | None = option("--measured TRACE", "an mpirun --trace file, in seconds", group="costs", file=READ)
    memory: bool = switch("--memory", "what each rank holds at its peak, and what lowers the highest, at what cost")
    machine: str | None = option("--machine FILE", "with --memory: JSON of hosts and links", file=READ, needs="memory")


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(Form, CostOptions, InputFile):
    """simulate: a schedule, its costs, and where its trace goes."""

    slow: Sequence[tuple[int, float]] = option("--slow RANK=X,...", "ranks that take X times as long", slowed, ())
    trace: str | None = option("--trace OUT", "Chrome trace events, for Perfetto", file=WRITTEN)
    measured: str | None = option("--measured TRACE", "durations of an mpirun --trace file; OUT gets both", file=READ)


@dataclass(frozen=True, kw_only=True)
class DrawOptions(CostOptions, InputFile):
    """draw: one or two schedules, their costs, and what the picture looks like."""

    other: str | None = argument("FILE2", "another schedule, drawn below on the same time axis", nargs="?")
    output: str | None = option("-o --output OUT", "OUT.svg, .png or .html; default: in the terminal", file=WRITTEN)
    by: str | None = option(
        "--by", "what colours show; default: stage, if a worker has several", choices=("microbatch", "stage")
    )
    transfers: bool = switch("--transfers", "messages as arrows (in OUT.html: initially shown)", needs="output")
    links: bool = switch("--links", "rows for the links and cards that messages and sums occupy", needs="output")
    measured: str | None = option("--measured TRACE", "an mpirun --trace file, drawn above its simulation", file=READ)


@dataclass(frozen=True, kw_only=True)
class ExportOptions(CostOptions, InputFile):
    """export: a schedule, its costs, and the form it is written in."""

    to: str = option(
        "--to", "chakra: MLCommons' traces, one per rank; torch: torch's list (compute_comms); "
        "torch-jobs: its jobs alone (compute_only)",
        required=True, choices=("chakra", "torch", "torch-jobs"),
    )  # fmt: skip
    output: str = option("-o --output OUT", "- is standard output", required=True, file=WRITTEN)


@dataclass(frozen=True, kw_only=True)
class DiffOptions:
    """diff: the two schedules."""

    a: str = argument("A", SCHEDULE_FILE)
    b: str = argument("B", "another schedule, compiled or edited later")
    jobs: bool = switch("--jobs", "the order of jobs on every rank, in place of all instructions")


@dataclass(frozen=True, kw_only=True)
class CompareOptions(Form, CostOptions):
    """compare: schemes besides the built-in ones, and the sizes, durations and limit that all are compiled for."""

    files: Sequence[str] = argument(
        "FILE", "FILE.py with w and n, or torch's FILE.csv: shown beside all built-in schemes", nargs="*"
    )
    stages: int = option("--stages S", "stages of the model", count, required=True)
    microbatches: int = option("--microbatches B", "microbatches of a step", count, required=True)
    workers: int = option("--workers W", "ranks", count, required=True)
    replicas: int | None = option("--replicas R", "replicas of every scheme, each on W / R workers", count)
    memory_limit: int | None = option("--memory-limit M", LIMIT, count)
    cost: Mapping[str, float] | None = option("--cost F=1,B=2", "durations; I and W default to half of B", read_cost)
    graph: None = None  # schemes are compared on a chain of stages


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Form, MachineOptions):
    """plan: what layers cost, the machine, and what is searched."""

    profile: str = argument("PROFILE", "layers and costs: PipeDream's, or mpirun profile's; - is standard input")
    graph: str | None = option("--graph FILE", MODEL_GRAPH, file=READ)
    workers: int = option("--workers W", "ranks", count, required=True)
    memory: float = option(
        "--memory BYTES", "bytes a worker may hold, at most its device's; default: these", amount, math.inf
    )
    partition_only: bool = switch("--partition-only", "only where to cut, and replicas")
    microbatches: int | None = option("--microbatches B", "microbatches of a step, each as profiled", count)
    schemes: Sequence[str] | None = option(
        "--schemes NAME,...", "only these; default: all", searched_schemes, without="partition_only"
    )
    search: int = option(
        "--search N", "also search for orders, with N millions of job start times each", count, 0,
        without="partition_only",
    )  # fmt: skip
    output: str | None = option("-o --output FILE", SCHEDULE, file=WRITTEN, without="partition_only")


@dataclass(frozen=True, kw_only=True)
class SearchOptions(Form, CostOptions, LoopOptions):
    """search: a placement and its sizes, what jobs cost, and what an order must keep to."""

    scheme: str = argument("SCHEME|FILE", "whose placement is used: a built-in scheme, or FILE.py with w and n")
    microbatches: int = option("--microbatches B", "microbatches of a step", count, required=True)
    cost: Mapping[str, float] | None = option(
        "--cost F=1,B=2", "durations; default: F=1,B=2 or, if the scheme splits backwards, F=1,I=1,W=1", read_cost
    )
    graph: str | None = option("--graph FILE", MODEL_GRAPH, file=READ)
    memory_limit: int | None = option("--memory-limit M", LIMIT, count, group="memory")
    memory: float | None = option("--memory BYTES", "bytes a worker may need (peak_bytes)", amount, group="memory")
    objective: str = option(
        "--objective", "what is minimized; window: from a worker's first job to the end of its last",
        default="latency", choices=OBJECTIVES,
    )  # fmt: skip
    recompute: bool = switch("--recompute", "redo forwards where that lets an order within the memory end sooner")
    offload: bool = switch("--offload", "have what forwards save in host memory where that lets one end sooner")
    budget: int = option("--budget N", "the work: millions of job start times computed", count, BUDGET)
    output: str | None = option("-o --output FILE", SCHEDULE, file=WRITTEN)


@dataclass(frozen=True, kw_only=True)
class NewOptions:
    """new: the scheme to begin with."""

    name: str = argument("NAME", "name of the scheme; the file is NAME.py", file="")


@dataclass(frozen=True, kw_only=True)
class SchemesOptions:
    """The options of `schemes`: none."""
