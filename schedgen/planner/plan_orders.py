"""Order searches for `plan`: one for each placement of the candidates that may beat the fastest known schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from schedgen.compiler.place import place_jobs
from schedgen.ir.cost import has_both, shortest_halves, without_redo
from schedgen.ir.program import Program
from schedgen.planner.candidates import Candidate, with_layers
from schedgen.planner.order_search.placed_problem import least_time
from schedgen.planner.order_search.question import Limits, Question
from schedgen.planner.order_search.recompute import search_with_recompute
from schedgen.planner.order_search.search_order import search_order
from schedgen.planner.stage_costs import StageCosts
from schedgen.util.errors import UsageError


class PlacedCandidate(NamedTuple):
    """Where stages run, which layers they have, and a lower bound on the time of any order of their jobs."""

    candidate: Candidate  # the first that places its jobs this way
    costs: StageCosts
    question: Question  # without a limit
    least: float  # seconds


def placed_candidates(
    candidates: Iterable[Candidate], moved: Sequence[StageCosts], fastest: float
) -> list[PlacedCandidate]:
    """The placements that may be faster than `fastest`, those with the least lower bound first.

    Each has its own cuts or those of `moved`; a placement that several schemes share is listed once. Where the halves
    of backwards are measured, too, one search tries whole and split backwards, whatever the scheme does.
    """
    distinct: dict[tuple[bool, tuple[int, ...], bytes], PlacedCandidate] = {}
    for candidate in candidates:
        sizes, scheme = candidate.sizes, candidate.scheme
        if candidate.recompute:
            continue
        _, compute, *_ = place_jobs(scheme, sizes.stages, sizes.microbatches, 2)
        for costs in (*candidate.costs, *(costs for costs in moved if len(costs.layer_counts) == sizes.stages)):
            mixed = has_both(costs.times)
            key = scheme.split or mixed, costs.layer_counts, compute.tobytes()
            if key in distinct:
                continue
            cost = costs.times if mixed else costs.durations(scheme.split)
            question = Question(with_layers(scheme, costs), sizes, cost, costs.machine, tied=costs.tied)
            shortest = shortest_halves(cost, sizes.stages) if mixed else without_redo(cost)
            distinct[key] = PlacedCandidate(candidate, costs, question, least_time(question._replace(cost=shortest)))
    return sorted((each for each in distinct.values() if each.least < fastest), key=lambda each: each.least)


def searched_program(placed: PlacedCandidate, memory: float, budget: int, redo: bool) -> Program | None:
    """The program of the best order; None if a built-in order is as good, no order fits, or weights move.

    memory  bytes a worker
    budget  as for `search_order`
    redo    whether the search also decides which forwards are redone
    """
    question = placed.question._replace(limits=Limits(bytes=memory if math.isfinite(memory) else None))
    try:
        found = (search_with_recompute if redo else search_order)(question, budget)
    except UsageError:
        return None
    return found.program if found.source == "search" else None
