"""A user's own scheme: a file with w, n unless --n is given, and optionally the settings that `user_template` lists."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from schedgen.ir.stage_graph import check_edges, check_per_consumer
from schedgen.ir.weights import FLUSH
from schedgen.schemes.scheme import Function, Scheme, Sizes, bind_sizes, fourth_argument, keyword_arguments, no_order
from schedgen.util.errors import UsageError, raised
from schedgen.util.option_fields import count


def load_file(path: Path, sizes: Sizes, tensor: int) -> Scheme:
    """The scheme that a file defines, named after the file; UsageError says what is wrong with it."""
    settings = vars(_executed(path))
    w, n = settings.get("w"), settings.get("n", no_order)
    if not callable(w):
        raise UsageError(f"{path} defines no function w(s, b, d)")
    if not callable(n):
        raise UsageError(f"{path}: n is no function n(s, b, d)")
    by_slice = fourth_argument(w) == "t"
    if not by_slice:
        sizes = sizes.per_slice(tensor)
    options = sizes._asdict()
    edges, per_consumer = _edges(path, settings.get("edges"), options, sizes.stages), settings.get("per_consumer", ())
    mode, split, accumulated = settings.get("mode", "greedy"), settings.get("split", False), settings.get("accumulated")
    cap, unsplit, delayed = (settings.get(name) for name in ("cap", "unsplit_backward", "delayed_send"))
    of_model = next((name for name in ("tied", "replicated", "whole") if name in settings), None)
    for wrong, words in (
        ("apart" in settings, "apart is called per_consumer"),
        (of_model, f"{of_model} is a model's, not a scheme's: put it into a graph file, for --graph"),
        (split not in (True, False), f"split must be True or False, not {split!r}"),
        (unsplit and not split, "unsplit_backward needs split = True"),
        (delayed and mode != "strict", "delayed_send needs mode = 'strict'"),
        (per_consumer and edges is None, "per_consumer is a list of stages, for a file with edges"),
    ):
        if wrong:
            raise UsageError(f"{path}: {words}")
    functions = (w, n, cap, unsplit, delayed, settings.get("edges"))
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
        w=_aside(bind_sizes(w, options)),
        n=n if n is no_order else _aside(bind_sizes(n, options)),
        order=path.stem,
        mode=mode,
        split=bool(split),
        unsplit_backward=bound(unsplit),
        delayed_send=bound(delayed),
        parameters={name: list(value) if isinstance(value, tuple) else value for name, value in given.items()},
        cap=bound(cap),
        edges=edges,
        per_consumer=check_per_consumer(per_consumer, edges) if edges else (),
        updates=settings.get("updates", FLUSH),
        accumulated=None if accumulated is None else count.check(f"{path}: accumulated", accumulated),
        by_slice=by_slice,
    )


def _executed(path: Path) -> ModuleType:
    """Execute the file and return it as a module; no bytecode is written for it."""
    if not path.exists():
        raise UsageError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"schedgen_scheme_{os.path.realpath(path)}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.modules[spec.name] = module  # dataclasses look up their module there
    try:
        _aside(spec.loader.exec_module)(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
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


def _edges(path: Path, edges: Any, options: Mapping[str, Any], stages: int) -> tuple[tuple[int, int], ...] | None:
    """The edges, given as a list or as a function of the sizes that returns one; None if the file has none."""
    if callable(edges):
        try:
            edges = bind_sizes(_aside(edges), options)()
        except UsageError:
            raise
        except (Exception, SystemExit) as error:
            raise UsageError(f"{path}: edges() raised {raised(error)}") from None
    return None if edges is None else check_edges(edges, stages)
