"""Commands that make schedules or schemes: compile, compare, plan, search, new, schemes.

Each takes its options, prints or writes the result, and returns the exit code.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from schedgen.checker import check, check_compiled
from schedgen.cli.options import (
    CompareOptions,
    CompileOptions,
    NewOptions,
    PlanOptions,
    SchemesOptions,
    SearchOptions,
    SizeOptions,
)
from schedgen.compiler.compile import compile
from schedgen.compiler.lower import Dump
from schedgen.compiler.options import Options
from schedgen.compiler.sum_trees import TWO_LEVEL
from schedgen.compiler.torch_program import torch_program
from schedgen.ir.cost import REDO, Amount, by_stage, durations
from schedgen.ir.file import write
from schedgen.ir.graph_file import ModelGraph, read_graph_file
from schedgen.ir.instructions import Instruction
from schedgen.ir.program import Program
from schedgen.ir.stage_graph import chain
from schedgen.ir.transport import read_transport
from schedgen.planner import plan_output
from schedgen.planner.layer_profile import Edge, read_layers
from schedgen.planner.order_search.cp_sat import is_installed
from schedgen.planner.order_search.search_ways import search
from schedgen.planner.partition import on_links, partition, prefixes
from schedgen.planner.plan import plan
from schedgen.planner.stage_costs import cost_ratios
from schedgen.report.compare import compare, comparison_as_json, comparison_as_text
from schedgen.schemes import describe, load
from schedgen.schemes.replicas import replicated
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.schemes.torch_list import TorchList, list_in, scheme_of
from schedgen.schemes.user_file import new
from schedgen.simulator.machine import Machine, parse_profile
from schedgen.util.errors import SlowScheme, UsageError, note
from schedgen.util.files import check_writable, display_name, is_standard_output, open_output, read_text

INTERNAL = "internal error, the compiled schedule"


def run_compile(options: CompileOptions) -> int:
    """Write the schedule of a scheme, or torch's list, once it is proved; a note on stderr says if w or n was slow."""
    torch_list = list_in(options.scheme) if options.scheme.endswith(".csv") else None
    graph = read_graph_file(options.graph)
    scheme, sizes = _scheme(options, torch_list, None if graph is None else graph.stages)
    if torch_list is None:
        _write_compiled(options, scheme, sizes, graph)
        return 0
    # Given options with which torch's list is lowered anew: all but its own sizes, costs and names.
    kept = {"scheme", "output", "cost", *(field.name for field in fields(SizeOptions))}
    names, default = [field.name for field in fields(options)], CompileOptions(scheme="", output="")
    replacing = [name for name in names if name not in kept and getattr(options, name) != getattr(default, name)]
    if torch_list.has_messages and not replacing:
        _write_checked(torch_program(torch_list, Options(cost=options.cost)), options.output, options.scheme)
    else:
        _write_compiled(options, scheme, sizes, graph)
    if torch_list.has_messages and replacing:
        note(f"--{replacing[0].replace('_', '-')} replaces the messages of {options.scheme} by schedgen's")
    if torch_list.left_out:
        note(torch_list.left_out)
    return 0


def _write_compiled(options: CompileOptions, scheme: Scheme, sizes: Sizes, graph: ModelGraph | None) -> None:
    substages, transport = 1, read_transport(options.transport)
    if graph is not None:
        substages = _substages(graph, sizes.stages, display_name(options.graph or "-"))
        scheme = _with_graph(scheme, graph, substages)
    if options.profile is not None:
        options = _with_times(options, scheme, sizes.stages * substages, graph)
    if (options.machine or options.topology) and options.sums != TWO_LEVEL:
        raise UsageError("--machine and --topology tell compile the hosts for --sums two-level: leave them out")
    network = options.joined([0], [0])
    with _slow_schemes_noted():
        program = compile(
            scheme,
            sizes,
            replace(
                options,
                tied=graph.tied if graph else (),
                replicated_stages=graph.replicated if graph and options.tensor > 1 else (),
                substages=substages,
                in_order=transport,
                hosts=None if network is None else network.hosts,
            ),
            **({} if options.dump_passes is None else {"dump": _dump_to(options.dump_passes)}),
        )
        check_compiled(program)
        if transport:
            check(program, INTERNAL, transport)
        _write_checked(program, options.output)


def _with_times(options: CompileOptions, scheme: Scheme, stages: int, graph: ModelGraph | None) -> CompileOptions:
    """The options with the profile's times, and their mean ratios to F for the file; `stages`: of the model."""
    profile = options.profile or "-"
    edges, ties = (graph.edges if graph else scheme.edges) or chain(stages), len(graph.tied) if graph else 0
    times, _ = _read_costs(profile, stages, edges, ties)
    own = durations(times, 1 if options.forward else 3 if scheme.split else 2, display_name(profile))
    return replace(options, times=times, cost=cost_ratios(own))


