"""Every built-in scheme that fits the sizes, and a user's own, side by side: Table 1 of Rahimi 2025 and more.

lpp and fslpp are compiled for every number of groups G that divides the workers, from pipelines (G = 1) to data
parallelism (G = W).
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter, le
from typing import Any, NamedTuple

import numpy as np

from schedgen.checker import check_compiled
from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.ir.cost import Amount, has_both, with_halves
from schedgen.ir.instructions import Kind, Op
from schedgen.ir.limits import check_workers
from schedgen.ir.program import Program
from schedgen.ir.stage_graph import chain
from schedgen.schemes import SCHEMES, load
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.schemes.torch_list import list_in, scheme_of
from schedgen.simulator.machine import Machine
from schedgen.simulator.simulate import Simulation, simulate
from schedgen.simulator.stats import most_weights, stats
from schedgen.util.errors import UsageError, one_line
from schedgen.util.progress import over
from schedgen.util.text_table import aligned

Price = tuple[float, int, float]  # latency, activations, weights


class SchemeNumbers(NamedTuple):
    """The numbers of a compiled scheme; counts are of buffers on the worker that has most, except for traffic."""

    scheme: str  # its name, or the file as it was given
    groups: int | None  # None: the scheme has no groups
    latency: float  # in the units of the cost, or of the times on a machine
    bubble: float  # idle fraction of workers x latency
    gap: float | None  # latency over the largest of `schedgen.simulator.lower_bounds`, minus 1; None on a machine
    makespan: float | None  # on a machine, with messages, sums and steps; None: none was given
    peak_activations: int  # saved forwards
    weights: float  # stages that a worker owns, plus the most foreign copies it holds at once
    activation_traffic: int  # activations and their gradients sent, by all workers
    weight_traffic: int  # weights and their gradients sent; a reduction among m workers sends 2 (m - 1)
    best: bool  # on the Pareto front of latency or makespan, activations and weights
    command: str  # the command that compiles it


class LeftOut(NamedTuple):
    """A scheme that does not fit the sizes or the memory."""

    scheme: str  # its label
    reason: str


class Comparison(NamedTuple):
    """The schemes that fit, the shortest latency first, and those that do not."""

    rows: list[SchemeNumbers]
    left_out: list[LeftOut]


def _label(scheme: str, groups: int | None) -> str:
    return one_line(scheme) if groups is None else f"{scheme} G={groups}"


def compare(
    sizes: Sizes,
    cost: Mapping[str, float] | None = None,
    memory_limit: int | None = None,
    files: Sequence[str | os.PathLike[str]] = (),
    machine: Machine | None = None,
    times: Mapping[str, Amount] | None = None,
) -> Comparison:
    """Compile all built-in schemes and those that `files` define, FILE.py or FILE.csv.

    `cost`: F and B, or F, I and W; without I and W, each is half of B. `memory_limit`: the most saved forwards a worker
    may hold; greedy orders are compiled under that limit, strict ones are left out if they need more. `machine`: what
    all are simulated on, without ties, with jobs that take `times`, by stage, else `cost`; None: messages are free.
    UsageError if there are more workers than any schedule may have, or one of `files` cannot be compiled with neither
    memory limit nor machine; RefusedFile for what is no CSV of a schedule, OSError if it cannot be opened.
    """
    rows, left_out = list[SchemeNumbers](), list[LeftOut]()
    workers = sizes.workers or 1
    check_workers(workers, sizes.stages)
    (machine or Machine()).network.check(workers)
    given = [os.fspath(file) for file in files]
    alone = workers // sizes.replicas if isinstance(sizes.replicas, int) else workers  # a replica's
    divisors = [G for G in range(1, alone + 1) if alone % G == 0]
    names = dict.fromkeys((*given, *SCHEMES))
    schemes = [(name, G) for name in names for G in (divisors if name in ("lpp", "fslpp") else (None,))]
    for name, groups in over(schemes, "compare", len(schemes)):
        sizes = sizes._replace(groups=groups)
        try:
            program = _compiled(name, sizes, cost, memory_limit)
            run = machine and simulate(program, with_halves(times) if times else program.header.cost, machine)
            row = _numbers(program, name, sizes, cost is not None, run)
            if run and run.lack:
                raise UsageError(run.lack)
            if memory_limit is not None and row.peak_activations > memory_limit:
                raise UsageError(
                    f"it holds {row.peak_activations} activations, more than --memory-limit {memory_limit}"
                )
        except UsageError as error:
            if name in given and memory_limit is None and machine is None:
                raise UsageError(error if name in str(error) else f"{name}: {error}") from None
            left_out.append(LeftOut(_label(name, groups), str(error).removeprefix(f"{name} ")))
            continue
        rows.append(row)
    prices = _prices(rows)
    rows.sort(key=lambda row: (*prices[row], _label(row.scheme, row.groups)))
    # Of these no other price is at least as good in all its numbers and better in some.
    best = {p for p in prices.values() if not any(o != p and all(map(le, o, p)) for o in prices.values())}
    return Comparison([row._replace(best=prices[row] in best) for row in rows], left_out)


def _loaded(name: str, sizes: Sizes) -> Scheme:
    """The scheme of this name or in this file; UsageError if it has other sizes, or its stages are no chain."""
    if name.endswith(".csv"):
        scheme, own = scheme_of(list_in(name))
        if own != sizes:
            its = f"--stages {own.stages} --microbatches {own.microbatches} --workers {own.workers}"
            raise UsageError(f"{name} has its own sizes: compare it with {its}")
        return scheme
    scheme = load(name, sizes)
    if scheme.edges not in (None, chain(sizes.stages)):
        raise UsageError(f"{name} has edges of its own, but schemes are compared on a chain of stages")
    return scheme


def _compiled(name: str, sizes: Sizes, cost: Mapping[str, float] | None, limit: int | None) -> Program:
    """The program, compiled under the limit of saved forwards if its order is greedy."""
    scheme = _loaded(name, sizes)
    limit = limit if scheme.mode == "greedy" else None
    program = compile(scheme, sizes, Options(cost=cost and with_halves(cost), memory_limit=limit))
    check_compiled(program)
    if program.header.workers != sizes.workers:
        raise UsageError(f"it needs {program.header.workers} workers, not {sizes.workers}")
    if cost is not None and has_both(cost) and scheme.split and len(program.rows_of(Op.BWD)):
        program = replace(program, header=replace(program.header, cost=cost))
    return program


def _numbers(program: Program, name: str, sizes: Sizes, with_cost: bool, run: Simulation | None) -> SchemeNumbers:
    """The numbers of a compiled scheme; `with_cost`: whether its command gives the costs; `run`: on a machine."""
    header, table = program.header, program.rows
    numbers = stats(program)
    sent = np.bincount(table.kind[table.op == Op.SEND], minlength=len(Kind))
    members = np.array([len(group) for group in header.groups])
    reduced = members[table.group[table.op == Op.ALLREDUCE]]
    rings = round(float((2 * (reduced - 1) / reduced).sum()))  # each member sends 2 (m - 1) / m
    given = ("stages", "microbatches", "workers", "replicas", "groups")
    options: dict[str, Any] = {name: getattr(sizes, name) for name in given}
    options["cost"] = ",".join(f"{d}={time}" for d, time in header.cost.items()) if with_cost else None
    options["memory-limit"] = header.memory_limit
    arguments = "".join(f" --{option} {value}" for option, value in options.items() if value is not None)
    return SchemeNumbers(
        name,
        sizes.groups,
        run.latency if run else numbers["latency"],
        run.bubble if run else numbers["bubble"],
        None if run else numbers["gap"],
        run.makespan if run else None,
        numbers["peak_activations"],
        most_weights(numbers),
        int(sent[Kind.X] + sent[Kind.G]),
        int(sent[Kind.W] + sent[Kind.DW]) + rings,
        False,
        f"schedgen compile {shlex.quote(name)}{arguments} -o FILE",
    )


def _prices(rows: Sequence[SchemeNumbers]) -> dict[SchemeNumbers, Price]:
    """Time, activations and weights of each row; times that only rounding makes different are the same."""
    prices, time = {}, 0.0
    for end, row in sorted(((row.makespan or row.latency, row) for row in rows), key=itemgetter(0)):
        if not math.isclose(end, time, rel_tol=1e-9):
            time = end
        prices[row] = time, row.peak_activations, row.weights
    return prices


def comparison_as_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison's rows, and what was left out and why."""
    return {
        "schemes": [row._asdict() for row in comparison.rows],
        "left_out": [scheme._asdict() for scheme in comparison.left_out],
    }


def comparison_as_text(comparison: Comparison) -> Iterator[str]:
    """The comparison as lines: one per scheme, with * if it is best, then those left out."""
    last = "gap" if all(row.makespan is None for row in comparison.rows) else "makespan"
    titles = ("", "scheme", "latency", "bubble", last, "activations", "weights", "x, g sent", "w, dw sent")
    cells: list[tuple[str, ...]] = [titles]
    for row in comparison.rows:
        numbers = (
            f"{row.latency:.6g}",
            f"{row.bubble:.1%}",
            f"{row.makespan:.6g}" if row.makespan else f"{row.gap:.1%}",
        )
        counts = (row.peak_activations, row.weights, row.activation_traffic, row.weight_traffic)
        cells.append(("*" if row.best else "", _label(row.scheme, row.groups), *numbers, *map(str, counts)))
    yield from aligned(cells, 2)
    if comparison.left_out:
        yield ""
        yield from (f"left out: {scheme}: {reason}" for scheme, reason in comparison.left_out)
