"""Commands that read schedules: check, repair, seal, stats, simulate, draw, export, diff.

Each takes its options, prints or writes the result, and returns the exit code.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from schedgen import checker
from schedgen.checker import Prove, check, check_but_waits
from schedgen.checker.proof import Proof
from schedgen.checker.repair import Fewest, fewest, repair
from schedgen.cli.options import (
    CheckOptions,
    CostOptions,
    DiffOptions,
    DrawOptions,
    ExportOptions,
    RepairOptions,
    SealOptions,
    SimulateOptions,
    StatsOptions,
)
from schedgen.compiler.torch_program import torch_program
from schedgen.ir.cost import Amount, durations
from schedgen.ir.file import parse, write
from schedgen.ir.program import Program
from schedgen.ir.transport import MESSAGES, read_transport
from schedgen.planner.stage_costs import read_profile
from schedgen.report.chakra import chakra_traces, jobs_rounded_to_zero
from schedgen.report.chrome_trace import MEASURED, SIMULATED, read_trace, run_numbers, trace_events, trace_file
from schedgen.report.diff import diff
from schedgen.report.draw import terminal
from schedgen.report.draw.colours import TRANSFER_COLOURS
from schedgen.report.draw.page import page
from schedgen.report.draw.scene import Scene, build_scene, default_colouring
from schedgen.report.memory_advice import advice_as_json, advice_as_text, memory_advice
from schedgen.report.stats_table import named_numbers, stats_table
from schedgen.report.torch_csv import as_torch_csv
from schedgen.schemes.torch_list import list_in
from schedgen.simulator.machine import Machine
from schedgen.simulator.machine_file import read_network
from schedgen.simulator.simulate import Simulation, simulate
from schedgen.simulator.stats import simulation_numbers, stats
from schedgen.simulator.timeline import Timeline
from schedgen.util.errors import RefusedFile, UsageError, note, number_of, one_line
from schedgen.util.files import display_name, is_standard_output, open_output, read_text


def checked(name: str, prove: Prove = checker.check) -> Program:
    """The schedule in file `name` (-: standard input), or torch's list in a .csv, read and checked. Raises RefusedFile.

    Notes on stderr say what of torch's list the program leaves out, and whose the messages are.
    """
    if not name.endswith(".csv"):
        return checker.checked(name, prove)
    torch_list = list_in(name)
    try:
        program = torch_program(torch_list)
    except UsageError as error:
        raise RefusedFile(f"{name}: {error}") from None
    prove(program, name)
    if not torch_list.has_messages:
        note(f"{name} has jobs alone: its messages are those that schedgen compile gives it")
    if torch_list.left_out:
        note(torch_list.left_out)
    return program


def run_check(options: CheckOptions) -> int:
    """Prove the files one after another, and print a line for each."""
    transport = read_transport(options.transport)
    for name in options.files:
        program = checked(name, partial(check, transport=transport))
        header = program.header
        gradients = "" if header.is_forward else ", every gradient at every owner"
        print(
            f"{display_name(name)}: {header.scheme['name']}, {number_of(header.workers, 'worker')}, "
            f"{number_of(len(program), 'instruction')}: "
            f"every {'forward' if header.is_forward else 'job'} once, no deadlock"
            f"{f' on {options.transport}' if transport else ''}{gradients}"
        )
    return 0


def run_repair(options: RepairOptions) -> int:
    """Move messages until a schedule is safe on a transport, or find communicators that make it safe as it is."""
    if options.fewest == bool(options.transport):
        raise UsageError("repair needs either --transport or --fewest (see schedgen repair --help)")
    transport = read_transport(options.transport or "in-order:edge-kind")
    if options.fewest and options.given:
        raise UsageError(f"--fewest simulates nothing: leave --{options.given[0]} out")
    if transport is None:
        raise UsageError("repair moves messages for a transport that delivers in order, not for mpi")
    name = display_name(options.file)
    program = checked(options.file, partial(check_but_waits, transport=transport))
    if options.fewest:
        return _print_fewest(options, fewest(program, name))
    cost, machine = costs(options, program)
    repaired = repair(program, name, transport)
    check(repaired.program, f"internal error, {name} repaired", transport)
    if options.output:
        with open_output(options.output) as file:
            write(repaired.program, file)
    times = [simulate(each, cost, machine).latency for each in (program, repaired.program)]
    was = f"{times[0]:g}" if repaired.in_place else "one that never ends"
    ends = len(program.rows_of(*MESSAGES))
    out = sys.stderr if is_standard_output(options.output) else sys.stdout
    moved = f"{len(repaired.moved)} of {ends} SENDs and receives moved"
    print(f"{name}: safe on {transport.name}, {moved}; simulated time {times[1]:g}, as it was {was}", file=out)
    proof = Proof(program, name)
    for row, behind in zip(repaired.moved.tolist(), repaired.behind.tolist(), strict=True):
        print(f"{proof.where(row)}: now behind {proof.where(behind) if behind >= 0 else 'nothing'}", file=out)
    return 0


def _print_fewest(options: RepairOptions, few: Fewest) -> int:
    """Print communicators, or write them as an assignment."""
    text = "[\n " + ",\n ".join(json.dumps(each.as_json) for each in few.found) + "\n]\n"
    count = number_of(len(few.found), "communicator")
    words = "the fewest" if len(few.found) == few.needed else f"at least {few.needed} are needed"
    note(f"{count}, {words}; each pair of ranks and kind of buffer has one of them")
    with open_output(options.output or "-") as out:
        out.write(text.encode("ascii"))
    return 0


def run_seal(options: SealOptions) -> int:
    """Write a schedule again, in the form and with the hash that readers require."""
    program = parse(read_text(options.file), display_name(options.file))
    with open_output(options.file) as out:
        write(program, out)
    return 0


def run_stats(options: StatsOptions) -> int:
    """Print a schedule's numbers, its memory with advice, or the seconds of a run."""
    program = checked(options.file)
    cost, machine = _read_profile(options, program) or (options.cost, None)
    if options.memory:
        _print_advice(options, program, cost or program.header.cost, machine or Machine())
        return 0
    if options.measured:
        numbers = run_numbers(program, _read_trace(options.measured, program))
        shown = {key: value for key, value in numbers.items() if key != "profile"}
        print(json.dumps(numbers, indent=1) if options.json else named_numbers(shown))
        return 0
    numbers = stats(program, cost, machine)
    print(json.dumps(numbers, indent=1) if options.json else stats_table(numbers))
    return 0