def _read_costs(profile: str, stages: int, edges: Sequence[Edge], ties: int) -> tuple[dict[str, Amount], Machine]:
    """The durations by stage, and the machine, of a profile of a model with so many stages and these edges."""
    return parse_profile(read_text(profile), display_name(profile), stages, edges, ties=ties, counted="the model has")


def _dump_to(folder: str) -> Dump:
    """A function that writes the instructions after a pass that changed some to a file, one a line behind its rank."""
    Path(folder).mkdir()
    texts: list[str] = []

    def dump(name: str, program: Program) -> None:
        rows = zip(*(column.tolist() for column in program.rows), strict=True)
        text = "".join(f"{rank:4} {Instruction(*row)}\n" for rank, *row in rows)
        if text not in texts[-1:]:
            texts.append(text)
            Path(folder, f"{len(texts)}-{name}.txt").write_text(text)

    return dump


@contextlib.contextmanager
def _slow_schemes_noted() -> Iterator[None]:
    """Print each SlowScheme warning once, as a note, unless an error is raised; other warnings are issued as usual."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SlowScheme)
        yield
    for sentence in dict.fromkeys(str(each.message) for each in caught if issubclass(each.category, SlowScheme)):
        note(sentence)
    for each in caught:
        if not issubclass(each.category, SlowScheme):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


def _scheme(options: CompileOptions, torch_list: TorchList | None, stages: int | None) -> tuple[Scheme, Sizes]:
    """The scheme to compile, and its sizes: torch's list has its own; `stages` are those of a graph."""
    sizes = {name: getattr(options, name) for name in Sizes._fields}
    if torch_list is not None:
        scheme, own_sizes = scheme_of(torch_list)
        if isinstance(R := options.replicas, int):
            workers, batches = R * (own_sizes.workers or 1), R * own_sizes.microbatches
            own_sizes = own_sizes._replace(workers=workers, microbatches=batches, replicas=R)
            scheme = replicated(scheme, own_sizes, options.interleave)
        for name, value in sizes.items():
            if value not in (None, getattr(own_sizes, name)):
                given = ",".join(map(str, value)) if isinstance(value, tuple) else value
                raise UsageError(f"{options.scheme} has its own sizes: leave --{name} {given} out")
        return scheme, own_sizes
    sizes["stages"] = options.stages or stages
    if missing := [f"--{name}" for name in ("stages", "microbatches") if sizes[name] is None]:
        raise UsageError(f"compile needs {' and '.join(missing)} (see schedgen compile --help)")
    return load(options.scheme, Sizes(**sizes), options.tensor, options.interleave), Sizes(**sizes)


def _substages(graph: ModelGraph, stages: int, name: str) -> int:
    """How many of the model's stages each stage of the scheme stands for; UsageError if that is not a whole number."""
    if stages != graph.stages and graph.edges not in (None, chain(graph.stages)):
        raise UsageError(f"{name} has {graph.stages} stages that are no chain, so a scheme needs as many, not {stages}")
    if graph.stages % stages:
        raise UsageError(f"{name} has {graph.stages} stages, which is no multiple of the scheme's {stages}")
    return graph.stages // stages


def _with_graph(scheme: Scheme, graph: ModelGraph, substages: int) -> Scheme:
    if graph.edges is not None:
        scheme = scheme._replace(edges=graph.edges if substages == 1 else None, per_consumer=graph.per_consumer)
    if graph.layers:
        scheme = scheme._replace(parameters={**scheme.parameters, "layers": list(graph.layers)})
    return scheme


def _write_checked(program: Program, output: str, name: str = INTERNAL) -> None:
    check(program, name)
    with open_output(output) as out:
        write(program, out)


