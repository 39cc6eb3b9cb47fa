"""The `schedgen` command: parses, calls, prints.

Exit codes: 0 done; 1 the file is refused, or the two files differ; 2 wrong
usage, or sizes and functions that make no schedule. An error is one sentence
on stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import schedgen
from schedgen.actions import read_actions, write_actions
from schedgen.chakra import chakra
from schedgen.check import check
from schedgen.compare import as_json, compare
from schedgen.compare import table as side_by_side
from schedgen.compile import compile_scheme
from schedgen.cost import Amount, Machine, read_profile
from schedgen.diff import coloured, diff
from schedgen.draw import Scene, scene, terminal
from schedgen.draw.page import page
from schedgen.errors import RefusedFile, SlowScheme, UsageError, one_line
from schedgen.events import MEASURED, SIMULATED, Timeline, events, simulated, trace
from schedgen.file import parse, read, whole, write
from schedgen.measured import measured, read_trace
from schedgen.new import new
from schedgen.places import measured as bytes_of
from schedgen.plan import words
from schedgen.plan.cuts import cuts
from schedgen.plan.partition import hierarchy, partition
from schedgen.plan.profile import read_layers
from schedgen.plan.search import search
from schedgen.plot import plot
from schedgen.program import DIRECTIONS, Program
from schedgen.progress import allow
from schedgen.scheme import Scheme, Sizes
from schedgen.schemes import SCHEMES, describe, load
from schedgen.schemes.orders import ORDERS
from schedgen.simulate import Simulation, report, simulate
from schedgen.stats import stats, summary, table


def main(arguments: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file name may hold anything
    options = _parser().parse_args(arguments)
    allow(options.quiet)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except (UsageError, RefusedFile) as error:
        print(f"schedgen: {one_line(error)}", file=sys.stderr)
        return error.code
    except BrokenPipeError:  # the reader of our output has gone, as in `schedgen stats F | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except OSError as error:
        name = error.filename or getattr(options, "output", None) or "standard output"
        print(f"schedgen: {one_line(name)}: {error.strerror}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, MemoryError) as error:
        print(f"schedgen: {type(error).__name__}", file=sys.stderr)
        return 130 if isinstance(error, KeyboardInterrupt) else 1


def checked(name: str) -> Program:
    """The program in file `name` (-: standard input), proved right."""
    with contextlib.ExitStack() as stack:
        source = sys.stdin.buffer if name == "-" else stack.enter_context(Path(name).open("rb"))
        label = "<stdin>" if name == "-" else name
        program, fault = read(source, label)
    check(program, label)
    if fault:
        raise RefusedFile(fault)
    return program


def _scheme(options: argparse.Namespace) -> tuple[Scheme, Sizes]:
    """The scheme to compile, and for what sizes: a CSV file has its own."""
    given = {name: getattr(options, name) for name in Sizes._fields}
    if not options.scheme.endswith(".csv"):
        for name in ("stages", "microbatches"):
            if given[name] is None:
                raise UsageError(f"compile needs --{name} (see schedgen compile --help)")
        sizes = Sizes(**given)
        return load(options.scheme, sizes), sizes
    scheme, sizes = read_actions(_bytes(options.scheme).decode(errors="replace"), options.scheme)
    for name, value in given.items():
        if value not in (None, getattr(sizes, name)):
            raise UsageError(f"{options.scheme} has its own sizes: leave --{name} {value} out")
    return scheme, sizes


def _compile(options: argparse.Namespace) -> int:
    scheme, sizes = _scheme(options)
    recompute = range(sizes.stages) if options.recompute == "all" else options.recompute
    with warnings.catch_warnings(record=True) as slow:
        warnings.simplefilter("always", SlowScheme)
        program = compile_scheme(
            scheme,
            sizes,
            options.mode,
            options.n,
            options.cost,
            options.weight_slots,
            options.fan_out,
            options.prefetch,
            recompute,
            options.memory_limit,
            options.tied,
        )
    check(program, "internal error, the compiled schedule")
    with output(options.output) as out:
        write(program, out)
    for warning in slow:
        if issubclass(warning.category, SlowScheme):
            print(f"schedgen: note: {warning.message}", file=sys.stderr)
    return 0


def _check(options: argparse.Namespace) -> int:
    for name in options.files:
        program = checked(name)
        header = program.header
        print(
            f"{name}: {header.scheme['name']}, {header.workers} workers, {len(program)} instructions: "
            "every job once, no deadlock, every gradient at every owner"
        )
    return 0


def _seal(options: argparse.Namespace) -> int:
    try:
        text = _bytes(options.file).decode()
    except UnicodeDecodeError as error:
        raise RefusedFile(f"{options.file}: not text: byte {error.start}") from None
    program = parse(text, options.file)
    with output(options.file) as out:
        write(program, out)
    return 0


def _bytes(name: str) -> bytes:
    if name == "-":
        return whole(sys.stdin.buffer, name)
    with Path(name).open("rb") as source:
        return whole(source, name)


def _stats(options: argparse.Namespace) -> int:
    program = checked(options.file)
    if options.measured:
        numbers = measured(program, _measured(options, program))
        shown = {key: value for key, value in numbers.items() if key != "profile"}
        print(json.dumps(numbers, indent=1) if options.json else summary(shown))
        return 0
    cost, machine = _profile(options, program) if options.profile else (options.cost, None)
    numbers = stats(program, cost, machine)
    print(json.dumps(numbers, indent=1) if options.json else table(numbers))
    return 0


def _measured(options: argparse.Namespace, program: Program) -> list[Timeline]:
    return read_trace(_bytes(options.measured).decode(errors="replace"), options.measured, program)


class _Plan(NamedTuple):
    """A schedule executed with the costs that a command was given."""

    program: Program
    run: Simulation
    machine: Machine
    walks: list[Timeline]  # of --measured
    seconds: bool  # whether the simulation's time is in seconds

    @property
    def timeline(self) -> Timeline:
        """The simulation's, in microseconds where it is in seconds."""
        return simulated(self.program, self.run, 1e6 if self.seconds else 1.0)


