"""`compile`: a scheme and sizes in, the instruction list of every rank out.

place   evaluates w and n on every job of the scheme's stages
refine  makes of each of these stages those of the program: parts, and shards
forward leaves the forwards alone, where only these are wanted
order   says when every job starts, in one time for all workers
lower   makes instructions of the jobs in that order, adds messages, sums, steps and FREEs, and splits by rank
"""

from __future__ import annotations

from schedgen.compiler.forward import forwards
from schedgen.compiler.lower import lower
from schedgen.compiler.options import Options, check_options
from schedgen.compiler.order import order
from schedgen.compiler.place import place
from schedgen.compiler.refine import refine
from schedgen.ir.program import Program
from schedgen.schemes.scheme import Scheme, Sizes


def compile(scheme: Scheme, sizes: Sizes, options: Options = Options()) -> Program:  # noqa: B008  frozen
    """The projected program; UsageError where the scheme, the sizes and the options make none.

    The checker's `check_compiled` says whether a program with weight versions can run: not every order does.
    """
    check_options(scheme, sizes, options)
    placed = refine(place(scheme, sizes, options))
    if options.forward:
        placed = forwards(placed)
    return lower(placed, order(placed))
