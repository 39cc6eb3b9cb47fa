"""`compile`: a scheme and sizes in, the instruction list of every rank out.

place   evaluates w and n on every job of the scheme's stages
refine  divides each stage of the scheme into stages of the program: substages, and slices of substages
forward drops everything but the forwards, with `options.forward`
order   decides when every job starts, on one time axis for all workers
lower   turns the jobs in that order into instructions, adds messages, sums, STEPs and FREEs, and splits by rank
"""

from __future__ import annotations

from schedgen.compiler.forward_only import forwards
from schedgen.compiler.lower import Dump, lower
from schedgen.compiler.options import Options, check_options
from schedgen.compiler.order import order
from schedgen.compiler.place import place
from schedgen.compiler.refine import refine
from schedgen.ir.program import Program
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.util.option_fields import checked


def compile(
    scheme: Scheme,
    sizes: Sizes,
    options: Options = Options(),  # noqa: B008  frozen
    dump: Dump = lambda name, program: None,
) -> Program:
    """Compile a scheme to a projected program; UsageError if the scheme, the sizes and the options do not fit together.

    `dump` is called after every pass of the lowering, with its name and the program so far.
    The checker's `check_compiled` checks the rest, such as deadlocks, which are possible if weights have versions.
    """
    sizes, options = sizes.checked(), checked(options)
    check_options(scheme, sizes, options)
    placed = refine(place(scheme, sizes, options))
    if options.forward:
        placed = forwards(placed)
    return lower(placed, order(placed), dump)