def _print_advice(options: StatsOptions, program: Program, cost: Mapping[str, Amount], machine: Machine) -> None:
    if options.measured:
        raise UsageError("--measured has no bytes: leave it out beside --memory")
    if options.profile is None:
        note("without --profile every buffer counts as one byte")
    machine = machine.on(read_network(options.machine)) if options.machine else machine
    advice = memory_advice(program, cost, machine, profiled=options.profile is not None)
    print(json.dumps(advice_as_json(advice), indent=1) if options.json else "\n".join(advice_as_text(advice)))


class _Execution(NamedTuple):
    """A schedule simulated with the costs that a command was given, and the passes of a measured run through it."""

    program: Program
    run: Simulation
    measured: list[Timeline]  # the passes of --measured through the list; empty without it
    seconds: bool  # whether the simulation's time is in seconds

    @property
    def timeline(self) -> Timeline:
        """The simulation's timeline, in microseconds if the costs are in seconds."""
        return self.run.timeline(1e6 if self.seconds else 1.0)


def _execute(options: SimulateOptions | DrawOptions, name: str) -> _Execution:
    """Simulate the schedule in file `name` by the options' costs, else by --measured's, which include slow devices."""
    program = checked(name)
    cost, machine = costs(options, program)
    measured = _read_trace(options.measured, program) if options.measured else []
    times = run_numbers(program, measured)["profile"] if measured else {}
    if times and not (options.cost or options.profile):
        cost, machine = times, machine.on(machine.network._replace(speed=1.0))._replace(step=times.pop("step", 0.0))
    if isinstance(options, SimulateOptions) and options.slow:
        machine = machine.on(machine.network.slowed(options.slow, program.header.workers))
    seconds = bool(options.profile or (measured and not options.cost))
    return _Execution(program, simulate(program, cost, machine), measured, seconds)


def run_simulate(options: SimulateOptions) -> int:
    """Print the numbers of a simulation, and write its trace."""
    execution = _execute(options, options.file)
    if options.trace:
        slices = trace_events(execution.program, [execution.timeline], SIMULATED)
        slices += trace_events(execution.program, execution.measured, MEASURED) if execution.measured else []
        with open_output(options.trace) as out:
            out.write(trace_file(slices))
    if execution.run.lack:
        note(execution.run.lack)
    if not is_standard_output(options.trace):
        numbers = simulation_numbers(execution.program, execution.run)
        print(json.dumps(numbers, indent=1) if options.json else named_numbers(numbers))
    return 0


