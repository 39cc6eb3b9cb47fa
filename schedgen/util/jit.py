"""`kernel`: a decorator for loops that numba compiles when their input is large.

A kernel takes only numbers and NumPy arrays, and may call other kernels. On small inputs it runs as plain Python, so
that small commands do not wait for numba. On large inputs it is compiled, once per machine, because numba keeps the
result on disk. Both ways give the same results, bit for bit.
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

_compile_always = False  # set by compiled_always


@contextmanager
def compiled_always() -> Iterator[None]:
    """Within it, kernels are compiled for inputs of any size: it pays for loops over many small inputs."""
    global _compile_always
    before, _compile_always = _compile_always, True
    try:
        yield
    finally:
        _compile_always = before


class kernel(Generic[P, T]):
    """Decorator: `f.sized(work)(...)` calls f interpreted or compiled, `f(...)` is for calls from other kernels."""

    def __init__(self, function: Callable[P, T]) -> None:
        """Nothing is compiled yet; `function` uses only what numba's nopython mode supports."""
        self.function = function
        update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the Python function; a compiled kernel calls the compiled function here."""
        return self.function(*args, **kwargs)

    def sized(self, work: int) -> Callable[..., T]:
        """The function to call on `work` elements: interpreted below SMALL, else compiled."""
        small = work < SMALL and not _compile_always
        return self.function if small else cast(Callable[..., T], _compiled(self.function))


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled function, in whose globals the kernels that it calls are replaced by compiled ones."""
    try:
        from numba import njit
    except ImportError:  # for example no wheel for this Python yet: the same results, slower
        return function
    module = function.__globals__
    called = {name: module[name] for name in function.__code__.co_names if isinstance(module.get(name), kernel)}
    names = {**module, **{name: _compiled(inner.function) for name, inner in called.items()}}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    return cast(Callable[..., Any], njit(cache=True)(copy))
