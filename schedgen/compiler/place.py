"""Place: w and n of a scheme, evaluated on every job."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedgen.ir.instructions import DIRECTIONS, B, Ints, W
from schedgen.ir.limits import MOST_PAIRS
from schedgen.schemes.scheme import Function, Scheme, fourth
from schedgen.util.errors import SlowScheme, UsageError, raised
from schedgen.util.progress import over

MOST_WORKERS = 2**20


MOST_JOBS = 2**27  # about a hundred bytes each


class Placement(NamedTuple):
    """w on every job."""

    weights: Ints  # (D, S, B, T) for T shards; of divided weights, where part 0 is
    compute: Ints  # (D, S, B, T)
    workers: int
    shards: tuple[tuple[int, ...], ...]  # by stage, the owner of each part of its weights; empty: no stage is divided


def place(
    scheme: Scheme,
    stages: int,
    microbatches: int,
    directions: int,
    shards: Sequence[int] | None = None,
    tensor: int = 1,
) -> Placement:
    """`shards`: parts of each stage's weights; `tensor`: shards of each stage.

    Where w takes no t, shard t of what it puts on worker r is on worker r T + t.
    """
    counts = [1] * stages if shards is None else list(shards)
    if scheme.by_shard and max(counts) > 1:
        raise UsageError("--shards divides the weights of a stage: w takes the shard t of a stage, and no part k")
    own = fourth(scheme.w) == "k"
    more = [tensor] if scheme.by_shard else [max(counts)] if own else []
    shape, copies = (stages, microbatches, directions, *more), 1 if scheme.by_shard else tensor
    if math.prod(shape) * copies > MOST_JOBS:
        raise UsageError(f"{stages} stages x {microbatches} microbatches are more than {MOST_JOBS} jobs: too many")
    weights, compute = _evaluate("w", scheme.w, shape, parts=2)
    for part in (weights, compute):
        if not np.issubdtype(part.dtype, np.integer):
            raise UsageError(f"w must return whole numbers, not {part.dtype} ({_at(part, 0)}): use // instead of /")
    if own:
        for job in np.flatnonzero(compute != compute[..., :1])[:1]:
            raise UsageError(f"w computes a job on one worker, whatever the part k of the weights: {_at(compute, job)}")
        compute, parts = compute[..., 0], weights
        weights = weights[..., 0]
    workers = scheme.workers
    if workers is None:
        workers = max(int((parts if own else weights).max()), int(compute.max())) + 1
    ranks = workers * copies
    if ranks > MOST_WORKERS or ranks * max(sum(counts), stages * tensor) > MOST_PAIRS:
        raise UsageError(f"{ranks} workers and {stages} stages are too many: {MOST_WORKERS} workers at the most")
    for name, part in (("weights", parts if own else weights), ("compute", compute)):
        wrong = np.flatnonzero((part < 0) | (part >= workers))
        if len(wrong):
            raise UsageError(f"w puts {name} on a worker outside 0..{workers - 1}: {_at(part, int(wrong[0]))}")
    if directions == 3:
        for s, b, *_ in np.argwhere(compute[:, :, B] != compute[:, :, W])[:1].tolist():
            raise UsageError(f"w puts I({s}, {b}) and W({s}, {b}) on different workers: W needs what I leaves there")
    found: list[tuple[int, ...]] = []
    for s, count in enumerate(counts if max(counts) > 1 else ()):
        if (weights[s] != weights[s, 0, 0]).any() or (own and (parts[s] != parts[s, :1, :1]).any()):
            raise UsageError(
                f"--shards: several workers own all weights of stage {s}; each part has one owner, as in fsdp"
            )
        first = int(weights[s, 0, 0])
        found.append(tuple(parts[s, 0, 0, :count].tolist() if own else ((first + k) % workers for k in range(count))))
    turned = [np.moveaxis(part, 2, 0) for part in (weights, compute)]
    if not scheme.by_shard:
        turned = [part[..., None] * tensor + np.arange(tensor) for part in turned]
    turned = [np.ascontiguousarray(part, np.int32) for part in turned]
    return Placement(turned[0], turned[1], ranks, tuple(found))


def priorities(scheme: Scheme, stages: int, microbatches: int, directions: int) -> NDArray[np.generic]:
    """n on every job, (D, S, B)."""
    (n,) = _evaluate("n", scheme.n, (stages, microbatches, directions), parts=1)
    good = np.isfinite(n) if np.issubdtype(n.dtype, np.number) and np.isrealobj(n) else np.zeros(n.shape, bool)
    if not good.all():
        raise UsageError(f"n must return finite numbers, not {_at(n, int(np.argmin(good)))}")
    return np.ascontiguousarray(n.transpose(2, 0, 1))


def marks(function: Function | None, stages: int, microbatches: int) -> NDArray[np.bool_]:
    """A function of s and b, whole or paired, on every stage and microbatch, (S, B); none marks nothing."""
    if function is None:
        return np.zeros((stages, microbatches), bool)
    s, b = np.ix_(np.arange(stages), np.arange(microbatches))
    return np.broadcast_to(np.asarray(function(s, b), bool), (stages, microbatches))


def caps(scheme: Scheme, stages: int) -> list[int] | None:
    """cap(s) for every stage; None where the scheme has none."""
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
    return values


def _evaluate(name: str, function: Function, shape: tuple[int, ...], parts: int) -> list[NDArray[Any]]:
    grids = np.ix_(*(np.arange(length) for length in shape))
    try:
        returned = function(*grids)
    except (Exception, SystemExit) as error:  # not made for arrays, or wrong: job by job tells which
        columns = _job_by_job(name, function, shape, parts)
        warnings.warn(
            f"{name} takes no arrays ({type(error).__name__}), so it was called for each of {np.prod(shape)} jobs; "
            "with NumPy in place of if, min and the like, as in np.where(s < 2, 0, 1), it is called once",
            SlowScheme,
            stacklevel=2,
        )
        return columns
    if parts == 1:
        returned = (returned,)
    elif not (isinstance(returned, (tuple, list)) and len(returned) == parts):
        raise UsageError(f"w must return a pair (weights_worker, compute_worker), not {_brief(returned)}")
    return [_broadcast(name, value, shape) for value in returned]


def _broadcast(name: str, value: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    try:
        array = np.asarray(value)
    except ValueError:
        raise UsageError(f"{name} must return numbers, not {_brief(value)}") from None
    try:
        if array.dtype == object or array.dtype == bool or array.dtype.kind in "USV":
            raise UsageError(f"{name} must return numbers, not {_brief(value)}")
        return np.broadcast_to(array, shape)
    except ValueError:
        raise UsageError(
            f"{name} returned an array of shape {np.shape(value)}, "
            f"which does not fit (stages, microbatches, directions{', shards' if len(shape) > 3 else ''}) = {shape}"
        ) from None


def _job_by_job(name: str, function: Function, shape: tuple[int, ...], parts: int) -> list[NDArray[Any]]:
    columns: list[list[Any]] = [[] for _ in range(parts)]
    for job in over(itertools.product(*(range(length) for length in shape)), name, math.prod(shape)):
        try:
            returned = function(*job)
        except (Exception, SystemExit) as error:
            raise UsageError(f"{name}{_words(job, shape)} raised {raised(error)}") from None
        values = (returned,) if parts == 1 else returned
        if not (isinstance(values, (tuple, list)) and len(values) == parts):
            raise UsageError(
                f"w{_words(job, shape)} must return a pair (weights_worker, compute_worker), not {_brief(returned)}"
            )
        for column, value in zip(columns, values, strict=True):
            if isinstance(value, (bool, str)) or not np.isscalar(value) or not np.isreal(value):
                raise UsageError(f"{name}{_words(job, shape)} must return numbers, not {_brief(returned)}")
            column.append(value)
    return [np.asarray(column).reshape(shape) for column in columns]


def _words(job: tuple[int, ...], shape: tuple[int, ...]) -> str:
    shard = f", shard {job[3]}" if len(job) > 3 else ""
    return f"(s={job[0]}, b={job[1]}, d={DIRECTIONS[shape[2]][job[2]]}{shard})"


def _at(part: NDArray[Any], flat: int) -> str:
    job = tuple(int(i) for i in np.unravel_index(flat, part.shape))
    return f"{part[job]} for {_words(job, part.shape)}"


def _brief(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
