"""The contract of a scheme: two functions, w (where jobs run) and n (which goes first), and its optional settings.

Functions are called on open grids: s has shape (S, 1, 1), b (1, B, 1) and d (1, 1, D), and what they return is
broadcast to (S, B, D). A w that takes a fourth argument has grids of four axes. A function that raises on arrays is
called job by job, which is slower. They should be pure functions of their arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from schedgen.ir.weights import FLUSH
from schedgen.util.errors import UsageError, number_of
from schedgen.util.option_fields import count

Function = Callable[..., Any]
MODES = ("greedy", "strict")  # what n means


class Sizes(NamedTuple):
    """The sizes a schedule is compiled for; None where the user left one out."""

    stages: int
    microbatches: int
    workers: int | None = None
    groups: int | None = None
    chunks: int | None = None
    group: int | None = None  # microbatches that pass a stage one after another
    replicas: int | tuple[int, ...] | None = None  # of the whole scheme, or of each stage
    shards: tuple[int, ...] | None = None  # parts that weights are divided into: for all stages, or for each

    def spread(self, name: str, what: str) -> int:
        """W of a scheme that spreads its "stages" or "microbatches": by default as many; UsageError for more."""
        count = int(getattr(self, what))
        workers = count if self.workers is None else self.workers
        if workers > count:
            one = what.removesuffix("s" if what == "stages" else "es")
            few = number_of(count, one)
            raise UsageError(f"{name} gives every worker at least one {one}: {workers} workers do not fit {few}")
        return workers

    def checked(self) -> Sizes:
        """The sizes as Python ints; UsageError if one is no whole number, or below 1."""
        whole: dict[str, Any] = {}
        for name, value in self._asdict().items():
            if isinstance(value, (list, tuple)):
                whole[name] = tuple(count.check(name, each) for each in value)
            elif value is not None or name in ("stages", "microbatches"):
                whole[name] = count.check(name, value)
        return self._replace(**whole)

    def per_slice(self, tensor: int, option: str = "tensor") -> Sizes:
        """The sizes for one of `tensor` slices, or what `option` counts: workers divided by it; UsageError if they do
        not divide.
        """
        if self.workers is None:
            return self
        if self.workers % tensor:
            raise UsageError(f"--{option} {tensor}: {self.workers} workers are no multiple of it")
        return self._replace(workers=self.workers // tensor)

    def per_replica(self) -> Sizes:
        """The sizes for the replica with most microbatches, of a number of replicas; UsageError if these do not fit."""
        assert isinstance(self.replicas, int)
        if self.microbatches < self.replicas:
            few = number_of(self.microbatches, "microbatch")
            raise UsageError(f"--replicas {self.replicas}: each needs a microbatch, not {few} for all")
        share = -(-self.microbatches // self.replicas)
        return self.per_slice(self.replicas, "replicas")._replace(microbatches=share, replicas=None)


class Scheme(NamedTuple):
    """A placement and an order.

    w(s, b, d) -> (weights_worker, compute_worker). Part k of divided weights is k workers after the one that
    w names, unless w is w(s, b, d, k). Slice t of T is on worker r T + t, where w names r, unless w is w(s, b, d, t).
    n(s, b, d) -> number, the smaller the sooner.
    """

    name: str
    workers: int | None  # None: as many as w names
    w: Function
    n: Function
    order: str  # what n is called
    mode: str  # what n means: "greedy" or "strict"
    split: bool = False  # whether the backward is two jobs: I, gradient of the input, and W, of the weights
    unsplit_backward: Function | None = None  # (s, b) -> whether the backward is unsplit: I and W are one job
    delayed_send: Function | None = None  # (s, b) -> whether x.s.b leaves only after the worker's next job (strict)
    parameters: Mapping[str, int | Sequence[int]] = {}  # the scheme's own, for the file's header
    cap: Function | None = None  # s -> the most microbatches in flight on a stage and worker (greedy)
    edges: tuple[tuple[int, int], ...] | None = None  # (producer, consumer); None: the chain
    per_consumer: tuple[int, ...] = ()  # stages that give each of several consumers an output of its own
    updates: str = FLUSH  # when weights change: one of UPDATES
    accumulated: int | None = None  # with updates 2bw: a replica's microbatches of an update; None: as many as stages
    by_slice: bool = False  # w takes the slice t of a stage
    replicas: int = 1  # groups of workers to which microbatches are dealt out: see `replicated`


def no_order(s: Any, b: Any, d: Any) -> Any:
    """A placeholder for the n of a scheme that defines none, so that --n is needed."""
    raise NotImplementedError


def keyword_arguments(function: Any) -> list[inspect.Parameter]:
    """The keyword-only arguments of a function; none if it is no function, or does not tell them."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


def bind_sizes(function: Function, sizes: Mapping[str, Any]) -> Function:
    """`function` with its keyword-only arguments (stages, workers, ...) bound; UsageError if a size is missing."""
    bound = {}
    name = getattr(function, "__name__", "a function")
    for parameter in keyword_arguments(function):
        if sizes.get(parameter.name) is not None:
            bound[parameter.name] = sizes[parameter.name]
        elif parameter.default is parameter.empty:
            raise UsageError(
                f"{name} asks for '{parameter.name}': give --{parameter.name.replace('_', '-')}, or a default value"
                if parameter.name in sizes
                else f"{name} asks for '{parameter.name}', which is none of {', '.join(sizes)}"
            )
    return partial(function, **bound) if bound else function


def fourth_argument(w: Function) -> str:
    """The name of w's fourth argument: t, the slice of a stage, or k, the part of its weights; empty if w has three."""
    try:
        parameters = inspect.signature(w).parameters.values()
    except (TypeError, ValueError):
        return ""
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return (*positional, *[""] * 4)[3]