def _plan(options: argparse.Namespace, name: str) -> _Plan:
    program = checked(name)
    cost, machine = _costs(options, program)
    walks = _measured(options, program) if options.measured else []
    if walks and not (options.cost or options.profile):
        times = measured(program, walks)["profile"]
        cost, machine = times, machine._replace(step=times.pop("step"))
    seconds = bool(options.profile or (walks and not options.cost))
    return _Plan(program, simulate(program, cost, machine), machine, walks, seconds)


def _simulate(options: argparse.Namespace) -> int:
    plan = _plan(options, options.file)
    if options.trace:
        found = events(plan.program, [plan.timeline], SIMULATED)
        found += events(plan.program, plan.walks, MEASURED) if plan.walks else []
        with output(options.trace) as out:
            out.write(trace(found))
    numbers = report(plan.program, plan.run)
    print(json.dumps(numbers, indent=1) if options.json else summary(numbers))
    return 0


def _costs(options: argparse.Namespace, program: Program) -> tuple[Mapping[str, Amount], Machine]:
    """Durations and machine of the options that `_add_costs` makes."""
    if options.profile:
        return _profile(options, program)
    machine = Machine(options.alpha, options.beta, options.activation, options.weight, options.saved)
    return options.cost or program.header.cost, machine


def _draw(options: argparse.Namespace) -> int:
    if options.other and options.measured:
        raise UsageError("--measured belongs to one schedule: give a single FILE")
    form = Path(options.output).suffix if options.output else None
    if form not in (None, ".svg", ".png", ".html"):
        raise UsageError(f"{options.output}: the name should end in .svg, .png or .html")
    scenes = _scenes(options, [name for name in (options.file, options.other) if name])
    if form is None:
        terminal.show(scenes, options.by)
    elif form == ".html":
        with output(options.output) as out:
            out.write(page(scenes, options.by, options.transfers))
    else:
        from schedgen.draw.figure import figure

        with output(options.output) as out:
            figure(scenes, out, form[1:], options.by, options.transfers)
    return 0


def _scenes(options: argparse.Namespace, names: Sequence[str]) -> list[Scene]:
    """What there is to draw of every file; what was measured comes before its simulation."""
    files = ["standard input" if name == "-" else one_line(Path(name).name) for name in names]
    scenes = []
    for name, file in zip(names, files, strict=True):
        label = Path(file).stem if len(set(files)) == len(files) else one_line(name)
        plan = _plan(options, name)
        sizes = bytes_of(plan.machine, plan.program.header.stages)
        if plan.walks:
            scenes.append(scene("measured", file, plan.program, plan.walks[-1], sizes, seconds=True))
            label = "simulated"
        scenes.append(scene(label, file, plan.program, plan.timeline, sizes, plan.seconds or bool(plan.walks)))
    return scenes


def _profile(options: argparse.Namespace, program: Program) -> tuple[dict[str, Amount], Machine]:
    text = _bytes(options.profile).decode(errors="replace")
    return read_profile(text, options.profile, program.header.stages)


