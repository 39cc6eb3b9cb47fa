"""Every built-in scheme that fits given sizes, side by side: the seed's Table 1 and more, by compiling each.

lpp and fslpp stand there at every number of groups that divides the workers (R = W/G in a group), from pipelines
(G = 1) to data parallelism (G = W).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from schedgen.compiler.compile import compile_scheme
from schedgen.ir.header import Header
from schedgen.ir.instructions import Kind, Op
from schedgen.ir.program import Program
from schedgen.schemes import SCHEMES, load
from schedgen.schemes.scheme import Sizes
from schedgen.simulator.stats import stats
from schedgen.util.errors import UsageError
from schedgen.util.progress import over


class Row(NamedTuple):
    """A scheme and what it comes to; counts are of buffers, the largest of a worker unless they are traffic."""

    scheme: str
    groups: int | None  # where the scheme has some
    latency: float  # in the units of the cost, as are the bounds
    bubble: float  # idle fraction of workers x latency
    gap: float  # latency over the largest lower bound (`schedgen.simulator.lower_bounds`), minus 1
    peak_activations: int  # saved forwards
    weights: int  # stages it owns and foreign copies, at once at the most
    activation_traffic: int  # activations and their gradients sent, by all workers
    weight_traffic: int  # weights and their gradients sent; a reduction among m workers sends 2 (m - 1)
    best: bool  # no other has less latency, activations or weights and no more of the others
    command: str  # how to compile it

    @property
    def label(self) -> str:
        return self.scheme if self.groups is None else f"{self.scheme} G={self.groups}"


class LeftOut(NamedTuple):
    scheme: str
    reason: str


class Comparison(NamedTuple):
    rows: list[Row]  # the shortest first
    left_out: list[LeftOut]
    headers: list[Header]  # of the rows


def candidates(workers: int) -> list[tuple[str, int | None]]:
    """Schemes and, where they have groups, every number of groups."""
    divisors = [G for G in range(1, workers + 1) if workers % G == 0]
    grouped = ("lpp", "fslpp")
    return [(name, G) for name in SCHEMES for G in (divisors if name in grouped else (None,))]


def compare(sizes: Sizes, cost: Mapping[str, float] | None = None, memory: int | None = None) -> Comparison:
    """Compile all; `memory`: the most saved forwards a worker may hold, which greedy orders keep to and others fit.

    `cost`: F and B, or F, I and W, of which B is the sum; given B alone, I and W are half of it.
    """
    found: list[tuple[Row, Header]] = []
    left_out = []
    every = candidates(sizes.workers or 1)
    for name, groups in over(every, "compare", len(every)):
        label = name if groups is None else f"{name} G={groups}"
        try:
            program, limited = _compiled(name, sizes._replace(groups=groups), cost, memory)
            row = _row(program, name, groups, sizes, f" --memory-limit {memory}" if limited else "", cost)
            if memory is not None and row.peak_activations > memory:
                raise UsageError(f"it holds {row.peak_activations} activations")
        except UsageError as error:
            left_out.append(LeftOut(label, str(error).removeprefix(f"{name} ")))
            continue
        found.append((row, program.header))
    found.sort(key=lambda one: (one[0].latency, one[0].peak_activations, one[0].weights, one[0].label))
    rows = [row for row, _ in found]
    return Comparison([row._replace(best=_best(row, rows)) for row in rows], left_out, [header for _, header in found])


def _compiled(name: str, sizes: Sizes, cost: Mapping[str, float] | None, memory: int | None) -> tuple[Program, bool]:
    """The program, and whether it was compiled under the limit."""
    scheme = load(name, sizes)
    limited = memory is not None and scheme.mode == "greedy"
    program = compile_scheme(scheme, sizes, cost=_halved(cost, scheme.split), memory=memory if limited else None)
    if program.header.workers != sizes.workers:
        raise UsageError(f"it needs {program.header.workers} workers, not {sizes.workers}")
    return program, limited


def _halved(cost: Mapping[str, float] | None, split: bool) -> Mapping[str, float] | None:
    if cost is None or not split or "W" in cost:
        return cost
    return {"F": cost["F"], "I": cost["B"] / 2, "W": cost["B"] / 2}


def _row(
    program: Program, name: str, groups: int | None, sizes: Sizes, limit: str, cost: Mapping[str, float] | None
) -> Row:
    header, table = program.header, program.rows
    numbers = stats(program)
    sent = np.bincount(table.kind[table.op == Op.SEND], minlength=len(Kind))
    members = np.array([len(group) for group in header.groups])
    reduced = members[table.peer[table.op == Op.ALLREDUCE]]
    rings = round(float((2 * (reduced - 1) / reduced).sum()))  # of each member 2 (m - 1) / m
    options = {"stages": sizes.stages, "microbatches": sizes.microbatches, "workers": sizes.workers, "groups": groups}
    words = "".join(f" --{option} {value}" for option, value in options.items() if value is not None)
    costs = "" if cost is None else " --cost " + ",".join(f"{d}={time:g}" for d, time in header.cost.items())
    return Row(
        name,
        groups,
        numbers["latency"],
        numbers["bubble"],
        numbers["gap"],
        numbers["peak_activations"],
        max(worker["weight_storage"] + worker["peak_memory"]["weight"] for worker in numbers["workers"]),
        int(sent[Kind.X] + sent[Kind.G]),
        int(sent[Kind.W] + sent[Kind.DW]) + rings,
        False,
        f"schedgen compile {name}{words}{costs}{limit} -o FILE",
    )


def _best(row: Row, rows: Sequence[Row]) -> bool:
    def price(one: Row) -> tuple[float, int, int]:
        return one.latency, one.peak_activations, one.weights

    mine = price(row)
    others = (price(other) for other in rows)
    return not any(other != mine and all(o <= m for o, m in zip(other, mine, strict=True)) for other in others)


def as_json(found: Comparison) -> dict[str, Any]:
    return {
        "schemes": [row._asdict() for row in found.rows],
        "left_out": [one._asdict() for one in found.left_out],
    }


def table(found: Comparison) -> Iterator[str]:
    """Lines to read: a row a scheme, * where it is best, and what does not fit."""
    titles = ("", "scheme", "latency", "bubble", "gap", "activations", "weights", "x, g sent", "w, dw sent")
    cells: list[tuple[str, ...]] = [titles]
    for row in found.rows:
        percents = (f"{row.bubble:.1%}", f"{row.gap:.1%}")
        counts = (row.peak_activations, row.weights, row.activation_traffic, row.weight_traffic)
        cells.append(("*" if row.best else "", row.label, f"{row.latency:.6g}", *percents, *map(str, counts)))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        pairs = list(zip(line, widths, strict=True))
        left, right = [cell.ljust(width) for cell, width in pairs[:2]], [cell.rjust(width) for cell, width in pairs[2:]]
        yield "  ".join([*left, *right]).rstrip()
    if found.left_out:
        yield ""
        yield from (f"left out: {one.scheme}: {one.reason}" for one in found.left_out)
