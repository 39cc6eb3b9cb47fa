"""`kernel`: a decorator for loops that numba compiles when their input is large.

A kernel takes only numbers and NumPy arrays, and may call other kernels. While its work is small it runs as plain
Python, so that small commands wait neither for numba nor for its compiler, which takes a second for a long kernel.
After that it is compiled, once per machine where numba can write its cache to disk. Both ways give the same results,
bit for bit.

numba also compiles every NumPy function that a kernel calls, and compiles a kernel a second time for a variable that
is initialized with a constant. So the kernels that every command needs, which follow, prove and simulate a
schedule, allocate no arrays and take such initial values as arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import EnumType
from functools import cache, update_wrapper
from hashlib import sha256
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")

SMALL = 100_000  # elements of work, per kernel and process: interpreting that many takes 0.1 to 0.2 seconds

_compile_always = False  # set by compiled_always


@contextmanager
def compiled_always() -> Iterator[None]:
    """Compile kernels for inputs of any size in this context, which pays for loops over many small inputs."""
    global _compile_always
    before, _compile_always = _compile_always, True
    try:
        yield
    finally:
        _compile_always = before


class kernel(Generic[P, T]):
    """Decorator: `f.sized(work)(...)` calls f interpreted or compiled, `f(...)` is for calls from other kernels."""

    def __init__(self, function: Callable[P, T]) -> None:
        self.function, self.done = function, 0
        update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run it as Python. Functions that `sized` returns call kernels interpreted or compiled instead."""
        return self.function(*args, **kwargs)

    def sized(self, work: int, ahead: int = 0) -> Callable[..., T]:
        """The function to call on `work` elements, a microsecond of Python each; calls on `ahead` more will follow.

        It is compiled once `work`, `ahead` and the work of all earlier calls add up to SMALL. So all calls together
        take less than twice as long as with the better choice from the start.
        """
        self.done += work
        small = self.done + ahead < SMALL and not _compile_always
        return cast(Callable[..., T], (_interpreted if small else _compiled)(self.function))


@cache
def _interpreted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with plain numbers for enum members, whose lookup dominates a small loop in Python 3.11."""
    module = function.__globals__
    enums = {name: module[name] for name in function.__code__.co_names if isinstance(module.get(name), EnumType)}
    numbers = {name: SimpleNamespace(**{each.name: int(each) for each in enum}) for name, enum in enums.items()}
    return _with_kernels(function, _interpreted, numbers)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        from numba import njit
    except ImportError:  # for example no wheel for this Python yet: the same results, slower
        return _interpreted(function)
    # A kernel that allocates no array counts no references to them, which takes half of the time of a long one.
    # A call passes seven numbers for every array: kernels are put into their callers.
    compiled = njit(_with_kernels(function, _compiled, {}), _nrt="np" in function.__code__.co_names, forceinline=True)
    with suppress(RuntimeError, AttributeError):  # no writable cache folder, or this numba caches differently
        compiled.enable_caching()
        index = compiled._cache._cache_file
        index._source_stamp = sources()
        # With a full disk the next process compiles again, and where the index is damaged, or of a release with a class
        # that is gone since, this one: unpickling raises whatever the bytes say.
        compiled._cache.save_overload = _else(compiled._cache.save_overload, OSError, lambda: None)
        index._load_index = _else(index._load_index, Exception, dict)
    return cast(Callable[..., Any], compiled)


def _else(function: Callable[P, T], errors: type[Exception], otherwise: Callable[[], T]) -> Callable[P, T]:
    """The function, but where it raises one of these errors, what `otherwise` returns."""

    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except errors:
            return otherwise()

    return called


@cache
def sources() -> bytes:
    """A digest of all modules: a compiled kernel contains constants of others, but numba checks only its own module."""
    digest, package = sha256(), Path(__file__).parents[1]
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + file.read_bytes())
    return digest.digest()


def _with_kernels(
    function: Callable[..., Any], convert: Callable[[Callable[..., Any]], Callable[..., Any]], names: Mapping[str, Any]
) -> Callable[..., Any]:
    """A copy of the function in whose globals the kernels that it calls are converted, and `names` override others."""
    module = function.__globals__
    called = {name: module[name] for name in function.__code__.co_names if isinstance(module.get(name), kernel)}
    converted = {name: convert(inner.function) for name, inner in called.items()}
    return FunctionType(function.__code__, {**module, **converted, **names}, function.__name__, function.__defaults__)
