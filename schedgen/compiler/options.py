"""`Options`: how a scheme is compiled; checked here, before any function is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from schedgen.compiler.sum_trees import ALLREDUCE, SUMS, TWO_LEVEL
from schedgen.ir.cost import Amount, read_cost
from schedgen.ir.limits import check_jobs
from schedgen.ir.transport import Transport
from schedgen.ir.weights import FLUSH, UPDATES
from schedgen.schemes.orders import ORDERS
from schedgen.schemes.replicas import dealt
from schedgen.schemes.scheme import MODES, Scheme, Sizes, no_order
from schedgen.util.arrays import Ints
from schedgen.util.errors import NeedsOption, UsageError, number_of
from schedgen.util.option_fields import count, natural, option, switch

Hosts = Callable[[int], Ints]  # from the number of workers to the host of each
Jobs = int | tuple[int, int]  # a stage, on all microbatches, or a stage and a microbatch
ALL, EXCEPT_LAST = "all", "except-last"
# The options that name forwards, and the words that they take in place of stages and microbatches.
NAMES_FORWARDS = {"recompute": (ALL, EXCEPT_LAST), "offload": (ALL,)}


def forwards(text: str) -> str | list[Jobs]:
    """Forwards from an option's text: stages, or stages and microbatches, as in 0,3.1, or a word."""
    if text in (ALL, EXCEPT_LAST):
        return text
    named: list[Jobs] = []
    for shard in text.split(","):
        stage, dot, mb = shard.partition(".")
        named.append((natural(stage), natural(mb)) if dot else natural(stage))
    return named


@dataclass(frozen=True)
class Options:
    """How a scheme is compiled. Stages are those of the model: `substages` in each stage of the scheme."""

    mode: str | None = option("--mode", "what n means; default: the scheme's own", choices=MODES)
    n: str | None = option("--n", "which job goes first; default: the scheme's own order", choices=tuple(ORDERS))
    cost: Mapping[str, float] | None = option(
        "--cost F=1,B=2", "durations that order greedy's jobs, and messages; default: F=1,B=2 or F=1,I=1,W=1", read_cost
    )
    times: Mapping[str, Amount] | None = None  # the same by stage; then `cost` is what the file says
    weight_slots: int = option("--weight-slots K", "foreign weight copies held at a time", count, 2)
    fan_out: int = option("--fan-out K", "copies of a stage, or sums, that one worker sends, others relay", count, 2)
    sums: str = option(
        "--sums", "how several owners of a stage sum its gradient: at once, or by messages along a ring, a tree, or "
        "inside hosts and then between them, which --machine or --topology says", default=ALLREDUCE, choices=SUMS,
    )  # fmt: skip
    hosts: Hosts | None = None  # for two-level sums
    prefetch: int = option("--prefetch K", "how many jobs before its SEND a receive is posted", natural, 1)
    recompute: str | Collection[Jobs] = option(
        "--recompute all|except-last|S,S.B,...",
        "forwards redone before their backward: of a stage, of a stage and a microbatch, or of all microbatches "
        "but the last; default: none",
        forwards,
        (),
    )
    offload: str | Collection[Jobs] = option(
        "--offload all|S,S.B,...",
        "forwards that keep what they save in host memory until their backward, where a job runs meanwhile: of a "
        "stage, of a stage and a microbatch, or all that are not redone; default: none",
        forwards,
        (),
    )
    offload_optimizer: bool = switch(
        "--offload-optimizer", "keep the state of optimizers in host memory, and bring it to the device for each STEP"
    )
    evict: bool = switch("--evict", "lend what forwards save, from ranks that save many to ranks that save few (BPipe)")
    memory_limit: int | None = option(
        "--memory-limit M", "saved forwards a worker may hold (greedy); default: no limit", count
    )
    tied: Collection[Sequence[int]] = ()  # lists of stages that share parameters
    updates: str | None = option(
        "--updates",
        "when weights change: once a list (flush), after every microbatch with stashed versions (stash) or with "
        "vertical sync (vertical), or after every few with two versions (2bw); default: the scheme's own",
        choices=tuple(UPDATES),
    )
    substages: int = option("", "stages of the model in each stage of the scheme, one after another", count, 1)
    tensor: int = option("--tensor T", "slices of every stage, each on a worker", count, 1)
    replicated_stages: Collection[int] = ()  # stages that all slices compute alike; the last always is
    in_order: Transport | None = None  # on which the list is to be safe
    forward: bool = switch("--forward", "forwards alone, for evaluation and prediction, on the workers of training")


def shard_counts(sizes: Sizes, options: Options) -> list[int]:
    """By stage of the model, how many shards its weights have; UsageError if `sizes.shards` does not fit."""
    stages, counts = sizes.stages * options.substages, list(sizes.shards or (1,))
    if len(counts) not in (1, stages):
        raise UsageError(f"--shards has {number_of(len(counts), 'number')}, but there are {stages} stages")
    return counts * stages if len(counts) == 1 else counts


