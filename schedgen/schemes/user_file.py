"""A user's own scheme: a file with w, n unless --n is given, and optionally the names of `_OPTIONAL`."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from schedgen.ir.stage_graph import check_edges, check_per_consumer
from schedgen.ir.weight_versions import FLUSH, TWO_BUFFERS, UPDATES
from schedgen.schemes.scheme import Function, Scheme, Sizes, bind_sizes, fourth_argument, keyword_arguments, no_order
from schedgen.util.errors import UsageError, note, raised

_OPTIONAL: Mapping[str, type | tuple[type, ...]] = {  # what a file may define besides w and n, and the types of it
    "mode": str, "split": bool, "unsplit_backward": FunctionType, "delayed_send": FunctionType, "cap": FunctionType,
    "edges": (list, tuple), "per_consumer": (list, tuple), "updates": str, "accumulated": int,
}  # fmt: skip
_OPTIONS: Mapping[str, type | tuple[type, ...]] = {  # of compile, which a file might be thought to have
    "cost": dict, "memory_limit": int, "recompute": (list, tuple, str),
}  # fmt: skip


def load_file(path: Path, sizes: Sizes, tensor: int) -> Scheme:
    """The scheme that a file defines, named after the file; UsageError says what is wrong with it."""
    if not path.stem.isprintable():
        raise UsageError(f"{path}: a scheme is named after its file, and this name is not printable")
    module = _executed(path)
    if not callable(getattr(module, "w", None)):
        raise UsageError(f"{path} defines no function w(s, b, d)")
    n = getattr(module, "n", no_order)
    if not callable(n):
        raise UsageError(f"{path}: n is no function n(s, b, d)")
    for name in ("tied", "replicated"):
        if hasattr(module, name):
            raise UsageError(f"{path}: {name} is a model's, not a scheme's: put it into a graph file, for --graph")
    by_slice = fourth_argument(module.w) == "t"
    if not by_slice:
        sizes = sizes.per_slice(tensor)
    options = sizes._asdict()
    edges, apart = _edges(path, module, options, sizes.stages), getattr(module, "per_consumer", ())
    if not isinstance(apart, (list, tuple)) or (apart and edges is None):
        raise UsageError(f"{path}: per_consumer is a list of stages, for a module with edges")
    settings = _settings(path, module)
    cap, unsplit, delayed = (getattr(module, name, None) for name in ("cap", "unsplit_backward", "delayed_send"))
    for function, name, needed in (
        (unsplit, "unsplit_backward", "" if settings.split else "split = True"),
        (delayed, "delayed_send", "" if settings.mode == "strict" else "mode = 'strict'"),
    ):
        if function is not None and not callable(function):
            raise UsageError(f"{path}: {name} is no function {name}(s, b)")
        if function is not None and needed:
            raise UsageError(f"{path}: {name} needs {needed}")
    functions = (module.w, n, cap, unsplit, delayed, getattr(module, "edges", None))
    taken = {argument.name for function in functions for argument in keyword_arguments(function)}
    given = {name: options[name] for name in ("groups", "chunks", "group", "replicas") if options[name] is not None}
    for name in given:
        if name not in taken:
            raise UsageError(f"{path.name} takes no --{name}: none of its functions has a keyword argument {name}")

    def bound(function: Function | None) -> Function | None:
        return None if function is None else _aside(bind_sizes(function, options))

    return Scheme(
        name=path.stem,
        workers=sizes.workers,
        w=_aside(bind_sizes(module.w, options)),
        n=n if n is no_order else _aside(bind_sizes(n, options)),
        order=path.stem,
        mode=settings.mode,
        split=settings.split,
        unsplit_backward=bound(unsplit),
        delayed_send=bound(delayed),
        parameters={name: list(value) if isinstance(value, tuple) else value for name, value in given.items()},
        cap=bound(cap),
        edges=edges,
        per_consumer=check_per_consumer(apart, edges) if edges else (),
        updates=settings.updates,
        accumulated=settings.accumulated,
        by_slice=by_slice,
    )


class _Settings(NamedTuple):
    """The settings of a file that are no functions, as in Scheme."""

    mode: str
    split: bool
    updates: str
    accumulated: int | None


def _settings(path: Path, module: ModuleType) -> _Settings:
    """The file's settings; UsageError for one that is none. Prints notes on names that look like settings."""
    mode, updates = getattr(module, "mode", "greedy"), getattr(module, "updates", FLUSH)
    if not isinstance(mode, str) or mode not in ("greedy", "strict"):
        raise UsageError(f"{path}: mode must be 'greedy' or 'strict', not {mode!r}")
    if not isinstance(updates, str) or updates not in UPDATES:
        raise UsageError(f"{path}: updates must be {', '.join(map(repr, UPDATES))}, not {updates!r}")
    split, accumulated = getattr(module, "split", None), getattr(module, "accumulated", None)
    if callable(split) and getattr(split, "__module__", "") != module.__name__:  # as numpy's
        split = None
    if not (split is None or isinstance(split, (int, np.bool_))):
        raise UsageError(f"{path}: split must be True or False, not {split!r}")
    if accumulated is not None and (updates != TWO_BUFFERS or type(accumulated) is not int or accumulated < 1):
        raise UsageError(f"{path}: accumulated must be a whole number of at least 1, and needs updates = '2bw'")
    _note_names(path, module, mode)
    return _Settings(mode, bool(split), updates, accumulated)


