"""Errors and warnings about a model's source, which name the line that causes them."""

from __future__ import annotations

import re
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from traceback import FrameSummary

import torch
from torch import fx, nn

from schedgen.util.errors import MpirunWarning, UsageError, listed, of_user, raised

NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
FRAME = re.compile(r'File "(.+)", line (\d+), in (\S+)')
DATA_DEPENDENT = ("DataDependent", "DynamicOutputShape", "UnsupportedOperator")  # in the names of torch's exceptions
# Patterns of places, functions and messages of failures, and what avoids these in models of libraries.
REMEDIES = {
    "transformers.cache_utils": "a cache cannot be traced: give the example use_cache=False",
    "^_detect_is_causal_mask$": "torch reads the mask's values to know whether it is causal: say tgt_is_causal=True, "
    "or is_causal=True of an encoder (False of another mask)",
    "transformers.integrations.moe": 'experts cannot be traced: set experts_implementation="batched_mm" in its config',
}


def warn_user(sentence: str) -> None:
    """Issue an MpirunWarning, on rank 0 alone if ranks are running."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.COMM_WORLD.rank == 0:
        stack = traceback.extract_stack()
        (line,) = of_user(stack) or stack[-3:-2]
        warnings.warn_explicit(sentence, MpirunWarning, line.filename, line.lineno or 1)


def said(frame: FrameSummary) -> str:
    """FILE:LINE: in FUNCTION: `text`, the file relative to the working directory if it lies there."""
    path, here = Path(frame.filename), Path.cwd()
    name = path.relative_to(here) if path.is_relative_to(here) else path
    return f"{name}:{frame.lineno}: in {frame.name}" + (f": `{frame.line}`" if frame.line else "")


def line_of_node(node: fx.Node) -> str:
    """The user's line that a node of an exported graph comes from; the node itself if no line is known.

    The output has the line of the node before it.
    """
    node = node.prev if node.op == "output" else node
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    return _innermost(FrameSummary(file, int(line), name) for file, line, name in frames) or f"{node.op} {node.target}"


def line_of_forward(module: nn.Module) -> str:
    """Where the forward of a module begins."""
    code = type(module).forward.__code__
    return said(FrameSummary(code.co_filename, code.co_firstlineno, code.co_name))


def export_error(module: nn.Module, error: BaseException) -> UsageError:
    """The UsageError that reports a failure of torch.export, with the user's line that causes it."""
    chain = list(_chain(error))
    frames = [frame for link in reversed(chain) for frame in traceback.extract_tb(link.__traceback__)]
    where = _innermost(frames) or line_of_forward(module)
    functions = [frame.name for frame in frames]
    for pattern, remedy in REMEDIES.items():
        if any(re.search(pattern, text) for text in (where, *functions, *map(str, chain))):
            return UsageError(f"{where}: {remedy}")
    for link in chain:
        if isinstance(link, UsageError):
            return UsageError(f"{where}: {link}")
    if any(word in type(link).__name__ for link in chain for word in DATA_DEPENDENT):
        why = (
            "its outcome depends on data, which tracing cannot follow; compute it with tensors (torch.where), or split"
        )
        return UsageError(f"{where}: {why} a Sequential")
    return UsageError(f"{where}: cannot be traced: {raised(error)[:300]}")


def check_hooks(module: nn.Module) -> None:
    """UsageError for hooks that stages would not have."""
    for name, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            what = f"{name!r}, " if name else ""
            raise UsageError(f"{what}{type(part).__name__}: its backward hook would not be called in a stage")


def unknown_name(what: str, name: object, names: Iterable[str]) -> UsageError:
    """The UsageError for a `name` that does not exist among `names`."""
    return UsageError(f"{what} {name!r} does not exist, but {listed(list(filter(None, names)))}")


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def _innermost(frames: Iterable[FrameSummary]) -> str | None:
    """The last of the user's lines: not torch's, not ours, not in generated code."""
    own = [frame for frame in frames if not frame.filename.startswith((*NOT_THE_USERS, "<"))]
    return said(own[-1]) if own else None