def run_compare(options: CompareOptions) -> int:
    """Print the numbers of every scheme that fits; a note on stderr says if a w or an n was slow."""
    sizes = Sizes(options.stages, options.microbatches, options.workers, replicas=options.replicas)
    if options.cost and "B" not in options.cost and "I" not in options.cost:
        raise UsageError("compare compiles backwards, too: --cost must give F and B, or F, I and W")
    cost, times, machine = options.cost, None, options.amounts if options.given not in ([], ["cost"]) else None
    if options.profile:
        times, machine = _read_costs(options.profile, options.stages, chain(options.stages), 0)
        durations(times, 2, display_name(options.profile))  # UsageError if it is of forwards alone
        cost = cost_ratios({name: by_stage(each, options.stages) for name, each in times.items() if name != REDO})
    if machine and (network := options.network(machine.network)):
        machine = machine.on(network)
    with _slow_schemes_noted():
        comparison = compare(sizes, cost, options.memory_limit, options.files, machine, times)
    for name in options.files:
        if name.endswith(".csv") and list_in(name).has_messages:
            note(f"{name} is compared with the messages of schedgen compile in place of its own")
    if not comparison.rows:
        raise UsageError(f"no scheme fits: {'; '.join({scheme.reason: None for scheme in comparison.left_out})}")
    as_json, as_text = comparison_as_json, comparison_as_text
    print(json.dumps(as_json(comparison), indent=1) if options.json else "\n".join(as_text(comparison)))
    return 0


def run_plan(options: PlanOptions) -> int:
    """Print where to cut a model, or the schedules that no other beats, and write the fastest of them."""
    if options.microbatches is None and not options.partition_only:
        raise UsageError("plan needs --microbatches B, or --partition-only (see schedgen plan --help)")
    check_writable("-o", options.output)
    layers, workers = read_layers(options.profile, options.graph), options.workers
    network = options.network(layers.machine.network)
    given = options.bandwidth[0] if options.bandwidth and not network else None
    if options.microbatches is None or options.partition_only:
        layers, bandwidth = on_links(layers, workers, network, given)
        if layers.machine.network.speed != 1:
            note("--partition-only counts all devices as equally fast")
        memory = min(options.memory, layers.machine.network.least_memory(workers))
        cuts = partition(prefixes(layers), workers, bandwidth, memory)
        numbers = plan_output.partition_as_json(layers, workers, bandwidth, cuts)
        lines = plan_output.partition_as_text(numbers)
    else:
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1  # elsewhere processes are not forked
        best = plan(
            layers, workers, options.microbatches, options.memory, network=network, bandwidth=given,
            schemes=options.schemes, budget=options.search, processes=cores,
        )  # fmt: skip
        numbers, lines = plan_output.plan_as_json(best), plan_output.plan_as_text(best)
        if options.output:
            _write_checked(best.program, options.output)
    if not is_standard_output(options.output):
        print(json.dumps(numbers, indent=1) if options.json else "\n".join(lines))
    return 0


def run_search(options: SearchOptions) -> int:
    """Print the best order's value and the bound; write its schedule; a note on stderr says if w or n was slow."""
    check_writable("-o", options.output)
    graph = read_graph_file(options.graph)
    if options.stages is None and graph is None:
        raise UsageError("search needs --stages or --graph (see schedgen search --help)")
    if options.stages and graph and options.stages != graph.stages:
        name = display_name(options.graph or "-")
        raise UsageError(f"search orders the {graph.stages} stages of {name} as they are: leave --stages out")
    stages = graph.stages if graph else options.stages or 0
    sizes = Sizes(stages, options.microbatches, options.workers, chunks=options.chunks, groups=options.groups)
    scheme = load(options.scheme, sizes)
    if graph is not None:
        scheme = _with_graph(scheme, graph, 1)
    cost: Mapping[str, Amount] | None = options.cost
    machine = options.amounts
    if options.profile:
        ties = len(graph.tied) if graph else 0
        cost, machine = _read_costs(options.profile, stages, scheme.edges or chain(stages), ties)
        durations(cost, 2, display_name(options.profile))  # UsageError if it is of forwards alone
    if (network := options.network(machine.network)) is not None:
        machine = machine.on(network)
    tied, begin = graph.tied if graph else (), time.perf_counter()
    with _slow_schemes_noted():
        best = search(
            scheme, sizes, cost, machine, memory_limit=options.memory_limit, memory=options.memory, tied=tied,
            objective=options.objective, recompute=options.recompute, offload=options.offload, budget=options.budget,
        )  # fmt: skip
        seconds = time.perf_counter() - begin
    if options.output:
        _write_checked(best.program, options.output)
    if not is_standard_output(options.output):
        print(plan_output.search_table(best, options.objective, seconds, options.json))
    if not (best.optimal or is_installed()):
        note("OR-Tools can prove more orders of small problems optimal: pip install ortools")
    return 0


def run_new(options: NewOptions) -> int:
    """Write a template of a scheme."""
    print(f"{new(options.name)}: its w and n are yours to edit; its first lines say how to compile it")
    return 0


def run_schemes(_: SchemesOptions) -> int:
    """Print the built-in schemes."""
    print(describe())
    return 0
