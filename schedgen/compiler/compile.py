"""`compile`: a scheme and sizes in, the instruction list of every rank out.

place   evaluates w and n on every job of the scheme's stages
refine  divides each stage of the scheme into stages of the program: substages, and slices of substages
forward drops everything but the forwards, with `options.forward`: nothing is saved for a backward, no weights change
order   decides when every job starts, on one time axis for all workers
lower   turns the jobs in that order into instructions, adds messages, sums, STEPs and FREEs, and splits by rank

`forward_list` makes the list of the forwards of a program, for evaluation or prediction: they stay on their workers,
and the weights with their owners.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from schedgen.compiler.lower import Dump, lower
from schedgen.compiler.options import Options, check_options
from schedgen.compiler.order import order
from schedgen.compiler.place import MARKS, PlacedScheme, place
from schedgen.compiler.refine import refine
from schedgen.ir.header import owners_of
from schedgen.ir.instructions import Op
from schedgen.ir.program import Program
from schedgen.ir.weights import FLUSH
from schedgen.schemes.scheme import Scheme, Sizes, no_order
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


_SIZES = ("name", "workers", "stages", "microbatches")


def forwards(placed: PlacedScheme) -> PlacedScheme:
    """A refined scheme reduced to its forwards, in its order: no caps, delayed sends, recomputes, ties or updates."""
    owned_by_forwards = owners_of(placed.weights[:1]) == owners_of(placed.weights)
    nowhere: dict[str, Any] = dict.fromkeys(MARKS, np.zeros(placed.compute.shape[1:], bool))
    return replace(
        placed,
        scheme=placed.scheme._replace(updates=FLUSH),
        cost={"F": placed.cost["F"]},
        weights=placed.weights[:1] if owned_by_forwards else placed.weights,
        compute=placed.compute[:1],
        n=placed.n[:1],
        caps=None,
        tied=(),
        **nowhere,
    )


def forward_list(program: Program) -> Program:
    """The forwards of a checked, projected program as a program of their own; a program of forwards is returned as is.

    Every rank computes the same forwards in the same order as in `program`, and owns the same weights. Messages, copies
    of weights and sums over slices are inserted anew for the forwards, by the `lowering` of the header.
    """
    if program.header.is_forward:
        return program
    placed = forwards(_placed(program))
    return lower(placed, order(placed))


def _placed(program: Program) -> PlacedScheme:
    """A refined scheme whose strict order is the order of the program's forwards."""
    header = program.header
    parameters = {key: value for key, value in header.scheme.items() if key not in _SIZES}
    numbers: dict[str, Any] = {key: header.lowering[key] for key in ("weight_slots", "fan_out", "prefetch")}
    nowhere: dict[str, Any] = dict.fromkeys(MARKS, np.zeros(header.compute.shape[1:], bool))
    name, w, n = header.scheme["name"], no_order, no_order  # never called: the scheme is placed
    return PlacedScheme(
        scheme=Scheme(name, header.workers, w, n, header.n, "strict", parameters=parameters),
        options=Options(forward=True, **numbers),
        cost=dict(header.cost),
        workers=header.workers,
        weights=header.weights,
        compute=header.compute,
        n=program.job_rows(Op.FWD)[None],
        graph=header.graph,
        shard_owners=header.shard_owners,
        tensor_parallel=header.tensor_parallel,
        **nowhere,
    )
