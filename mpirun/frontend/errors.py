"""Which line of the model's source is the reason."""

from __future__ import annotations

import difflib
import inspect
import linecache
import re
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from schedgen.util.errors import MpirunWarning, UsageError, raised

OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
FRAME = re.compile(r'File "(.+)", line (\d+), in (\S+)')
DATA = ("DataDependent", "DynamicOutputShape", "UnsupportedOperator")  # in the names of torch's exceptions


def note(sentence: str) -> None:
    """A warning, on rank 0 alone where ranks are running."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.COMM_WORLD.rank == 0:
        warnings.warn(sentence, MpirunWarning, stacklevel=3)


class Place(NamedTuple):
    """A line of source."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        path, here = Path(self.file), Path.cwd()
        text = linecache.getline(self.file, self.line).strip()
        name = path.relative_to(here) if path.is_relative_to(here) else path
        return f"{name}:{self.line}: in {self.function}" + (f": `{text}`" if text else "")


def place(node: fx.Node) -> str:
    """Where a node of a traced graph comes from."""
    found = [Place(file, int(line), name) for file, line, name in FRAME.findall(node.meta.get("stack_trace") or "")]
    return str(_last(found) or f"{node.op} {node.target}")


def untraceable(module: nn.Module, error: BaseException) -> UsageError:
    """What to tell the user where torch.export has failed."""
    chain = list(_chain(error))
    frames = [
        Place(frame.filename, frame.lineno or 0, frame.name)
        for one in chain
        for frame in reversed(traceback.extract_tb(one.__traceback__))
    ]
    where = _last(frames[::-1]) or forward(module)
    for one in chain:
        if isinstance(one, UsageError):
            return UsageError(f"{where}: {one}")
    if any(word in type(one).__name__ for one in chain for word in DATA):
        why = (
            "its outcome depends on data, which tracing cannot follow; compute it with tensors (torch.where), or split"
        )
        return UsageError(f"{where}: {why} a Sequential")
    return UsageError(f"{where}: cannot be traced: {raised(error)[:300]}")


def check_hooks(module: nn.Module) -> None:
    """UsageError for hooks that stages would not have."""
    for name, one in module.named_modules():
        if one._backward_hooks or one._backward_pre_hooks:
            what = f"{name!r}, " if name else ""
            raise UsageError(f"{what}{type(one).__name__}: its backward hook would not be called in a stage")


def check_example(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """UsageError where its forward cannot be called so."""
    try:
        inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(f"{forward(module)}: cannot be called with the example: {error}") from None


def unknown(what: str, name: object, names: Iterable[str]) -> UsageError:
    """There is no such name, but there are others."""
    near = difflib.get_close_matches(str(name), filter(None, names), 3, 0.4)
    return UsageError(f"{what} {name!r} does not exist" + (f"; did you mean {' or '.join(near)}?" if near else ""))


def users(frame: FrameType | None) -> bool:
    """Whether a switch of gradients is the user's, not one inside of torch."""
    while frame is not None and frame.f_code.co_filename.endswith(("grad_mode.py", "_contextlib.py")):
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith(OURS)


def _chain(error: BaseException) -> Iterator[BaseException]:
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__ or one.__context__


def _last(places: Iterable[Place]) -> Place | None:
    """The innermost that is neither torch's nor ours, nor was generated."""
    users = [one for one in places if not one.file.startswith((*OURS, "<"))]
    return users[-1] if users else None


def forward(module: nn.Module) -> Place:
    """Where its forward begins."""
    code = type(module).forward.__code__
    return Place(code.co_filename, code.co_firstlineno, code.co_name)
