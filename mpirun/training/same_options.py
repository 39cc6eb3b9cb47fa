"""Whether all ranks were given the same options: one comparison, before anything else depends on them.

Plain values are compared as they are, classes and other objects by the names of their classes and the floats that they
hold. Functions are compared by their code, and by the floats among the variables that it uses, their attributes and
entries. Other variables may differ: an int may be a rank or a counter, a string a device or a path.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from numbers import Number
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any

from mpi4py import MPI

from mpirun.comm.fail_together import Stop, first_difference
from mpirun.engine.recipe import is_plain
from mpirun.training.compiled import is_scheme
from schedgen.ir.program import Program
from schedgen.util.errors import clip

# Arguments of an Engine that ranks may be given otherwise: the model's values are compared when the stages are built, a
# note tells of other numbers of threads, and rank 0 alone logs.
MAY_DIFFER = ("self", "comm", "model", "threads", "log")
FOLDERS = ("weights", "export")  # hosts may call them otherwise: what has to agree is whether there is one


def options_to_compare(given: Mapping[str, Any]) -> dict[str, Any]:
    """Of the arguments of an Engine, by name, what has to be the same on all ranks."""
    options = {name: value for name, value in given.items() if name not in MAY_DIFFER}
    options |= {name: "a folder" for name in FOLDERS if given[name] is not None}
    schedule = given["schedule"]
    if isinstance(schedule, Program):  # rank 0 sends its own to the others
        return {**options, "schedule": "a Program"}
    kind = "scheme" if is_scheme(os.fspath(schedule)) else "file"
    return {**options, "schedule": f"the {kind} {Path(schedule).name}"}


def check_same_options(comm: MPI.Intracomm, options: Mapping[str, Any]) -> None:
    """Stop if ranks were given different options. Collective."""
    found = {name: text for option, value in options.items() for name, text in _described(f"`{option}`", value)}
    if (difference := first_difference(comm, found)) is not None:
        name, one, other, *texts = difference
        raise Stop(f"ranks {one} and {other} were given different {name}: {' and '.join(map(clip, texts))}")


def _described(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """What an option is, and what it holds, each with its name in messages, as text."""
    if value is None or isinstance(value, Number) or is_plain(value):
        yield name, repr(value)
    elif isinstance(value, partial):
        parts: dict[Any, Any] = {**dict(enumerate(value.args)), **value.keywords}
        yield name, f"a partial with {', '.join(map(str, parts))}"
        for key, part in {"func": value.func, **parts}.items():
            yield from _described(f"`{key}` in {name}", part)
    elif isinstance(function := getattr(value, "__func__", value), FunctionType):  # that of a method
        codes = [(code.co_code, code.co_names, _constants(code)) for code in _codes(function.__code__)]
        yield name, f"{function.__qualname__} (code {zlib.crc32(repr(codes).encode()):08x})"
        for key, number in _floats(function, {"self": getattr(value, "__self__", None)}):
            yield f"`{key}` in {name}", repr(number)
    else:
        yield name, getattr(value, "__qualname__", type(value).__qualname__)
        for key, part in getattr(value, "__dict__", {}).items():
            if isinstance(part, float):
                yield f"`{key}` in {name}", repr(part)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of those that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _constants(code: CodeType) -> list[Any]:
    """The constants in code, but functions, in a form with the same repr in every process."""
    constants = [constant for constant in code.co_consts if not isinstance(constant, CodeType)]
    return [sorted(map(repr, x)) if isinstance(x, frozenset) else x for x in constants]


def _floats(function: FunctionType, more: Mapping[str, Any], depth: int = 2) -> Iterator[tuple[str, float]]:
    """The floats that a function uses: variables, their attributes and entries, and those that its functions use.

    `more`: other variables of it, by name.
    """
    code = function.__code__
    used = {x for part in _codes(code) for x in (*part.co_names, *part.co_consts) if isinstance(x, str)}
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    defaults = function.__defaults__ or ()
    variables = {
        **{name: function.__globals__[name] for name in sorted(used) if name in function.__globals__},
        **{name: cell.cell_contents for name, cell in cells if cell != CellType()},
        **dict(zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)),
        **(function.__kwdefaults__ or {}),
        **more,
    }
    for name, value in variables.items():
        members = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        if isinstance(value, float):
            yield name, value
        elif isinstance(value, FunctionType) and depth:
            yield from ((f"{name}: {key}", number) for key, number in _floats(value, {}, depth - 1))
        else:
            for key in sorted(used & members.keys()):
                if isinstance(members[key], float):
                    yield f"{name}.{key}", members[key]