def check_options(scheme: Scheme, sizes: Sizes, options: Options) -> None:
    """Raise UsageError if options name something that does not exist, or do not fit the scheme or one another."""
    mode, updates = options.mode or scheme.mode, options.updates or scheme.updates
    for name, value, known in (("mode", mode, MODES), ("updates", updates, tuple(UPDATES))):
        if value not in known:
            raise UsageError(f"{name} {value!r} is none of {', '.join(known)}")
    if options.n is None and scheme.n is no_order:
        raise NeedsOption(f"{scheme.name}.py defines no function n(s, b, d): define one, or choose an order with --n")
    if mode == "strict" and (scheme.cap is not None or options.memory_limit is not None):
        what = "--memory-limit" if scheme.cap is None else "cap"
        raise NeedsOption(f"{what} needs --mode greedy: a strict n leaves nothing to hold back")
    if options.forward:
        _check_forward(options)
    if options.offload_optimizer and updates != FLUSH:
        raise UsageError(f"--offload-optimizer does not go with --updates {updates}: a weight has several STEPs")
    if options.evict and options.offload:
        raise UsageError("--evict does not go with --offload: what a forward saves would go to two places")
    if options.sums != ALLREDUCE:
        _check_sums(options, max(sizes.shards or (1,)), updates)
    stages = sizes.stages * options.substages
    check_jobs(stages * options.tensor, sizes.microbatches, 3 if scheme.split else 2)
    if max(shard_counts(sizes, options)) > 1:
        _check_divided_weights(scheme, options, updates)
    if options.replicated_stages and options.tensor == 1:
        raise UsageError("replicated_stages are those that all slices compute alike: give tensor, too")
    if options.tensor > 1 and updates != FLUSH:
        raise UsageError(f"--updates {updates}: weights that have versions have no slices: leave --tensor out")
    _check_stages("replicated_stages", options.replicated_stages, stages)
    for name, words in NAMES_FORWARDS.items():
        _check_forwards(name, getattr(options, name), words, stages, sizes.microbatches)
    for tie in options.tied:
        if len(tie) < 2 or len(set(tie)) < len(tie) or not all(0 <= stage < stages for stage in tie):
            numbers = ",".join(map(str, tie))
            raise UsageError(f"tied {numbers}: a tie is two or more different stages in 0..{stages - 1}")


def _check_forwards(name: str, given: str | Collection[Any], words: Sequence[str], stages: int, batches: int) -> None:
    """Raise UsageError unless an option that names forwards has one of its words, or names forwards that exist."""
    listed: Collection[Any] = () if isinstance(given, str) and given in words else given
    jobs = [each if isinstance(each, tuple) else (each, 0) for each in listed]
    are_pairs = all(len(pair) == 2 and all(isinstance(number, Integral) for number in pair) for pair in jobs)
    if isinstance(listed, str) or not are_pairs:
        known = ", ".join(map(repr, words))
        raise UsageError(f"{name} {given!r} is not {known}, stages, or pairs of a stage and a microbatch")
    _check_stages(f"--{name}", [stage for stage, _ in jobs], stages)
    for stage, mb in jobs:
        if not 0 <= mb < batches:
            raise UsageError(f"--{name} {stage}.{mb}: there is no such microbatch in 0..{batches - 1}")


def _check_stages(name: str, named: Collection[int], stages: int) -> None:
    for stage in named:
        if not 0 <= stage < stages:
            raise UsageError(f"{name} {stage}: there is no such stage in 0..{stages - 1}")


def _check_forward(options: Options) -> None:
    for name, given, why in (
        ("--recompute", options.recompute, "there is no backward to redo a forward for"),
        ("--offload", options.offload, "there is no backward to bring anything back for"),
        ("--offload-optimizer", options.offload_optimizer, "no optimizer steps"),
        ("--evict", options.evict, "forwards save nothing for a backward"),
        ("--memory-limit", options.memory_limit is not None, "forwards save nothing for a backward"),
        (f"--updates {options.updates}", options.updates not in (None, FLUSH), "weights do not change"),
    ):
        if given:
            raise UsageError(f"{name} does not go with --forward: {why}")


def _check_sums(options: Options, shards: int, updates: str) -> None:
    for given, why in (
        (options.forward, "--forward: there are no gradients"),
        (shards > 1, "--shards: a shard has one owner"),
        (options.tensor > 1, "--tensor: the slices of a stage are summed together"),
        (options.tied, "ties: their sum is over all stages that share parameters"),
        (updates != FLUSH, f"--updates {updates}: an update does not wait for the list's end"),
    ):
        if given:
            raise UsageError(f"--sums {options.sums} does not go with {why}")
    if options.sums == TWO_LEVEL and options.hosts is None:
        raise NeedsOption("--sums two-level needs --machine FILE or --topology HxD, which say where hosts end")


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
        scheme = scheme._replace(n=dealt(ORDERS[options.n](sizes), scheme.replicas), order=options.n)
    if options.n is not None or options.mode not in (None, scheme.mode):  # these marks belong to the scheme's own order
        scheme = scheme._replace(unsplit_backward=None, delayed_send=None)
    return scheme._replace(mode=options.mode or scheme.mode, updates=options.updates or scheme.updates)