def _export(options: argparse.Namespace) -> int:
    program = checked(options.file)
    cost, machine = _costs(options, program)
    unit = 1e6 if options.profile else 1.0
    files: Iterable[tuple[str, bytes]]
    if options.to == "csv":
        files = [("", write_actions(program).encode())]
    elif options.to == "chrome":
        found = events(program, [simulated(program, simulate(program, cost, machine), unit)], SIMULATED)
        files = [("", trace(found))]
    elif options.output == "-":
        raise UsageError("Chakra traces are several files, so -o is how their names begin, and not -")
    else:
        files = chakra(program, cost, machine, unit)
    for end, data in files:
        with output(options.output + end) as out:
            out.write(data)
    return 0


def _diff(options: argparse.Namespace) -> int:
    lines = diff(checked(options.a), checked(options.b), one_line(options.a), one_line(options.b))
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        lines = coloured(lines)
    differ = 0
    for line in lines:
        differ = 1
        print(line)
    return differ


def _compare(options: argparse.Namespace) -> int:
    sizes = Sizes(options.stages, options.microbatches, options.workers)
    found = compare(sizes, options.cost, options.memory)
    if not found.rows:
        raise UsageError("no scheme fits: " + "; ".join(f"{one.scheme}: {one.reason}" for one in found.left_out))
    if options.output:
        title = f"{sizes.stages} stages, {sizes.microbatches} microbatches, {sizes.workers} workers"
        with output(options.output) as out:
            plot(found, title, out)
    if options.output != "-":
        print(json.dumps(as_json(found), indent=1) if options.json else "\n".join(side_by_side(found)))
    return 0


def _plan_model(options: argparse.Namespace) -> int:
    layers = read_layers(options.profile)
    levels = hierarchy(options.workers, options.topology, options.bandwidth, layers.machine.beta)
    if not options.partition_only and options.microbatches is None:
        raise UsageError("plan needs --microbatches B, or --partition-only (see schedgen plan --help)")
    if options.partition_only and options.output:
        raise UsageError("--partition-only makes no schedule to write to --output")
    numbers: dict[str, Any] = {}
    lines: list[str] = []
    ways = cuts(layers)
    if not ways.every:
        most = "more ways to cut the layers than can be tried: only those along one order are"
        print(f"schedgen: note: {options.profile}: {most}", file=sys.stderr)
    try:
        numbers = words.as_json(layers, ways, levels, partition(ways, levels, options.memory))
        lines += words.table(numbers)
    except UsageError as error:
        if options.partition_only:
            raise
        print(f"schedgen: note: {error}", file=sys.stderr)
    if not options.partition_only:
        found = search(layers, levels, options.microbatches, options.memory)
        numbers |= words.schedules_as_json(found)
        lines += ["", *words.schedules(found)]
        if options.output:
            check(found.program, "internal error, the compiled schedule")
            with output(options.output) as out:
                write(found.program, out)
    if options.output != "-":
        print(json.dumps(numbers, indent=1) if options.json else "\n".join(lines).lstrip("\n"))
    return 0


def _new(options: argparse.Namespace) -> int:
    print(f"{new(options.name)}: its w and n are yours to edit; its first lines say how to compile it")
    return 0


def _schemes(_: argparse.Namespace) -> int:
    print(describe())
    return 0


