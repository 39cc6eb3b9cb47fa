"""A user's functions evaluated on every job: called with arrays, or job by job; mistakes become UsageError.

A job is (s, b, d), or (s, b, d, t) where w takes a fourth argument; arrays have these axes, in this order. Numbers that
no other NumPy array holds exactly, such as Fractions, are in an array of objects.
"""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedgen.ir.instructions import DIRECTIONS
from schedgen.schemes.scheme import Function
from schedgen.schemes.user_file import OtherNumbers
from schedgen.util.arrays import Flags
from schedgen.util.errors import SlowScheme, UsageError, raised
from schedgen.util.progress import over


def evaluate(name: str, function: Function, shape: tuple[int, ...], values: int) -> list[NDArray[Any]]:
    """The `values` arrays of `shape` that `function` returns; if it fails on arrays, it is called for every job."""
    grids = np.ix_(*(np.arange(length) for length in shape))
    try:
        returned = function(*grids)
    except (Exception, SystemExit) as error:  # not made for arrays, or wrong: calling it job by job tells which
        columns = _job_by_job(name, function, shape, values)
        reason = f"takes no arrays ({type(error).__name__})"
        advice = "with NumPy in place of if, in, min and the like, as np.where(s < 2, 0, 1), it is called with arrays"
        if isinstance(error, OtherNumbers):
            reason, advice = "gives arrays other numbers", "a job's should come from its own s, b and d, within int64"
            for column, varies in zip(columns, error.varies, strict=False):
                if varies and (column == column.flat[0]).all():  # as ranks in the array of all jobs
                    raise UsageError(
                        f"{name} gives each single job {column.flat[0]}, but jobs in an array different numbers: "
                        "it should compute a job's number from its own s, b and d alone"
                    ) from None
        _note_jobs(name, reason, shape, advice)
        return columns
    if values > 1 and not _is_tuple(returned, values):
        raise _no_pair(name, returned)
    return [_broadcast(name, value, shape) for value in (returned if values > 1 else (returned,))]


def evaluate_marks(name: str, function: Function | None, stages: int, microbatches: int) -> Flags:
    """A function of s and b on every stage and microbatch, (S, B); None marks nothing. UsageError unless it is bool."""
    shape = (stages, microbatches)
    if function is None:
        return np.zeros(shape, bool)
    marks = np.array(None)
    try:
        marks = np.asarray(function(*np.ix_(*map(np.arange, shape))))
    except OtherNumbers:
        _note_jobs(name, "gives arrays other numbers", shape, "it should come from a job's own s and b")
    except (Exception, SystemExit):  # not made for arrays, or wrong: calling it one by one tells which
        pass
    if not marks.ndim:  # or one answer for all, as `b in array` gives
        try:
            marks = np.array([[function(s, b) for b in range(microbatches)] for s in range(stages)])
        except (Exception, SystemExit) as error:
            raise UsageError(f"{name} raised {raised(error)}") from None
    marks = np.array(marks.tolist()) if marks.dtype == object else marks
    if marks.dtype != bool:
        raise UsageError(f"{name} must return True or False, not {marks.dtype}")
    try:
        return np.broadcast_to(marks, shape)
    except ValueError:
        words = f"which does not fit (stages, microbatches) = {shape}"
        raise UsageError(f"{name} returned an array of shape {marks.shape}, {words}") from None


def at_job(array: NDArray[Any], flat: int) -> str:
    """An array's value at a flat index, and its job, as in "3 for (s=3, b=0, d=F)"."""
    job = tuple(int(i) for i in np.unravel_index(flat, array.shape))
    value = _brief(array[job]) if array.dtype == object else array[job]
    return f"{value} for {_job_words(job, array.shape)}"


def _note_jobs(name: str, reason: str, shape: tuple[int, ...], advice: str) -> None:
    words = f"{name} {reason}, so it was called for each of {np.prod(shape)} jobs; {advice}"
    warnings.warn(words, SlowScheme, stacklevel=3)


def _is_tuple(returned: Any, values: int) -> bool:
    return isinstance(returned, (tuple, list)) and len(returned) == values


def _no_pair(called: str, returned: Any) -> UsageError:
    return UsageError(f"{called} must return a pair (weights_worker, compute_worker), not {_brief(returned)}")


def _broadcast(name: str, value: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    if np.ma.is_masked(value):
        raise UsageError(f"{name} must return numbers, not a masked array: use np.where instead of a mask")
    try:
        array = np.asarray(value)
    except ValueError:
        raise UsageError(f"{name} must return numbers, not {_brief(value)}") from None
    if array.dtype.kind in "bSUV" or (array.dtype == object and not all(map(_is_number, array.flat))):
        raise UsageError(f"{name} must return numbers, not {_brief(value)}")
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        raise UsageError(
            f"{name} returned an array of shape {np.shape(value)}, "
            f"which does not fit (stages, microbatches, directions{', shards' if len(shape) > 3 else ''}) = {shape}"
        ) from None


def _job_by_job(name: str, function: Function, shape: tuple[int, ...], values: int) -> list[NDArray[Any]]:
    columns: list[list[Any]] = [[] for _ in range(values)]
    for job in over(itertools.product(*(range(length) for length in shape)), name, math.prod(shape)):
        try:
            returned = function(*job)
        except (Exception, SystemExit) as error:
            raise UsageError(f"{name}{_job_words(job, shape)} raised {raised(error)}") from None
        if values > 1 and not _is_tuple(returned, values):
            raise _no_pair(f"{name}{_job_words(job, shape)}", returned)
        for column, value in zip(columns, returned if values > 1 else (returned,), strict=True):
            number = value[()] if isinstance(value, np.ndarray) and not value.ndim else value  # np.where's
            if not _is_number(number):
                raise UsageError(f"{name}{_job_words(job, shape)} must return numbers, not {_brief(returned)}")
            column.append(number.item() if isinstance(number, np.generic) else number)
    return [_exact_array(column).reshape(shape) for column in columns]


def _is_number(value: Any) -> bool:
    return not isinstance(value, (bool, np.bool_, str)) and bool(np.isscalar(value) and np.isreal(value))


def _exact_array(column: list[Any]) -> NDArray[Any]:
    """The numbers as an array, of objects if NumPy would round one, as it does a large int beside a float."""
    array = np.asarray(column)
    return array if array.tolist() == column else np.array(column, object)


def _job_words(job: tuple[int, ...], shape: tuple[int, ...]) -> str:
    shard = f", shard {job[3]}" if len(job) > 3 else ""
    return f"(s={job[0]}, b={job[1]}, d={DIRECTIONS[shape[2]][job[2]]}{shard})"


def _brief(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
