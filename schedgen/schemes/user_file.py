"""A user's own scheme: a file with w, n unless --n is given, and settings, which the template of one lists."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from schedgen.ir.stage_graph import check_edges, check_per_consumer
from schedgen.ir.weights import FLUSH
from schedgen.schemes.scheme import Function, Scheme, Sizes, bind_sizes, fourth_argument, keyword_arguments, no_order
from schedgen.util.errors import RefusedFile, UsageError, clip, raised
from schedgen.util.files import open_output
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
    """Execute the file, which may import others of its folder, and return it as a module; it leaves no bytecode."""
    if not path.exists():
        raise UsageError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"schedgen_scheme_{os.path.realpath(path)}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.modules[spec.name] = module  # dataclasses look up their module there
    sys.path.insert(0, folder := str(path.resolve().parent))
    try:
        _aside(spec.loader.exec_module)(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise UsageError(f"{path} cannot be loaded: {raised(error)}") from None
    finally:
        sys.dont_write_bytecode = writes
        sys.path.remove(folder)
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


TEMPLATE = '''\
"""NAME: stages go round the workers, one forward, one backward. Say here what yours does."""

# schedgen compile NAME.py --stages 4 --microbatches 8 -o NAME.json
# schedgen stats NAME.json
# mpiexec -n 4 python -m mpirun NAME.json --model mpirun.examples.mlp:tiny --steps 5 --verify

import numpy as np

from schedgen import F

# s, b and d are NumPy arrays of all stages, microbatches and directions; d is F (forward) or B (backward). Arguments
# behind the * are the sizes that compile was given, any of stages, microbatches, workers, groups, chunks, group,
# replicas, slices; None or a default stands for one that was not.

# What n means. "strict": every worker runs its jobs exactly in increasing n, which must differ within a worker.
# "greedy": a free worker takes the job that can start earliest, and n settles ties.
mode = "strict"


def w(s, b, d, *, stages, workers=None):
    """(the worker that stores the weights, the worker that computes) of every job."""
    worker = s % (workers or stages)
    return worker, worker


def n(s, b, d, *, stages):
    """Which job goes first: the smaller the sooner."""
    way = np.where(d == F, s, 2 * stages - 1 - s)  # how far along a microbatch is, to the loss and back
    return (way + 2 * b) * stages + s


# More that a scheme may say:
#
# split = True                      d is F, I (gradient of the input) or W (gradient of the weights)
# edges = [(0, 2), (1, 2)]          producer and consumer stages, where they are no chain
# per_consumer = [0]                       stages that give each of several consumers an output of its own
# updates = "stash"                 when weights change: "flush", "stash", "vertical" or "2bw"
# accumulated = 8                   2bw: microbatches of an update; else as many as stages
#
# def cap(s, *, stages):            greedy: so many microbatches in flight on a stage and worker, until I or B ends
#     return stages - s
# def unsplit_backward(s, b):       split: whether a backward is one job after all
#     return s == 0
# def delayed_send(s, b):           strict: whether a forward's output leaves only after the worker's next job
#     return b > 2
'''


def new(name: str) -> Path:
    """Write NAME.py and return its path; RefusedFile if such a file exists already, which is left alone."""
    path = Path(name if name.endswith(".py") else f"{name}.py")
    if not re.fullmatch(r"\w[\w.-]*", path.stem):
        raise UsageError(f"'{clip(name)}': the name should be letters, digits and any of _ . -")
    if path.exists():
        raise RefusedFile(f"{path} is there already, and new overwrites nothing")
    with open_output(str(path)) as out:
        out.write(TEMPLATE.replace("NAME", path.stem).encode())
    return path
