"""What each subcommand of `schedgen` does with its options: reads, calls, prints. The result is the exit code."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from schedgen.checker import check
from schedgen.checker.files import checked
from schedgen.compiler.compile import compile_scheme
from schedgen.ir.cost import Amount
from schedgen.ir.file import parse, write
from schedgen.ir.graph_file import read_dag
from schedgen.ir.program import Program
from schedgen.planner import tables
from schedgen.planner.layer_downsets import all_downsets
from schedgen.planner.layer_profile import read_layers
from schedgen.planner.partition import hierarchy, partition
from schedgen.planner.pipedream import pipedream
from schedgen.planner.search import search
from schedgen.report.chakra import chakra
from schedgen.report.chrome_trace import events, trace
from schedgen.report.compare import as_json, compare
from schedgen.report.compare import table as side_by_side
from schedgen.report.compare_plot import plot
from schedgen.report.diff import coloured, diff
from schedgen.report.draw import Scene, scene, terminal, usual
from schedgen.report.draw.colours import TRANSFER_COLOURS
from schedgen.report.draw.page import page
from schedgen.report.measured_run import measured, read_trace
from schedgen.report.torch_csv import as_torch_csv
from schedgen.schemes import describe, load
from schedgen.schemes.csv_scheme import scheme_from_csv
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.schemes.template import new
from schedgen.simulator.cost import Machine, read_profile
from schedgen.simulator.memory_plan import measured as bytes_of
from schedgen.simulator.simulate import Simulation, report, simulate
from schedgen.simulator.stats import cycles, stats, summary, table
from schedgen.simulator.timeline import MEASURED, SIMULATED, Timeline, simulated
from schedgen.util.errors import RefusedFile, SlowScheme, UsageError, one_line
from schedgen.util.files import display_name, open_output, read_bytes, read_text


def _scheme(options: argparse.Namespace) -> tuple[Scheme, Sizes]:
    """The scheme to compile, and for what sizes: a CSV file has its own."""
    given = {name: getattr(options, name) for name in Sizes._fields}
    if not options.scheme.endswith(".csv"):
        for name in ("stages", "microbatches"):
            if given[name] is None:
                raise UsageError(f"compile needs --{name} (see schedgen compile --help)")
        sizes = Sizes(**given)
        return load(options.scheme, sizes, options.tensor), sizes
    scheme, sizes = scheme_from_csv(read_text(options.scheme), options.scheme)
    for name, value in given.items():
        if value not in (None, getattr(sizes, name)):
            raise UsageError(f"{options.scheme} has its own sizes: leave --{name} {value} out")
    return scheme, sizes


def run_compile(options: argparse.Namespace) -> int:
    dag = None
    if options.graph is not None:
        dag = read_dag(read_text(options.graph), display_name(options.graph))
        if options.stages not in (None, dag.stages):
            raise UsageError(f"--stages {options.stages}: {display_name(options.graph)} has {dag.stages}")
        options.stages = dag.stages
    scheme, sizes = _scheme(options)
    if dag is not None:
        if options.parts > 1:
            raise UsageError(f"{display_name(options.graph)} says what stages read, and --parts makes chains of them")
        scheme = scheme._replace(edges=dag.edges, apart=dag.apart)
        options.tied = [*options.tied, *dag.tied]
    if options.layers is not None:
        if len(options.layers) != sizes.stages * options.parts:
            count = sizes.stages * options.parts
            raise UsageError(f"--layers has {len(options.layers)} numbers, but there are {count} stages")
        scheme = scheme._replace(parameters={**scheme.parameters, "layers": list(options.layers)})
    recompute = range(sizes.stages * options.parts) if options.recompute == "all" else options.recompute
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
            options.updates,
            options.tensor,
            options.whole,
            options.parts,
        )
    check(program, "internal error, the compiled schedule")
    with open_output(options.output) as out:
        write(program, out)
    for warning in slow:
        if issubclass(warning.category, SlowScheme):
            print(f"schedgen: note: {warning.message}", file=sys.stderr)
    return 0


def run_check(options: argparse.Namespace) -> int:
    for name in options.files:
        program = checked(name)
        header = program.header
        print(
            f"{display_name(name)}: {header.scheme['name']}, {header.workers} workers, {len(program)} instructions: "
            "every job once, no deadlock, every gradient at every owner"
        )
    return 0


def run_seal(options: argparse.Namespace) -> int:
    try:
        text = read_bytes(options.file).decode()
    except UnicodeDecodeError as error:
        raise RefusedFile(f"{display_name(options.file)}: not text: byte {error.start}") from None
    program = parse(text, display_name(options.file))
    with open_output(options.file) as out:
        write(program, out)
    return 0


def run_stats(options: argparse.Namespace) -> int:
    program = checked(options.file)
    if options.cycles and options.measured:
        raise UsageError("--cycles are those of a simulation: leave --measured out")
    if options.measured:
        numbers = measured(program, _measured(options, program))
        shown = {key: value for key, value in numbers.items() if key != "profile"}
        print(json.dumps(numbers, indent=1) if options.json else summary(shown))
        return 0
    cost, machine = _profile(options, program) if options.profile else (options.cost, None)
    if options.cycles:
        found = cycles(program, cost)
        print(json.dumps([one._asdict() for one in found]) if options.json else "\n".join(map(str, found)))
        return 0
    numbers = stats(program, cost, machine)
    print(json.dumps(numbers, indent=1) if options.json else table(numbers))
    return 0


def _measured(options: argparse.Namespace, program: Program) -> list[Timeline]:
    return read_trace(read_text(options.measured), display_name(options.measured), program)


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


def run_simulate(options: argparse.Namespace) -> int:
    plan = _plan(options, options.file)
    if options.trace:
        found = events(plan.program, [plan.timeline], SIMULATED)
        found += events(plan.program, plan.walks, MEASURED) if plan.walks else []
        with open_output(options.trace) as out:
            out.write(trace(found))
    numbers = report(plan.program, plan.run)
    print(json.dumps(numbers, indent=1) if options.json else summary(numbers))
    return 0


def _costs(options: argparse.Namespace, program: Program) -> tuple[Mapping[str, Amount], Machine]:
    """Durations and machine of the options that say what jobs cost."""
    if options.profile:
        return _profile(options, program)
    machine = Machine(options.alpha, options.beta, options.activation, options.weight, options.saved)
    return options.cost or program.header.cost, machine


def run_draw(options: argparse.Namespace) -> int:
    if options.other and options.measured:
        raise UsageError("--measured belongs to one schedule: give a single FILE")
    form = Path(options.output).suffix if options.output else None
    if form not in (None, ".svg", ".png", ".html"):
        raise UsageError(f"{options.output}: the name should end in .svg, .png or .html")
    scenes = _scenes(options, [name for name in (options.file, options.other) if name])
    by = options.by or usual(scenes)
    if form is None:
        terminal.show(scenes, by)
    elif form == ".html":
        with open_output(options.output) as out:
            out.write(page(scenes, by, options.transfers))
    else:
        from schedgen.report.draw.figure import figure

        with open_output(options.output) as out:
            figure(scenes, out, form[1:], by, tuple(TRANSFER_COLOURS) if options.transfers else ())
    return 0


def _scenes(options: argparse.Namespace, names: Sequence[str]) -> list[Scene]:
    """What there is to draw of every file; what was measured comes before its simulation."""
    files = [one_line(Path(display_name(name)).name) for name in names]
    scenes = []
    for name, file in zip(names, files, strict=True):
        label = Path(file).stem if len(set(files)) == len(files) else one_line(display_name(name))
        plan = _plan(options, name)
        sizes = bytes_of(plan.machine, plan.program.header.stages, len(plan.program.header.graph.edges))
        if plan.walks:
            scenes.append(scene("measured", file, plan.program, plan.walks[-1], sizes, seconds=True))
            label = "simulated"
        scenes.append(scene(label, file, plan.program, plan.timeline, sizes, plan.seconds or bool(plan.walks)))
    return scenes


def _profile(options: argparse.Namespace, program: Program) -> tuple[dict[str, Amount], Machine]:
    header, name = program.header, display_name(options.profile)
    return read_profile(read_text(options.profile), name, header.stages, len(header.graph.edges), header)


def run_export(options: argparse.Namespace) -> int:
    program = checked(options.file)
    cost, machine = _costs(options, program)
    unit = 1e6 if options.profile else 1.0
    files: Iterable[tuple[str, bytes]]
    if options.to == "csv":
        files = [("", as_torch_csv(program).encode())]
    elif options.to == "chrome":
        found = events(program, [simulated(program, simulate(program, cost, machine), unit)], SIMULATED)
        files = [("", trace(found))]
    elif options.output == "-":
        raise UsageError("Chakra traces are several files, so -o is how their names begin, and not -")
    else:
        files = chakra(program, cost, machine, unit)
    for end, data in files:
        with open_output(options.output + end) as out:
            out.write(data)
    return 0


def run_diff(options: argparse.Namespace) -> int:
    lines = diff(
        checked(options.a), checked(options.b), one_line(display_name(options.a)), one_line(display_name(options.b))
    )
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        lines = coloured(lines)
    differ = 0
    for line in lines:
        differ = 1
        print(line)
    return differ


def run_compare(options: argparse.Namespace) -> int:
    sizes = Sizes(options.stages, options.microbatches, options.workers)
    found = compare(sizes, options.cost, options.memory)
    if not found.rows:
        raise UsageError("no scheme fits: " + "; ".join(f"{one.scheme}: {one.reason}" for one in found.left_out))
    if options.output:
        title = f"{sizes.stages} stages, {sizes.microbatches} microbatches, {sizes.workers} workers"
        with open_output(options.output) as out:
            plot(found, title, out)
    if options.output != "-":
        print(json.dumps(as_json(found), indent=1) if options.json else "\n".join(side_by_side(found)))
    return 0


def run_plan(options: argparse.Namespace) -> int:
    layers = read_layers(options.profile)
    levels = hierarchy(options.workers, options.topology, options.bandwidth, layers.machine.beta)
    if options.microbatches is None and (options.output or not options.partition_only):
        raise UsageError("plan needs --microbatches B, or --partition-only (see schedgen plan --help)")
    numbers: dict[str, Any] = {}
    lines: list[str] = []
    downsets = all_downsets(layers)
    if not downsets.complete:
        most = "more ways to cut the layers than can be tried: only those along one order are"
        print(f"schedgen: note: {display_name(options.profile)}: {most}", file=sys.stderr)
    try:
        numbers = tables.partition_as_json(layers, downsets, levels, partition(downsets, levels, options.memory))
        lines += tables.partition_as_text(numbers)
    except UsageError as error:
        if options.partition_only:
            raise
        print(f"schedgen: note: {error}", file=sys.stderr)
    program = None
    if options.partition_only and options.output:
        program = pipedream(layers, levels, options.microbatches, options.memory)
    if not options.partition_only:
        found = search(layers, levels, options.microbatches, options.memory, schemes=options.schemes)
        numbers |= tables.search_as_json(found)
        lines += ["", *tables.search_as_text(found)]
        program = found.program
    if program is not None and options.output:
        check(program, "internal error, the compiled schedule")
        with open_output(options.output) as out:
            write(program, out)
    if options.output != "-":
        print(json.dumps(numbers, indent=1) if options.json else "\n".join(lines).lstrip("\n"))
    return 0


def run_new(options: argparse.Namespace) -> int:
    print(f"{new(options.name)}: its w and n are yours to edit; its first lines say how to compile it")
    return 0


def run_schemes(_: argparse.Namespace) -> int:
    print(describe())
    return 0
