"""Whether all ranks were given the same options: one comparison, before anything else depends on them.

Plain values are compared as they are, functions by their names, other objects by those of their classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from numbers import Number
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from mpi4py import MPI

from mpirun.comm.fail_together import Stop, first_difference
from mpirun.engine.recipe import is_plain
from mpirun.training.schedule_and_model import is_scheme
from schedgen.util.errors import clip

# Arguments of an Engine that ranks may be given otherwise: the model's values are compared when they are first used, a
# note tells of other numbers of threads, and rank 0 alone logs, and reads the text.
MAY_DIFFER = ("self", "comm", "model", "options", "threads", "log", "text")
FOLDERS = ("weights", "export")  # hosts may call them otherwise: what has to agree is whether there is one


def options_to_compare(given: Mapping[str, Any]) -> dict[str, Any]:
    """Of the arguments of an Engine, by name, what has to be the same on all ranks."""
    options = {name: value for name, value in given.items() if name not in MAY_DIFFER}
    options |= {name: "a folder" for name in FOLDERS if given[name] is not None}
    if isinstance(schedule := given["schedule"], str | PathLike):
        kind = "scheme" if is_scheme(fspath(schedule)) else "file"
        options["schedule"] = f"the {kind} {Path(schedule).name}"
    return options


def check_same_options(comm: MPI.Intracomm, options: Mapping[str, Any]) -> None:
    """Stop if ranks were given different options. Collective."""
    own = {name: _in_words(value) for name, value in options.items()}
    if (difference := first_difference(comm, own)) is not None:
        name, one, other, *texts = difference
        raise Stop(f"ranks {one} and {other} were given different `{name}`: {' and '.join(map(clip, texts))}")


def _in_words(value: Any) -> str:
    """The same text on all ranks that were given the same."""
    if value is None or isinstance(value, Number) or is_plain(value):
        return repr(value)
    if isinstance(value, partial):
        given = [*map(_in_words, value.args), *(f"{name}={_in_words(x)}" for name, x in value.keywords.items())]
        return f"{_in_words(value.func)}({', '.join(given)})"
    return str(getattr(value, "__qualname__", type(value).__qualname__))
