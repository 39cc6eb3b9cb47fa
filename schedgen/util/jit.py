"""Loops that must be compiled: plain Python functions, run through numba where that pays.

A kernel takes numbers and NumPy arrays only, and may call other kernels. On
small inputs it runs as the Python it is, so that small commands do not wait
for numba; on large ones it is compiled, once per machine (numba keeps the
result on disk). Both give the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, update_wrapper
from types import FunctionType
from typing import Any, Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")

SMALL = 20_000  # elements of work: interpreting so many takes about as long as importing numba


_at_once = False  # whether to compile for small inputs, too


@contextmanager
def called_often() -> Iterator[None]:
    """Within it kernels are compiled at once: many small inputs are a large one."""
    global _at_once
    before, _at_once = _at_once, True
    try:
        yield
    finally:
        _at_once = before


class kernel(Generic[P, T]):
    def __init__(self, function: Callable[P, T]) -> None:
        self.function = function
        update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """The Python function; inside a compiled kernel this is the compiled one."""
        return self.function(*args, **kwargs)

    def sized(self, work: int) -> Callable[..., T]:
        """The function to call for so many elements of work."""
        return self.function if work < SMALL and not _at_once else cast(Callable[..., T], _compiled(self.function))


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        from numba import njit
    except ImportError:  # no wheel for this Python yet, say: the same, slower
        return function
    known = function.__globals__
    used = {name: known[name] for name in function.__code__.co_names if isinstance(known.get(name), kernel)}
    names = {**known, **{name: _compiled(one.function) for name, one in used.items()}}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    return cast(Callable[..., Any], njit(cache=True)(copy))
