"""`Options`: how a scheme is compiled; checked here, before any function is evaluated."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from schedgen.ir.limits import check_jobs
from schedgen.ir.weight_versions import FLUSH, UPDATES
from schedgen.schemes.orders import ORDERS
from schedgen.schemes.scheme import Scheme, Sizes, check_whole, no_order
from schedgen.util.errors import NeedsOption, UsageError, number_of

LEAST = {"weight_slots": 1, "fan_out": 1, "prefetch": 0, "substages": 1, "tensor": 1, "memory_limit": 1}
Redone = int | tuple[int, int]  # a stage, on all microbatches, or a stage and a microbatch


@dataclass(frozen=True)
class Options:
    """How a scheme is compiled. Stages are those of the model: `substages` in each stage of the scheme."""

    mode: str | None = None  # "greedy" or "strict": what n means; None: the scheme's own
    n: str | None = None  # an order, one of ORDERS; None: the scheme's own
    cost: Mapping[str, float] | None = None  # duration of each direction, by which jobs are ordered; None: the default
    weight_slots: int = 2  # foreign weight copies that a worker may hold at a time
    fan_out: int = 2  # copies of a stage's weights, or sums of its gradients, through one worker at a time
    prefetch: int = 1  # jobs by which a receive comes before its SEND
    # Forwards that keep nothing and are redone before the backward: "all", "except-last" (microbatch), or which.
    recompute: str | Collection[Redone] = ()
    memory_limit: int | None = None  # saved forwards that a worker may hold at a time (greedy)
    tied: Collection[Sequence[int]] = ()  # lists of stages that share parameters
    updates: str | None = None  # when weights change, one of UPDATES; None: the scheme's own
    substages: int = 1  # stages of the model in each stage of the scheme, one after another
    tensor: int = 1  # slices of each stage of the model
    replicated_stages: Collection[int] = ()  # stages that all slices compute alike; the last always is
    forward: bool = False  # forwards alone, for evaluation and prediction, on the workers of training


def shard_counts(sizes: Sizes, options: Options) -> list[int]:
    """By stage of the model, how many shards its weights have; UsageError if `sizes.shards` does not fit."""
    stages, counts = sizes.stages * options.substages, list(sizes.shards or (1,))
    if len(counts) not in (1, stages):
        raise UsageError(f"--shards has {number_of(len(counts), 'number')}, but there are {stages} stages")
    return counts * stages if len(counts) == 1 else counts


def whole_options(options: Options) -> Options:
    """The options with their whole numbers as Python ints; UsageError if one is none, or too small."""
    checked: dict[str, Any] = {
        name: check_whole(name, getattr(options, name), least)
        for name, least in LEAST.items()
        if name != "memory_limit" or options.memory_limit is not None
    }
    return replace(options, **checked)


def check_options(scheme: Scheme, sizes: Sizes, options: Options) -> None:
    """Raise UsageError if options name something that does not exist, or do not fit the scheme or one another."""
    mode = options.mode or scheme.mode
    if mode not in ("greedy", "strict"):
        raise UsageError(f"there is no mode '{mode}': it is greedy or strict")
    if options.n is not None and options.n not in ORDERS:
        raise UsageError(f"there is no order '{options.n}': it is one of {', '.join(ORDERS)}")
    if options.n is None and scheme.n is no_order:
        raise NeedsOption(f"{scheme.name}.py defines no function n(s, b, d): define one, or choose an order with --n")
    updates = options.updates or scheme.updates
    if updates not in UPDATES:
        raise UsageError(f"there are no updates '{updates}': they are one of {', '.join(UPDATES)}")
    if mode == "strict" and (scheme.cap is not None or options.memory_limit is not None):
        what = "--memory-limit" if scheme.cap is None else "cap"
        raise NeedsOption(f"{what} needs --mode greedy: a strict n leaves nothing to hold back")
    if options.forward:
        _check_forward(options)
    stages = sizes.stages * options.substages
    check_jobs(stages * options.tensor, sizes.microbatches, 3 if scheme.split else 2)
    if max(shard_counts(sizes, options)) > 1:
        _check_divided_weights(scheme, options, updates)
    if options.replicated_stages and options.tensor == 1:
        raise UsageError("replicated_stages are those that all slices compute alike: give tensor, too")
    if options.tensor > 1 and updates != FLUSH:
        raise UsageError(f"--updates {updates}: weights that have versions have no slices: leave --tensor out")
    is_word = isinstance(options.recompute, str) and options.recompute in ("all", "except-last")
    listed: Collection[Any] = () if is_word else options.recompute
    redone = [each if isinstance(each, tuple) else (each, 0) for each in listed]
    are_pairs = all(len(pair) == 2 and all(isinstance(number, Integral) for number in pair) for pair in redone)
    if isinstance(listed, str) or not are_pairs:
        raise UsageError(
            f"recompute {options.recompute!r} is not 'all', 'except-last', stages, or pairs of a stage and a microbatch"
        )
    for option, named in (("replicated_stages", options.replicated_stages), ("--recompute", [s for s, _ in redone])):
        for stage in named:
            if not 0 <= stage < stages:
                raise UsageError(f"{option} {stage}: there is no such stage in 0..{stages - 1}")
    for stage, mb in redone:
        if not 0 <= mb < sizes.microbatches:
            raise UsageError(f"--recompute {stage}.{mb}: there is no such microbatch in 0..{sizes.microbatches - 1}")
    for tie in options.tied:
        if len(tie) < 2 or len(set(tie)) < len(tie) or not all(0 <= stage < stages for stage in tie):
            numbers = ",".join(map(str, tie))
            raise UsageError(f"tied {numbers}: a tie is two or more different stages in 0..{stages - 1}")


def _check_forward(options: Options) -> None:
    for option, given, why in (
        ("--recompute", options.recompute, "there is no backward to redo a forward for"),
        ("--memory-limit", options.memory_limit is not None, "forwards save nothing for a backward"),
        (f"--updates {options.updates}", options.updates not in (None, FLUSH), "weights do not change"),
    ):
        if given:
            raise UsageError(f"{option} does not go with --forward: {why}")


def _check_divided_weights(scheme: Scheme, options: Options, updates: str) -> None:
    if options.substages > 1:
        raise UsageError(
            f"--shards: each stage of the scheme is {options.substages} stages of the model, whose weights are not "
            "divided: give as many --stages as the model has, or leave --shards out"
        )
    if scheme.by_slice:
        raise UsageError("--shards: w takes the tensor slice t of a stage, not the shard k of its weights")
    if options.tied or updates != FLUSH or options.tensor > 1:
        what = f"--updates {updates}: an owner steps the weights of a stage"
        what = "ties: stages that share parameters have their weights" if options.tied else what
        what = "--tensor: each slice of a stage has its weights" if options.tensor > 1 else what
        raise UsageError(f"--shards does not go with {what} as a whole")


def apply_options(scheme: Scheme, sizes: Sizes, options: Options) -> Scheme:
    """The scheme with the order, the mode and the updates that the options give in place of its own."""
    if options.n is not None:
        scheme = scheme._replace(n=ORDERS[options.n](sizes), order=options.n)
    if options.n is not None or options.mode not in (None, scheme.mode):  # these marks belong to the scheme's own order
        scheme = scheme._replace(unsplit_backward=None, delayed_send=None)
    return scheme._replace(mode=options.mode or scheme.mode, updates=options.updates or scheme.updates)
