"""A user's functions evaluated on every job: called with arrays, or job by job; mistakes become UsageError.

A job is (s, b, d), or (s, b, d, t) where w takes a fourth argument; arrays have these axes, in this order.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedgen.ir.instructions import DIRECTIONS
from schedgen.schemes.scheme import Function
from schedgen.util.arrays import Flags
from schedgen.util.errors import SlowScheme, UsageError, raised
from schedgen.util.progress import over

COMPARED = 64  # single jobs, at the most, whose numbers are compared with those in arrays of all jobs


NUMBERS, MARKS = "iuf", "b"  # kinds of dtypes that a function may return
_WORDS = {NUMBERS: "numbers", MARKS: "True or False"}


def evaluate(
    name: str, function: Function, shape: tuple[int, ...], values: int, kinds: str = NUMBERS
) -> list[NDArray[Any]]:
    """The `values` arrays of `shape` that `function` returns; if it raises on arrays, it is called for every job.

    UsageError if it returns anything but `kinds`, or if a job alone gets another value than in arrays.
    """
    try:
        returned = function(*np.ix_(*map(np.arange, shape)))
    except (Exception, SystemExit) as error:  # not made for arrays, or wrong: calling it job by job tells which
        columns = _job_by_job(name, function, shape, values, kinds)
        warnings.warn(
            f"{name} takes no arrays ({type(error).__name__}), so it was called for each of {math.prod(shape)} jobs; "
            "with NumPy in place of if, in, min and the like, as np.where(s < 2, 0, 1), it is called with arrays",
            SlowScheme,
            stacklevel=2,
        )
        return columns
    arrays = [_broadcast(name, value, shape, kinds) for value in _tuple(name, returned, values)]
    _compare(name, function, arrays)
    return arrays


def evaluate_marks(name: str, function: Function | None, stages: int, microbatches: int) -> Flags:
    """A function of s and b on every stage and microbatch, (S, B); None marks nothing. UsageError unless it is bool."""
    if function is None:
        return np.zeros((stages, microbatches), bool)
    return evaluate(name, function, (stages, microbatches), 1, MARKS)[0]


def _compare(name: str, function: Function, arrays: Sequence[NDArray[Any]]) -> None:
    """UsageError if a job alone, of at most COMPARED, gets other numbers than in arrays, as `b in array` gives.

    Its s, b and d are NumPy's, so that they count as arrays do. A function that raises for them is for arrays alone.
    """
    shape, jobs = arrays[0].shape, arrays[0].size
    for k in range(min(jobs, COMPARED)):
        flat = k if jobs <= COMPARED else int(k * 0.6180339887498949 % 1 * jobs)  # spread evenly by the golden ratio
        job = np.unravel_index(flat, shape)
        same = True
        with suppress(Exception, SystemExit), np.errstate(all="ignore"):
            returned = function(*map(np.int64, job))
            alone = returned if len(arrays) > 1 else (returned,)
            same = all(_same(number, array[job]) for number, array in zip(alone, arrays, strict=True))
        if not same:
            raise UsageError(
                f"{name}{_job_words(job, shape)} is {_brief(returned)} for this job alone, but another in arrays of "
                "all jobs: it should follow from the job's own s, b and d"
            )


def _same(one: Any, other: Any) -> bool:
    return bool(one == other or (one != one and other != other) or math.isclose(one, other))


def at_job(array: NDArray[Any], flat: int) -> str:
    """An array's value at a flat index, and its job, as in "3 for (s=3, b=0, d=F)"."""
    job = tuple(int(i) for i in np.unravel_index(flat, array.shape))
    return f"{array[job]} for {_job_words(job, array.shape)}"


def _tuple(called: str, returned: Any, values: int) -> tuple[Any, ...]:
    if values == 1:
        return (returned,)
    if not isinstance(returned, (tuple, list)) or len(returned) != values:
        raise UsageError(f"{called} must return a pair (weights_worker, compute_worker), not {_brief(returned)}")
    return tuple(returned)


def _broadcast(called: str, value: Any, shape: tuple[int, ...], kinds: str) -> NDArray[Any]:
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.array(None)
    if array.dtype.kind not in kinds or np.ma.is_masked(value):
        raise UsageError(f"{called} must return {_WORDS[kinds]}, not {_brief(value)}")
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        axes = ("stages", "microbatches", "directions", "slices")[: len(shape)]
        words = f"which does not fit ({', '.join(axes)}) = {shape}"
        raise UsageError(f"{called} returned an array of shape {array.shape}, {words}") from None


def _job_by_job(name: str, function: Function, shape: tuple[int, ...], values: int, kinds: str) -> list[NDArray[Any]]:
    columns: list[list[Any]] = [[] for _ in range(values)]
    for job in over(itertools.product(*(range(length) for length in shape)), name, math.prod(shape)):
        try:
            returned = function(*job)
        except (Exception, SystemExit) as error:
            raise UsageError(f"{name}{_job_words(job, shape)} raised {raised(error)}") from None
        for column, value in zip(columns, _tuple(name, returned, values), strict=True):
            column.append(value)
    return [_broadcast(name, column, (len(column),), kinds).reshape(shape) for column in columns]


def _job_words(job: Sequence[Any], shape: tuple[int, ...]) -> str:
    direction = f", d={DIRECTIONS[shape[2]][job[2]]}" if len(job) > 2 else ""
    slice = f", slice {job[3]}" if len(job) > 3 else ""
    return f"(s={job[0]}, b={job[1]}{direction}{slice})"


def _brief(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
