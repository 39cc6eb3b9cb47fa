"""`recipe_of`: how a schedule was compiled, read from its header, so that it can be compiled again with a change.

A header does not keep everything: not a user's file, nor whether replicas were interleaved, nor times by stage. What
is missing is guessed, and a guess counts only if it compiles to the same instructions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from schedgen.compiler.compile import compile
from schedgen.compiler.options import Hosts, Jobs, Options
from schedgen.compiler.sum_trees import ALLREDUCE, TWO_LEVEL
from schedgen.ir.cost import Amount, own_costs
from schedgen.ir.header import Header
from schedgen.ir.program import Program
from schedgen.ir.stage_graph import chain
from schedgen.ir.transport import read_transport
from schedgen.schemes import SCHEMES, load
from schedgen.schemes.orders import ORDERS
from schedgen.schemes.scheme import Sizes
from schedgen.util.errors import UsageError
from schedgen.util.option_fields import count


class Recipe(NamedTuple):
    """What `schedgen compile` takes."""

    name: str  # of a built-in scheme
    sizes: Sizes
    options: Options
    interleave: bool
    model: Header  # whose graph and layers the schedule has

    def compile(self) -> Program:
        """The schedule; UsageError if its parts do not fit together."""
        scheme = load(self.name, self.sizes, self.options.tensor, self.interleave)
        graph, layers = self.model.model_graph, self.model.scheme.get("layers")
        if self.options.substages == 1 and graph.edges != chain(graph.stages):
            scheme = scheme._replace(edges=graph.edges, per_consumer=graph.per_consumer)
        if layers is not None:
            scheme = scheme._replace(parameters={**scheme.parameters, "layers": layers})
        return compile(scheme, self.sizes, self.options)

    @property
    def command(self) -> str:
        """The command that compiles it; GRAPH, PROFILE and MACHINE stand for the files that it needs."""
        words = [f"schedgen compile {self.name}"]
        words += [f"--{name} {_spelled(value)}" for name, value in self.sizes._asdict().items() if value is not None]
        words += ["--interleave"] * self.interleave
        for each in fields(self.options):
            value, flags = getattr(self.options, each.name), each.metadata.get("flags")
            if flags and value != each.default and not (each.name == "cost" and self.options.times):
                words.append(f"{flags[0]} {_spelled(value)}" if value is not True else flags[0])
        needs_graph = self.options.tied or self.options.replicated_stages or self.options.substages > 1
        graph = self.model.model_graph
        if needs_graph or graph.edges != chain(graph.stages) or "layers" in self.model.scheme:
            words.append("--graph GRAPH")
        words += ["--profile PROFILE"] * (self.options.times is not None)
        words += ["--machine MACHINE"] * (self.options.sums == TWO_LEVEL)
        words += [f"--transport {transport.name}"] if (transport := self.options.in_order) else []
        return " ".join([*words, "-o FILE"])


def _spelled(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{name}={number}" for name, number in value.items())
    if isinstance(value, (list, tuple)):
        return ",".join(".".join(map(str, each)) if isinstance(each, tuple) else str(each) for each in value)
    return str(value)


def recipe_of(program: Program, times: Mapping[str, Amount] | None = None, hosts: Hosts | None = None) -> Recipe:
    """The recipe of a projected program; `times`: by stage, if it may have been compiled with these; `hosts`: by rank.

    UsageError, with the reason, if it is of no built-in scheme, or its recipe compiles to something else.
    """
    header = program.header
    name = header.scheme["name"]
    if name not in SCHEMES:
        raise UsageError(f"{name} is no built-in scheme, and a schedule does not keep its functions")
    if header.lowering.get("sums") == TWO_LEVEL and hosts is None:
        raise UsageError("a schedule does not keep the hosts of its two-level sums: give --machine")
    for recipe in _guesses(header, times, hosts):
        with suppress(UsageError):
            again = recipe.compile()
            pairs = zip(again.rows.columns(), program.rows.columns(), strict=True)
            if again.header.scheme == header.scheme and all(np.array_equal(new, old) for new, old in pairs):
                return recipe
    raise UsageError("it was searched for, edited, or compiled with another profile than the one given")


def _guesses(header: Header, times: Mapping[str, Amount] | None, hosts: Hosts | None) -> Iterator[Recipe]:
    """The recipes that the header leaves open; UsageError if its order has no name that compiles."""
    sizes, options = sizes_of(header), model_options(header)
    lowering, tensor = header.lowering, header.tensor_parallel.degree
    own = load(header.scheme["name"], sizes, tensor)
    if header.n != own.order and header.n not in ORDERS:
        raise UsageError(f"its order is '{header.n}', which no --n makes")

    def of_model(forwards: list[int | list[int]]) -> tuple[Jobs, ...]:
        named: list[Jobs] = [s // tensor if isinstance(s, int) else (s[0] // tensor, s[1]) for s in forwards]
        return tuple(dict.fromkeys(named))

    options = replace(
        options,
        mode=None if header.mode == own.mode else header.mode,
        n=None if header.n == own.order else header.n,
        cost=header.cost,
        recompute=of_model(lowering["recompute"]),
        offload=of_model(lowering.get("offload", [])),
        offload_optimizer=header.offloads_optimizer,
        evict="evict" in lowering,
        sums=lowering.get("sums", ALLREDUCE),
        hosts=hosts,
        in_order=read_transport(lowering.get("transport", "mpi")),
        memory_limit=header.memory_limit,
        updates=None if header.weight_versions.updates == own.updates else header.weight_versions.updates,
        **{name: lowering[name] for name in ("weight_slots", "fan_out", "prefetch")},
    )
    by_stage = None if times is None else own_costs(times, len(header.directions))
    for of_times, interleave in product((None, by_stage)[: 1 + bool(by_stage)], (False, True)):
        if not interleave or isinstance(sizes.replicas, int):
            yield Recipe(header.scheme["name"], sizes, replace(options, times=of_times), interleave, header)


def sizes_of(header: Header) -> Sizes:
    """The sizes that a scheme was compiled for, with those that are its own; UsageError if they are none."""
    given: dict[str, Any] = {name: header.scheme.get(name) for name in Sizes._fields}
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    shards = given["shards"]
    given["shards"] = (shards,) if isinstance(shards, int) else shards
    substages = count.check("substages", header.scheme.get("substages", 1))
    return Sizes(**given)._replace(stages=header.model_stages // substages)


def model_options(header: Header) -> Options:
    """The options that say what model a schedule is for, and whether it trains it."""
    tensor = header.tensor_parallel
    return Options(
        tied=header.model_ties,
        substages=header.scheme.get("substages", 1),
        tensor=tensor.degree,
        replicated_stages=tensor.replicated,
        forward=header.is_forward,
    )
