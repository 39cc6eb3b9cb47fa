"""Place: a scheme for given sizes becomes a `PlacedScheme`, its functions evaluated on every job and stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedgen.compiler.options import Options, apply_options, shard_counts
from schedgen.compiler.sum_trees import sum_trees
from schedgen.compiler.user_functions import at_job, evaluate, evaluate_marks
from schedgen.ir.cost import by_stage, own_costs, whole_numbers
from schedgen.ir.instructions import B, F, W
from schedgen.ir.job_graph import JobGraph, job_graph
from schedgen.ir.limits import check_jobs, check_workers
from schedgen.ir.stage_graph import StageGraph, chain, check_edges
from schedgen.ir.tensor_parallel import TensorParallel
from schedgen.schemes.scheme import Scheme, Sizes, fourth_argument
from schedgen.util.arrays import Flags, Ints, Numbers, Times
from schedgen.util.errors import UsageError, raised

MARKS = ("unsplit_backward", "delayed_send", "recompute", "offload")  # the fields of a PlacedScheme that mark forwards


@dataclass(frozen=True, eq=False)
class PlacedScheme:
    """A scheme for given sizes, with D directions, S stages and B microbatches.

    `place` makes one with the scheme's stages, and `refine` turns it into one with the program's stages.
    """

    scheme: Scheme
    options: Options
    cost: dict[str, float]  # duration of each direction; compilation computes with `lengths`
    workers: int
    weights: Ints  # (D, S, B): the worker a job gets its weights from; of divided weights the owner of shard 0
    compute: Ints  # (D, S, B): the worker a job runs on; both have a last axis of T slices until they are refined
    n: NDArray[Any]  # (D, S, B)
    graph: StageGraph
    shard_owners: tuple[tuple[int, ...], ...]  # by stage, the owner of each shard; empty: no weights are divided
    unsplit_backward: Flags  # (S, B): whether the backward is unsplit: I and W are one job
    delayed_send: Flags  # (S, B): whether x.s.b leaves only after the worker's next job
    recompute: Flags  # (S, B): whether the forward keeps nothing and is redone before the backward
    offload: Flags  # (S, B): whether what the forward saves is in host memory until the backward
    tensor_parallel: TensorParallel
    caps: Numbers | None = None  # by stage, the most microbatches in flight on a worker
    tied: tuple[tuple[int, ...], ...] = ()  # stages that share parameters

    @cached_property
    def hosts(self) -> Ints:
        """By rank, the number of its host; 0 where the options do not say it."""
        return np.zeros(self.workers, np.int32) if self.options.hosts is None else self.options.hosts(self.workers)

    def sum_trees(self, owners: Sequence[int]) -> Numbers:
        """The trees along which these owners of a stage sum each part of its gradient: see `compiler.sum_trees`."""
        return sum_trees(self.options.sums, self.hosts[list(owners)], self.options.fan_out)

    @cached_property
    def lengths(self) -> Mapping[str, Times]:
        """How long each direction's jobs take by stage, (S, 1), slices their share; sums are exact where they can."""
        T, stages, times = self.tensor_parallel.degree, self.graph.stages, self.options.times
        if times is None:
            costs = whole_numbers(self.cost, self.compute.size)
            return {name: by_stage(cost, stages)[:, None] for name, cost in costs.items()}
        parts = np.where(self.tensor_parallel.sliced, T, 1)
        seconds = {name: np.repeat(by_stage(time, stages // T), T) / parts for name, time in times.items()}
        own = own_costs(seconds, len(self.compute))
        unit = min(least for time in own.values() if (least := time.min()) > 0) / 1000
        return {name: np.rint(time / unit)[:, None] for name, time in own.items()}

    @property
    def job_graph(self) -> JobGraph:
        """What each job waits for."""
        directions, _, microbatches = self.compute.shape
        return job_graph(self.graph, microbatches, directions, self.tensor_parallel.summed_stages)

    @property
    def redone(self) -> Flags:
        """(S, B): whether the forward is redone before the backward, as it always is if that runs on another worker."""
        elsewhere: Flags = self.compute[F] != self.compute[min(B, len(self.compute) - 1)]
        return elsewhere | self.recompute


def place(scheme: Scheme, sizes: Sizes, options: Options) -> PlacedScheme:
    """Evaluate the scheme, in the order that the options choose; UsageError if a function returns invalid values."""
    scheme, stages, batches = apply_options(scheme, sizes, options), sizes.stages, sizes.microbatches
    directions = 3 if scheme.split else 2
    limits = caps(scheme, stages)
    counts = shard_counts(sizes, options)[:: options.substages]
    placement = place_jobs(scheme, stages, batches, directions, counts, options.tensor)
    check_workers(placement.workers, stages * options.substages * options.tensor)
    edges = chain(stages) if scheme.edges is None else check_edges(scheme.edges, stages)
    return PlacedScheme(
        scheme=scheme,
        options=options,
        cost=own_costs(options.cost, 1 if options.forward else directions),
        **placement._asdict(),
        n=priorities(scheme, stages, batches, directions),
        graph=StageGraph(stages, edges, scheme.per_consumer),
        caps=limits,
        unsplit_backward=evaluate_marks("unsplit_backward", scheme.unsplit_backward, stages, batches),
        delayed_send=evaluate_marks("delayed_send", scheme.delayed_send, stages, batches),
        recompute=np.zeros((stages, batches), bool),
        offload=np.zeros((stages, batches), bool),
        tensor_parallel=TensorParallel(1, (), stages),
    )


class Placement(NamedTuple):
    """w evaluated on every job."""

    weights: Ints  # (D, S, B, T) for T slices; of divided weights, the owner of shard 0
    compute: Ints  # (D, S, B, T)
    workers: int
    shard_owners: tuple[tuple[int, ...], ...]  # as in `PlacedScheme`


def place_jobs(
    scheme: Scheme, stages: int, microbatches: int, directions: int, counts: Sequence[int] = (1,), tensor: int = 1
) -> Placement:
    """Evaluate w on every job; `counts`: shards of each stage's weights, `tensor`: slices of each stage."""
    divided, takes_shard = max(counts) > 1, fourth_argument(scheme.w) == "k"
    fourth_axis = [tensor] if scheme.by_slice else [max(counts)] if takes_shard else []
    slices = 1 if scheme.by_slice else tensor  # how many slices each job that w places stands for
    shape = (stages, microbatches, directions, *fourth_axis)
    check_jobs(stages, microbatches, directions * slices * (fourth_axis or [1])[0])
    weights, compute = evaluate("w", scheme.w, shape, values=2)
    for array in (weights, compute):
        if array.dtype.kind == "f":
            wrong = f"{array.dtype} ({at_job(array, 0)})"
            raise UsageError(f"w must return whole numbers, not {wrong}: use // instead of /")
    weights, compute = weights.astype(np.int64), compute.astype(np.int64)
    if takes_shard:
        for job in np.flatnonzero(compute != compute[..., :1])[:1]:
            raise UsageError(
                f"w must compute a job on one worker, whatever the shard k of the weights: {at_job(compute, job)}"
            )
        compute = compute[..., 0]
    named = max(int(weights.max()), int(compute.max())) + 1 if scheme.workers is None else scheme.workers
    workers = named * slices
    check_workers(workers, stages * tensor)
    check_workers(workers, sum(counts), "shards of weights")
    for name, array in (("weights", weights), ("compute", compute)):
        for job in np.flatnonzero((array < 0) | (array >= named))[:1]:
            raise UsageError(f"w puts {name} on a worker outside 0..{named - 1}: {at_job(array, job)}")
    if directions == 3:
        for s, b, *_ in np.argwhere(compute[:, :, B] != compute[:, :, W])[:1].tolist():
            raise UsageError(f"w puts I({s}, {b}) and W({s}, {b}) on different workers: W needs what I leaves there")
    owners = _shard_owners(weights, counts, takes_shard, named) if divided else ()
    if takes_shard:
        weights = weights[..., 0]

    def by_slice(array: NDArray[Any]) -> Ints:
        turned = np.moveaxis(array, 2, 0)
        if not scheme.by_slice:
            turned = turned[..., None] * tensor + np.arange(tensor)
        return np.ascontiguousarray(turned, np.int32)

    return Placement(by_slice(weights), by_slice(compute), workers, owners)


def _shard_owners(weights: Ints, counts: Sequence[int], takes_shard: bool, workers: int) -> tuple[tuple[int, ...], ...]:
    """By stage, the owner of each shard of its weights; `weights`: (S, B, D), and by shard if w takes one."""
    owners = []
    for s, count in enumerate(counts):
        if (weights[s] != weights[s, :1, :1]).any():
            raise UsageError(
                f"--shards: w names several owners of the weights of stage {s}; each shard needs one owner, as in fsdp"
            )
        first = weights[s, 0, 0]
        owners.append(tuple(first[:count].tolist() if takes_shard else ((first + np.arange(count)) % workers).tolist()))
    return tuple(owners)


def priorities(scheme: Scheme, stages: int, microbatches: int, directions: int) -> NDArray[Any]:
    """n evaluated on every job, (D, S, B)."""
    (n,) = evaluate("n", scheme.n, (stages, microbatches, directions), values=1)
    good = np.isfinite(n)
    if not good.all():
        raise UsageError(f"n must return finite numbers, not {at_job(n, int(np.argmin(good)))}")
    return np.ascontiguousarray(n.transpose(2, 0, 1))


def caps(scheme: Scheme, stages: int) -> Numbers | None:
    """cap(s) of every stage; None if the scheme has no cap."""
    if scheme.cap is None:
        return None
    values = []
    for stage in range(stages):
        try:
            value = scheme.cap(stage)
        except (Exception, SystemExit) as error:
            raise UsageError(f"cap({stage}) raised {raised(error)}") from None
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise UsageError(f"cap({stage}) must be a whole number of at least 1, not {value!r}")
        values.append(int(value))
    return np.array(values, np.int64)
