"""Scheme in, program out: place, order, lower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

import schedgen
from schedgen.cost import durations
from schedgen.errors import UsageError
from schedgen.graph import chain, graph
from schedgen.order import greedy, strict
from schedgen.passes import lower
from schedgen.program import Header, Program
from schedgen.scheme import Scheme, Sizes, caps, place, priorities, wholes
from schedgen.schemes.orders import ORDERS


def compile_scheme(
    scheme: Scheme,
    sizes: Sizes,
    mode: str | None = None,
    n: str | None = None,
    cost: Mapping[str, float] | None = None,
    weight_slots: int = 2,
) -> Program:
    """The projected program of `scheme`.

    mode, n  replace the scheme's own ("greedy" or "strict"; a name in ORDERS)
    cost     duration of each direction, which greedy orders by and which
             decides how transfers of different workers interleave
    weight_slots  foreign weight copies a worker may hold at a time

    Raises UsageError where sizes, w, n or cap make no schedule.
    """
    S, batches = sizes.stages, sizes.microbatches
    cost = durations(cost, scheme.split)
    directions = len(cost)
    if n is not None:
        if n not in ORDERS:
            raise UsageError(f"there is no order '{n}': it is one of {', '.join(ORDERS)}")
        scheme = scheme._replace(n=ORDERS[n](sizes), order=n)
    mode = mode or scheme.mode
    limits = caps(scheme, S)
    if limits is not None and mode == "strict":
        raise UsageError("cap works with --mode greedy: a strict n leaves nothing to hold back")
    weights, compute, workers = place(scheme, S, batches, directions)
    edges = chain(S) if scheme.edges is None else scheme.edges
    jobs = graph(S, batches, directions, edges)
    ranks = priorities(scheme, S, batches, directions).ravel()
    length = np.repeat(np.array(list(cost.values()), np.float64), S * batches)
    whole = wholes(scheme, S, batches)
    if whole.any():
        length.reshape(3, -1)[:, whole.ravel()] = np.array([[cost["F"]], [cost["I"] + cost["W"]], [0.0]])
    if mode == "greedy":
        start = greedy(jobs, compute.ravel(), ranks, length, limits)
    else:
        start = strict(jobs, compute.ravel(), ranks, length)
    header = Header(
        scheme={"name": scheme.name, "workers": workers, "stages": S, "microbatches": batches, **scheme.parameters},
        mode=mode,
        n=scheme.order,
        cost=cost,
        weight_slots=weight_slots,
        edges=edges,
        groups=(),
        compute=compute,
        weights=weights,
        generator=f"schedgen {schedgen.__version__}",
    )
    several = {owners for owners in header.owners if len(owners) > 1}
    groups = tuple(sorted(several | {tuple(range(workers))}, key=lambda group: (-len(group), group)))
    return lower(replace(header, groups=groups), start, whole)