@contextlib.contextmanager
def output(name: str) -> Iterator[BinaryIO]:
    """Standard output for '-', else a file that appears whole or not at all."""
    if name == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(name)
    if path.exists() and not path.is_file():  # /dev/null, a pipe: nothing to rename over
        with path.open("wb") as out:
            yield out
        return
    path = path.resolve()
    try:
        handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise OSError(error.errno, error.strerror, name) from None
    try:
        with os.fdopen(handle, "wb") as out:
            yield out
        umask = os.umask(0)
        os.umask(umask)
        Path(aside).chmod(path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~umask)
        Path(aside).replace(path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


class _Parser(argparse.ArgumentParser):
    """Errors in one line: the sentence and where to read more."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {one_line(message)} (see {self.prog} --help)\n")


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value < 2**31:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1")
    return value


def _natural(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _time(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e18:
        raise argparse.ArgumentTypeError(f"'{text}' is not a time of at least 0")
    return value


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e18:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number")
    return value


def _amounts(text: str) -> list[float]:
    return [_amount(part) for part in text.split(",")]


def _topology(text: str) -> list[int]:
    return [_count(part) for part in text.split("x")]


def _stages(text: str) -> str | list[int]:
    return text if text == "all" else _tie(text)


def _tie(text: str) -> list[int]:
    return [_natural(part) for part in text.split(",")]


def _cost(text: str) -> dict[str, float]:
    cost: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = 0.0
        if name in cost or not 1e-12 < value < 1e12:
            raise argparse.ArgumentTypeError(
                f"'{text}': give every direction once, as in F=1,B=2, with positive numbers"
            )
        cost[name] = int(value) if value.is_integer() else value
    names = next((names for names in DIRECTIONS.values() if set(names) == set(cost)), None)
    if names is None:
        raise argparse.ArgumentTypeError(f"'{text}': give F and B, or F, I and W")
    return {name: cost[name] for name in names}


def _add_costs(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add("--cost", type=_cost, metavar="F=1,B=2", help="durations; default: those in the file")
    add("--alpha", type=_time, default=0.0, metavar="T", help="time a message takes, in the same unit")
    add("--beta", type=_time, default=0.0, metavar="T", help="and time each of its bytes takes")
    add("--activation", type=_count, default=1, metavar="N", help="bytes of an activation or its gradient")
    add("--weight", type=_count, default=1, metavar="N", help="bytes of a stage's weights or their gradient")
    add("--saved", type=_count, default=1, metavar="N", help="bytes a forward keeps for its backward")
    add("--profile", metavar="P", help="JSON with all of these and more by name, times and bytes also by stage")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="schedgen", description="Static schedules for distributed training, as text.")
    parser.add_argument("--version", action="version", version=f"schedgen {schedgen.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: object, summary: str, example: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=summary, description=summary, epilog=f"example: {example}")
        sub.set_defaults(run=run)
        sub.add_argument("-q", "--quiet", action="store_true", help="no progress bars on a terminal")
        return sub

    sub = command(
        "compile", _compile, "write the schedule of a scheme",
        "schedgen compile 1f1b --stages 4 --microbatches 8 -o 1f1b.json",
    )  # fmt: skip
    sub.add_argument(
        "scheme", metavar="SCHEME|FILE", help=f"{', '.join(SCHEMES)}, FILE.py with w and n, or torch's FILE.csv"
    )
    sub.add_argument("--stages", type=_count, metavar="S", help="needed, as is B, unless the file is a CSV")
    sub.add_argument("--microbatches", type=_count, metavar="B")
    sub.add_argument("--workers", type=_count, metavar="W", help="default: what the scheme needs")
    sub.add_argument("--groups", type=_count, metavar="G", help="groups of workers (lpp, fslpp)")
    sub.add_argument("--chunks", type=_count, metavar="V", help="stages a worker (looped schemes)")
    sub.add_argument("--mode", choices=("greedy", "strict"), help="what n means; default: the scheme's own")
    sub.add_argument("--n", choices=tuple(ORDERS), help="replaces the scheme's own order")
    sub.add_argument("--cost", type=_cost, metavar="F=1,B=2", help="durations that greedy orders by")
    sub.add_argument("--weight-slots", type=_count, default=2, metavar="K", help="foreign weight copies held at a time")
    add = sub.add_argument
    add("--fan-out", type=_count, default=2, metavar="K", help="copies of a stage one worker sends; others relay")
    sub.add_argument("--prefetch", type=_natural, default=1, metavar="K", help="jobs by which receives stand earlier")
    add("--recompute", type=_stages, default=(), metavar="all|S,...", help="stages that redo their forward")
    sub.add_argument("--memory-limit", type=_count, metavar="M", help="saved forwards a worker may hold (greedy)")
    add("--tied", type=_tie, action="append", default=[], metavar="S,S,...", help="stages that share parameters")
    sub.add_argument("-o", "--output", required=True, metavar="FILE", help="- is standard output")

    sub = command("check", _check, "prove schedules right, or say what is wrong", "schedgen check 1f1b.json")
    sub.add_argument("files", nargs="+", metavar="FILE")

    sub = command("seal", _seal, "re-hash and re-format a schedule edited by hand", "schedgen seal 1f1b.json")
    sub.add_argument("file", metavar="FILE")

    sub = command("stats", _stats, "latency, bubble, memory and messages", "schedgen stats 1f1b.json --json")
    sub.add_argument("file", metavar="FILE")
    sub.add_argument("--json", action="store_true")
    costs = sub.add_mutually_exclusive_group()
    costs.add_argument("--cost", type=_cost, metavar="F=1,B=2", help="durations; default: those in the file")
    costs.add_argument("--profile", metavar="P", help="JSON with durations and bytes: the memory a worker needs, too")
    costs.add_argument("--measured", metavar="TRACE", help="the seconds of a run, from what mpirun --trace wrote")

    sub = command(
        "simulate", _simulate, "execute a schedule against a cost model",
        "schedgen simulate 1f1b.json --cost F=1,B=2 --alpha 0.01 --beta 1e-9 --activation 1000000 --trace trace.json",
    )  # fmt: skip
    sub.add_argument("file", metavar="FILE")
    _add_costs(sub)
    sub.add_argument("--json", action="store_true")
    sub.add_argument("--trace", metavar="OUT", help="Chrome trace events, for Perfetto")
    sub.add_argument("--measured", metavar="TRACE", help="durations as mpirun --trace found them; OUT has both")

    sub = command(
        "draw", _draw, "a picture of a schedule, or of two on one time axis",
        "schedgen draw gpipe.json 1f1b.json --alpha 0.1 -o both.html",
    )  # fmt: skip
    sub.add_argument("file", metavar="FILE")
    sub.add_argument("other", metavar="FILE2", nargs="?", help="another schedule, drawn below on the same time axis")
    sub.add_argument("-o", "--output", metavar="OUT", help="OUT.svg, OUT.png or OUT.html; default: in the terminal")
    choices = ("microbatch", "stage")
    sub.add_argument("--by", choices=choices, default=choices[0], help="what colours say; default: the microbatch")
    sub.add_argument("--transfers", action="store_true", help="messages as arrows (in OUT.html: at first)")
    _add_costs(sub)
    sub.add_argument("--measured", metavar="TRACE", help="what mpirun --trace wrote, drawn over its simulation")

    sub = command(
        "export", _export, "write a schedule for other tools", "schedgen export 1f1b.json --to chrome -o trace.json"
    )
    sub.add_argument("file", metavar="FILE")
    sub.add_argument(
        "--to", required=True, choices=("chrome", "chakra", "csv"),
        help="events of a simulation, for Perfetto; MLCommons Chakra traces of it, one a rank; torch's compute actions",
    )  # fmt: skip
    sub.add_argument("-o", "--output", required=True, metavar="OUT", help="- is standard output")
    _add_costs(sub)

    sub = command("diff", _diff, "what changed between two schedules", "schedgen diff old.json new.json")
    sub.add_argument("a", metavar="A")
    sub.add_argument("b", metavar="B")

    sub = command(
        "compare", _compare, "all schemes that fit, side by side",
        "schedgen compare --stages 8 --microbatches 8 --workers 4 --memory 12",
    )  # fmt: skip
    sub.add_argument("--stages", type=_count, required=True, metavar="S")
    sub.add_argument("--microbatches", type=_count, required=True, metavar="B")
    sub.add_argument("--workers", type=_count, required=True, metavar="W")
    sub.add_argument("--memory", type=_count, metavar="M", help="saved forwards a worker may hold")
    sub.add_argument("--cost", type=_cost, metavar="F=1,B=2", help="durations; a split backward has half of B each")
    sub.add_argument("--json", action="store_true")
    sub.add_argument("-o", "--output", metavar="OUT.svg", help="a plot of latency against memory")

    sub = command(
        "plan", _plan_model, "where to cut a model, and the schedules that train it best",
        "schedgen plan profile.json --workers 2 --bandwidth 1.25e9 --microbatches 4 -o plan.json",
    )  # fmt: skip
    add = sub.add_argument
    add(
        "profile",
        metavar="PROFILE",
        help="layers and their costs: PipeDream's file, or mpirun profile's with a stage a layer",
    )
    add("--workers", type=_count, metavar="W")
    add("--topology", type=_topology, metavar="4x4", help="workers of a level, groups of those in the next, and so on")
    add(
        "--bandwidth",
        type=_amounts,
        metavar="1e10,1.25e9",
        help="bytes a second of links, by level; default: the profile's",
    )
    add("--memory", type=_amount, default=math.inf, metavar="M", help="bytes a worker may hold")
    add("--partition-only", action="store_true", help="only where to cut, and replicas; no search for a schedule")
    add("--microbatches", type=_count, metavar="B", help="of a step; a microbatch is what was profiled")
    add("--json", action="store_true")
    add("-o", "--output", metavar="FILE", help="the fastest schedule; - is standard output")

    sub = command("new", _new, "write a scheme of your own to begin with", "schedgen new mine")
    sub.add_argument("name", metavar="NAME", help="of the scheme; the file is NAME.py")

    command("schemes", _schemes, "the built-in schemes and their parameters", "schedgen schemes")
    return parser