def _note_names(path: Path, module: ModuleType, mode: str) -> None:
    """Print a note on a name that is one of `_OPTIONAL` but for case, a final s or a typing error, or one of _OPTIONS.

    Its type must be that of the name, which the file lacks. Imported functions and names that begin with _ are ignored.
    """
    missing = [known for known in _OPTIONAL if not hasattr(module, known) and (known != "cap" or mode == "greedy")]
    for name, value in vars(module).items():
        kind = type(value)
        if name.startswith("_") or name in _OPTIONAL or (kind is FunctionType and value.__module__ != module.__name__):
            continue
        if name in _OPTIONS and issubclass(kind, _OPTIONS[name]):
            note(f"{path}: {name} is no setting of a scheme: give --{name.replace('_', '-')} to compile")
        for known in missing:
            if issubclass(kind, _OPTIONAL[known]) and _is_slip(name.lower(), known):
                note(f"{path} defines {name}, which is not read; a scheme may have {known}")


def _is_slip(name: str, known: str) -> bool:
    """Whether a name is another but for a final s, the order of its letters or, if it is long, a letter."""
    name, known = name.removesuffix("s"), known.removesuffix("s")
    return sorted(name) == sorted(known) or difflib.SequenceMatcher(None, name, known).ratio() > 0.95


def _executed(path: Path) -> ModuleType:
    """Execute the file and return it as a module; no bytecode is written for it."""
    spec = importlib.util.spec_from_file_location(f"schedgen_scheme_{os.path.realpath(path)}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.modules[spec.name] = module  # dataclasses look up their module there
    try:
        _aside(spec.loader.exec_module)(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        if isinstance(error, FileNotFoundError) and not path.exists():
            raise UsageError(f"there is no file {path}") from None
        raise UsageError(f"{path} cannot be loaded: {raised(error)}") from None
    finally:
        sys.dont_write_bytecode = writes
    return module


def _aside(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its standard output sent to stderr, since the schedule may go to stdout."""
    if not callable(function):
        return function

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with contextlib.redirect_stdout(sys.stderr):
            return function(*args, **kwargs)

    return called


def _edges(
    path: Path, module: ModuleType, options: Mapping[str, Any], stages: int
) -> tuple[tuple[int, int], ...] | None:
    """The module's edges, given as a list or as a function of the sizes that returns one; None if it has none."""
    edges = getattr(module, "edges", None)
    if callable(edges):
        try:
            edges = bind_sizes(_aside(edges), options)()
        except UsageError:
            raise
        except (Exception, SystemExit) as error:
            raise UsageError(f"{path}: edges() raised {raised(error)}") from None
    return None if edges is None else check_edges(edges, stages)