def costs(options: CostOptions, program: Program) -> tuple[Mapping[str, Amount], Machine]:
    """Durations of jobs by direction, and the machine, as given by the options."""
    cost, machine = _read_profile(options, program) or (options.cost or program.header.cost, options.amounts)
    network = options.network(machine.network)
    return cost, machine.on(network) if network else machine


def _read_profile(options: CostOptions | StatsOptions, program: Program) -> tuple[dict[str, Amount], Machine] | None:
    """Durations of jobs by direction, and the machine, as given by a profile; None if there is none."""
    if options.profile is None:
        return None
    cost, machine = read_profile(options.profile, program, options.graph)
    shown = display_name(options.profile)
    durations(cost, len(program.header.directions), shown)  # UsageError if they do not fit the schedule
    return cost, machine


def _read_trace(name: str, program: Program) -> list[Timeline]:
    return read_trace(read_text(name), display_name(name), program)


def run_draw(options: DrawOptions) -> int:
    """Draw one or two schedules, in the terminal or into a file."""
    if options.other and options.measured:
        raise UsageError("--measured belongs to one schedule: give a single FILE")
    form = Path(options.output or "").suffix
    if options.output and form not in (".svg", ".png", ".html"):
        raise UsageError(f"{options.output}: the name should end in .svg, .png or .html")
    scenes = _scenes(options, [name for name in (options.file, options.other) if name])
    by = options.by or default_colouring(scenes)
    if options.output is None:
        terminal.show(scenes, by)
    elif form == ".html":
        with open_output(options.output) as out:
            out.write(page(scenes, by, options.transfers))
    else:
        try:
            from schedgen.report.draw.figure import figure
        except ImportError:
            raise UsageError("SVG and PNG need matplotlib: pip install 'schedgen[draw]'") from None
        with open_output(options.output) as out:
            figure(scenes, out, form[1:], by, tuple(TRANSFER_COLOURS) if options.transfers else ())
    return 0


def _scenes(options: DrawOptions, names: Sequence[str]) -> list[Scene]:
    """The scenes to draw for every file; a measured run comes before its simulation."""
    files = [one_line(Path(display_name(name)).name) for name in names]
    scenes = []
    for name, file in zip(names, files, strict=True):
        label = Path(file).stem if len(set(files)) == len(files) else one_line(display_name(name))
        execution = _execute(options, name)
        program, sizes = execution.program, execution.run.sizes
        if execution.measured:
            scenes.append(build_scene("measured", file, program, execution.measured[-1], sizes, seconds=True))
            label = "simulated"
        seconds = execution.seconds or bool(execution.measured)
        links = execution.run.link_use(1e6 if execution.seconds else 1.0) if options.links else None
        if links and not links.names:
            raise UsageError("--links: no message occupies a link: give --beta, --profile, --machine or --topology")
        scenes.append(build_scene(label, file, program, execution.timeline, sizes, seconds, links))
    return scenes


def run_export(options: ExportOptions) -> int:
    """Write a schedule in another tool's form."""
    program = checked(options.file)
    cost, machine = costs(options, program)
    unit = 1e6 if options.profile else 1.0
    files: Iterable[tuple[str, bytes]]
    if options.to.startswith("torch"):
        if options.given:
            raise UsageError(f"torch's lists have no costs: leave --{options.given[0]} out")
        files = [("", as_torch_csv(program, messages=options.to == "torch").encode())]
    elif is_standard_output(options.output):
        raise UsageError("Chakra traces are several files: -o is the beginning of their names and cannot be -")
    else:
        run = simulate(program, cost, machine)
        files = chakra_traces(run, unit)
        if jobs := jobs_rounded_to_zero(run, unit):
            note(f"the durations of {number_of(jobs, 'job')} round to 0 microseconds: give larger costs, or a profile")
    for end, data in files:
        with open_output(options.output + end) as out:
            out.write(data)
    return 0


def run_diff(options: DiffOptions) -> int:
    """Print what differs between two schedules; the exit code tells whether anything does."""
    a, b = (one_line(display_name(name)) for name in (options.a, options.b))
    lines = [*diff(checked(options.a), checked(options.b), a, b, options.jobs)]
    for line in lines:
        print(line)
    return int(bool(lines))
