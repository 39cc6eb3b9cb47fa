"""The scheme `free`, whose placement is left open, and placements of built-in schemes that it may take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from schedgen.compiler.place import place_jobs
from schedgen.ir.limits import check_jobs
from schedgen.planner.candidates import PIPELINES
from schedgen.planner.order_search.placed_problem import as_placement
from schedgen.planner.placement_search.stage_sets import Placement
from schedgen.schemes import load
from schedgen.schemes.orders import ORDERS
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.util.errors import UsageError

FREE = "free"


class Family(NamedTuple):
    """A placement of built-in schemes."""

    scheme: Scheme  # `free` with this placement
    placement: Placement | None  # None: a stage is on several workers, each with some microbatches


def free_scheme(sizes: Sizes) -> Scheme:
    """The scheme `free`, in blocks of stages until it is placed; UsageError if sizes are missing or too many."""
    for option in ("chunks", "groups"):
        if getattr(sizes, option) is not None:
            raise UsageError(f"{FREE} takes no --{option}")
    if sizes.workers is None:
        raise UsageError(f"{FREE} needs --workers W: it places stages on them")
    check_jobs(sizes.stages, sizes.microbatches, per_pair=3)
    order = "depth-first"
    scheme = Scheme(FREE, sizes.workers, lambda s, b, d: (0, 0), ORDERS[order](sizes), order, "greedy", split=True)
    return placed_on(scheme, blocks(sizes.stages, sizes.workers))


def placed_on(scheme: Scheme, placement: Placement) -> Scheme:
    """The scheme with each stage on its worker."""
    workers = np.array(placement)
    return scheme._replace(w=lambda s, b, d: (workers[s], workers[s]))


def blocks(stages: int, workers: int) -> Placement:
    """Neighbouring stages on each worker, in equal numbers as far as possible."""
    return tuple(s * min(workers, stages) // stages for s in range(stages))


def families(scheme: Scheme, sizes: Sizes) -> list[Family]:
    """The placements of the built-in pipelines of these sizes, each once, regardless of how workers are numbered."""
    distinct: dict[Placement, Family] = {}
    for name in PIPELINES:
        try:
            built_in = as_placement(load(name, sizes), True)
            compute = place_jobs(built_in, sizes.stages, sizes.microbatches, 3).compute[0, :, :, 0]
        except UsageError:
            continue
        placement = in_order(compute[:, 0].tolist()) if (compute == compute[:, :1]).all() else None
        own = scheme._replace(w=built_in.w)
        distinct.setdefault(in_order(compute.ravel().tolist()), Family(own, placement))
    return list(distinct.values())


def in_order(workers: Sequence[int]) -> Placement:
    """Workers renumbered in the order in which they first appear: 0, then 0 or 1, and so on."""
    names: dict[int, int] = {}
    return tuple(names.setdefault(worker, len(names)) for worker in workers)
