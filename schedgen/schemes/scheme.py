"""What a scheme is, and its w and n evaluated on every job.

A scheme is two functions, called once on open grids of s, b and d with shapes
(S, 1, 1), (1, B, 1) and (1, 1, D); what they return is broadcast to (S, B, D).
A w that takes t as well, the shard of a stage, has grids of four axes.
A function that cannot take arrays is called job by job: same result, slower.
Both are turned round to (D, S, B), the shape everything else uses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from schedgen.util.errors import UsageError

Function = Callable[..., Any]


class Sizes(NamedTuple):
    """The sizes a schedule is compiled for; None where the user left one open."""

    stages: int
    microbatches: int
    workers: int | None = None
    groups: int | None = None
    chunks: int | None = None
    replicas: tuple[int, ...] | None = None  # of each stage
    shards: tuple[int, ...] | None = None  # parts that the weights of all stages, or of each, are divided into


class Scheme(NamedTuple):
    """A placement and an order, with what they need to be compiled.

    w(s, b, d) -> (weights_worker, compute_worker); n(s, b, d) -> number, the
    smaller the sooner. Where weights are divided, part k lies k workers behind
    w's; w(s, b, d, k) says itself where it lies. `cap(s)`: at most so many microbatches in flight on a
    stage, for each worker that computes it.
    """

    name: str
    workers: int | None  # None: as many as w names
    w: Function
    n: Function
    order: str  # what n is called
    mode: str  # what n means: "greedy" or "strict"
    split: bool = False  # whether the backward is two jobs: I, gradient of the input, and W, of the weights
    whole: Function | None = None  # where it is split: whole(s, b), microbatches whose I and W are one job after all
    paired: Function | None = None  # paired(s, b): x.s.b leaves only when the worker's next job is done too (strict)
    parameters: Mapping[str, int | Sequence[int]] = {}  # the scheme's own, for the file's header
    cap: Function | None = None
    edges: tuple[tuple[int, int], ...] | None = None  # None: the chain
    apart: tuple[int, ...] = ()  # stages of whose output each of several consumers reads a part of its own
    updates: str = "flush"  # when weights change: one of UPDATES
    by_shard: bool = False  # w(s, b, d, t): it places every shard of a stage itself


def fill(function: Function, options: Mapping[str, Any]) -> Function:
    """`function` with its keyword-only arguments (stages, workers, ...) bound to the options."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return function
    bound = {}
    name = getattr(function, "__name__", "a function")
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY:
            if options.get(parameter.name) is None and parameter.default is parameter.empty:
                raise UsageError(
                    f"{name} asks for '{parameter.name}': give --{parameter.name.replace('_', '-')}"
                    if parameter.name in options
                    else f"{name} asks for '{parameter.name}', which is none of {', '.join(options)}"
                )
            if options.get(parameter.name) is not None:
                bound[parameter.name] = options[parameter.name]
    return partial(function, **bound) if bound else function


def fourth(w: Function) -> str:
    """The name of w's fourth argument: t, the shard of a stage, or k, the part of its weights; empty: it has three."""
    try:
        parameters = inspect.signature(w).parameters.values()
    except (TypeError, ValueError):
        return ""
    positional = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return (*positional, *[""] * 4)[3]
