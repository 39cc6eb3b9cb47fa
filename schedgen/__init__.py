"""schedgen: two functions, w and n, compiled to the instruction list of every rank.

    import schedgen

    sizes = schedgen.Sizes(stages=4, microbatches=8)
    program = schedgen.compile(schedgen.load("1f1b", sizes), sizes, schedgen.Options(prefetch=0))
    schedgen.check(program)
    with open("1f1b.json", "wb") as file:
        schedgen.write(program, file)

load      the name of a scheme, or a FILE.py with w and n, to a scheme
compile   scheme, sizes and options to a program
forward_list  the forwards of any program as a program of their own, for evaluation and prediction
read      a schedule file, opened in binary mode, and its name to its program, and what is wrong with its hash
write     a program to a schedule file, opened in binary mode
check     proves a program right; returns every rank's peak memory
simulate  a program and a cost model to the start and end times of all instructions
stats     a program to latency, bubble, memory and messages, by name
Program   the instructions of all ranks, and a header
Scheme    w, n and the other settings of a scheme
Sizes     stages, microbatches, workers, ...
Options   how a scheme is compiled
UsageError, RefusedFile  the errors these raise: for wrong arguments or a misfit; for a wrong file or program
F, B, I, W  the values of d that `w` and `n` receive: forward, backward, and its halves

Each is imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from schedgen.util.version import __version__

if TYPE_CHECKING:
    from schedgen.checker import check
    from schedgen.compiler.compile import compile
    from schedgen.compiler.forward_only import forward_list
    from schedgen.compiler.options import Options
    from schedgen.ir.file import read, write
    from schedgen.ir.instructions import B, F, I, W
    from schedgen.ir.program import Program
    from schedgen.schemes import load
    from schedgen.schemes.scheme import Scheme, Sizes
    from schedgen.simulator.simulate import simulate
    from schedgen.simulator.stats import stats
    from schedgen.util.errors import RefusedFile, UsageError

__all__ = [
    "B", "F", "I", "Options", "Program", "RefusedFile", "Scheme", "Sizes", "UsageError", "W", "__version__", "check",
    "compile", "forward_list", "load", "read", "simulate", "stats", "write",
]  # fmt: skip

_MODULES = {
    **dict.fromkeys(("B", "F", "I", "W"), "schedgen.ir.instructions"),
    **dict.fromkeys(("Scheme", "Sizes"), "schedgen.schemes.scheme"),
    **dict.fromkeys(("read", "write"), "schedgen.ir.file"),
    **dict.fromkeys(("RefusedFile", "UsageError"), "schedgen.util.errors"),
    "Options": "schedgen.compiler.options",
    "Program": "schedgen.ir.program",
    "check": "schedgen.checker",
    "compile": "schedgen.compiler.compile",
    "forward_list": "schedgen.compiler.forward_only",
    "load": "schedgen.schemes",
    "simulate": "schedgen.simulator.simulate",
    "stats": "schedgen.simulator.stats",
}


def __getattr__(name: str) -> Any:
    """A public name; AttributeError for any other."""
    if name not in _MODULES:
        raise AttributeError(f"module schedgen has no attribute {name}")
    return getattr(importlib.import_module(_MODULES[name]), name)
