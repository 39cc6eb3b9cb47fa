"""The Pareto front, in time and memory, of the schedules that a profile's layers allow.

Candidates are schemes with balanced layers; those that no bound excludes are simulated. With a memory limit cuts whose
largest stage needs few bytes are tried, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np

from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.compiler.place import place_jobs
from schedgen.compiler.sum_trees import ALLREDUCE
from schedgen.ir.cost import has_both, shortest_halves, without_redo
from schedgen.ir.graph_file import ModelGraph
from schedgen.ir.instructions import Op
from schedgen.ir.program import Program
from schedgen.planner.candidates import Candidate, CandidateBound, candidate_bound, candidates, with_layers
from schedgen.planner.layer_profile import Layers, read_layers
from schedgen.planner.order_search.problem import least_time
from schedgen.planner.order_search.question import Limits, Question
from schedgen.planner.order_search.search_order import search_order
from schedgen.planner.order_search.search_ways import search_ways
from schedgen.planner.order_search.ways import Way
from schedgen.planner.partition import on_links
from schedgen.planner.stage_costs import StageCosts, cost_ratios
from schedgen.simulator.buffer_sizes import buffer_sizes
from schedgen.simulator.footprint import footprint
from schedgen.simulator.network import Network
from schedgen.simulator.simulate import simulate_until
from schedgen.util.errors import UsageError, number_of
from schedgen.util.files import AnyPath
from schedgen.util.jit import compiled_always
from schedgen.util.progress import over


class PlannedSchedule(NamedTuple):
    """A schedule, and its time and memory in the simulator."""

    scheme: str
    stages: int
    replicas: int | tuple[int, ...]  # of the whole pipeline, or of each stage
    interleave: bool  # whether the replicas of a stage are neighbours
    recomputed: int  # forwards that are redone
    offloaded: int  # forwards that are away in the memory of the host
    layers: tuple[int, ...]  # of each stage
    step_time: float  # seconds
    peak_bytes: int  # of the worker that needs most
    order: str = "own"  # of the scheme, or "search"
    sums: str = ALLREDUCE  # over the owners of a stage, or "two-level"


class Plan(NamedTuple):
    """The Pareto front of schedules, and how many were considered."""

    front: list[PlannedSchedule]  # the fastest first: each takes less memory than those before it
    program: Program  # of the first
    schedules: int  # candidates
    simulated: int  # candidates that no bound ruled out


MOST_REDONE = 3  # placements for which orders that redo forwards are searched


class _Entry(NamedTuple):
    schedule: PlannedSchedule
    candidate: Candidate
    costs: StageCosts
    program: Program | None = None  # if its order was searched


_Front = Sequence[_Entry]
_Points = Sequence[tuple[float, int]]  # seconds and bytes of the entries of a front
_Run = Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], list[Any]]

BLOCK = 4  # candidates that are first held against one front, then up to 64, whatever the number of processes
SMALL = 2_000_000  # jobs of all candidates: with fewer, processes cost more than they save
_tried: list[Candidate] = []  # which forked processes find here, since functions cannot be sent to them


class _PlacedCandidate(NamedTuple):
    """Where stages run, which layers they have, and a lower bound on the time of any order of their jobs."""

    candidate: Candidate  # the first that places its jobs this way
    costs: StageCosts
    question: Question  # without a limit
    least: float  # seconds


def plan(
    profile: AnyPath | Layers,
    workers: int,
    microbatches: int,
    memory: float = math.inf,
    *,
    network: Network | None = None,
    bandwidth: float | None = None,
    schemes: Collection[str] | None = None,
    budget: int = 0,
    processes: int = 1,
) -> Plan:
    """The schedules of a profile's layers that no other beats in both seconds and bytes, and the fastest's `program`.

    memory     bytes that a worker may hold; the network's devices may have less
    network    what joins the workers, or `bandwidth`: bytes a second of every link; default: as the profile says
    schemes    names: only these are tried
    budget     work for each search of an order, as for `search`; 0: no orders are searched
    processes  forked for a large plan, which is the same whatever their number

    UsageError if no schedule fits; RefusedFile if `profile` is a file but no profile.
    """
    layers = profile if isinstance(profile, Layers) else read_layers(profile)
    layers, bandwidth = on_links(layers, workers, network, bandwidth)
    memory = min(memory, layers.machine.network.least_memory(workers))
    _tried[:] = [
        candidate
        for candidate in candidates(layers, workers, bandwidth, microbatches, memory)
        if schemes is None or candidate.name in schemes
    ]
    with compiled_always(), _runner(processes) as run:
        bounds = run(_bound, [(k,) for k in range(len(_tried))])
        order = sorted(range(len(_tried)), key=lambda k: bounds[k].seconds)
        every, simulated = _front_of_all(run, bounds, order, memory)
        front: _Front = [entry for entry in every if entry.schedule.peak_bytes <= memory]
        if budget:
            fastest = min((entry.schedule.step_time for entry in front), default=math.inf)
            placed = _placed_candidates((_tried[k] for k in order), fastest)
            for found in _searched(placed, fastest, memory, budget):
                front = _with(found, front)
        if not front and math.isfinite(memory):  # what was ruled out because it does not fit may be what needs least
            every, _ = _front_of_all(run, bounds, order, math.inf)
    if not front:
        what = "no schedule" if schemes is None else f"no schedule of {', '.join(schemes)}"
        limit = f" and {memory:g} bytes each" if math.isfinite(memory) else ""
        batches = number_of(microbatches, "microbatch")
        raise UsageError(f"{what} fits {number_of(workers, 'worker')}{limit} with {batches}{_least_memory(every)}")
    front = sorted(front, key=lambda entry: entry.schedule.step_time)
    first = front[0]
    program = first.program or _compiled(first.candidate, first.costs)
    return Plan([entry.schedule for entry in front], program, len(bounds), simulated)


@contextmanager
def _runner(processes: int) -> Iterator[_Run]:
    """A function that calls another one with each of some arguments, in order: in processes if the plan is large."""
    if processes == 1 or sum(each.sizes.stages * each.sizes.microbatches for each in _tried) < SMALL:
        yield lambda function, arguments: [function(*each) for each in arguments]
    else:
        with get_context("fork").Pool(processes) as pool:
            yield partial(pool.starmap, chunksize=1)


def _bound(number: int) -> CandidateBound:
    return candidate_bound(_tried[number])


def _front_of_all(
    run: _Run, bounds: Sequence[CandidateBound], order: Sequence[int], memory: float
) -> tuple[_Front, int]:
    """The Pareto front of the candidates, whether they fit or not: of those that fit, it has the front, too; and how
    many candidates were simulated, in this order. Left out are those that a bound says do not fit.
    """
    every: _Front = []
    simulated = 0
    ends = [*(BLOCK << k for k in range(4)), *range(64, len(order) + 64, 64)]
    for begin, end in over(pairwise([0, *ends]), "search", len(ends)):
        fit = [k for k in order[begin:end] if bounds[k].bytes <= memory]
        tried = [k for k in fit if not _beaten(*bounds[k], every)]
        simulated += len(tried)
        points = [(entry.schedule.step_time, entry.schedule.peak_bytes) for entry in every]
        for k, found in zip(tried, run(_simulated, [(k, points) for k in tried]), strict=True):
            for schedule, cut in found:
                every = _with(_Entry(schedule, _tried[k], _tried[k].costs[cut]), every)
    return every, simulated


def _least_memory(every: _Front) -> str:
    """A clause with the fewest bytes that one of these schedules needs, and the schedule; empty if there is none."""
    if not every:
        return ""
    least = min((entry.schedule for entry in every), key=lambda schedule: (schedule.peak_bytes, schedule.step_time))
    replicas = ",".join(map(str, np.atleast_1d(least.replicas)))
    words = [number_of(least.stages, "stage"), *[f"replicas {replicas}"] * (replicas != "1")]
    words += ["all forwards redone"] * (least.recomputed > 0) + ["forwards offloaded"] * (least.offloaded > 0)
    return (
        f"; the least that would is {least.peak_bytes} bytes, by {least.scheme} with {', '.join(words)}, "
        f"in {least.step_time:.4g} s a step"
    )


def _with(entry: _Entry, front: _Front) -> _Front:
    """The front with an entry, if none is as good, and without the entries that it beats."""
    schedule = entry.schedule
    if _beaten(schedule.step_time, schedule.peak_bytes, front):
        return front
    kept = [
        other
        for other in front
        if other.schedule.step_time < schedule.step_time or other.schedule.peak_bytes < schedule.peak_bytes
    ]
    return [*kept, entry]


def _beaten(seconds: float, bytes: float, front: _Front) -> bool:
    return any(entry.schedule.step_time <= seconds and entry.schedule.peak_bytes <= bytes for entry in front)


def _simulated(number: int, front: _Points = ()) -> list[tuple[PlannedSchedule, int]]:
    """The candidate of this number, simulated with each of its stage costs for which no cap blocks it and no point of
    the front is as good in both; and the numbers of these costs.

    Cuts whose stages have the same graph have one program: only the header differs.
    """
    candidate, found = _tried[number], list[tuple[PlannedSchedule, int]]()
    programs: dict[ModelGraph | None, Program | None] = {}
    for cut, costs in enumerate(candidate.costs):
        with suppress(UsageError):
            if costs.graph not in programs:
                programs[costs.graph] = None
                programs[costs.graph] = _compiled(candidate, costs)
            if (program := programs[costs.graph]) and (schedule := _timed(program, candidate, costs, front)):
                found.append((schedule, cut))
    return found


def _timed(program: Program, candidate: Candidate, costs: StageCosts, front: _Points = ()) -> PlannedSchedule | None:
    """Its time and memory in the simulator; None if a point of the front takes no more of either."""
    sizes = buffer_sizes(costs.machine, program.header.stages, len(program.header.graph.edges))
    bytes = int(footprint(program, sizes).peak.max())
    until = min((seconds for seconds, others in front if others <= bytes), default=math.inf)
    if (run := simulate_until(until, program, costs.with_halves, costs.machine)) is None:
        return None
    redone, away = (int((program.job_rows(op) >= 0).sum()) for op in (Op.RECOMPUTE, Op.OFFLOAD))
    where = candidate.sizes.stages, candidate.replicas, candidate.interleave, redone, away, costs.layer_counts
    return PlannedSchedule(candidate.name, *where, run.makespan, bytes, sums=candidate.sums)


def _placed_candidates(candidates: Iterable[Candidate], fastest: float) -> list[_PlacedCandidate]:
    """The placements that may be faster than `fastest`, those with the least lower bound first.

    A placement that several schemes share is listed once. Where the halves of backwards are measured, too, one search
    tries whole and split backwards, whatever the scheme does.
    """
    distinct: dict[tuple[bool, tuple[int, ...], bytes], _PlacedCandidate] = {}
    for candidate in candidates:
        sizes, scheme = candidate.sizes, candidate.scheme
        if candidate.way != Way.KEEP:
            continue
        _, compute, *_ = place_jobs(scheme, sizes.stages, sizes.microbatches, 2)
        for costs in candidate.costs:
            mixed = has_both(costs.times)
            key = scheme.split or mixed, costs.layer_counts, compute.tobytes()
            if key in distinct:
                continue
            cost = costs.times if mixed else costs.durations(scheme.split)
            question = Question(with_layers(scheme, costs), sizes, cost, costs.machine, tied=costs.tied)
            shortest = shortest_halves(cost, sizes.stages) if mixed else without_redo(cost)
            distinct[key] = _PlacedCandidate(candidate, costs, question, least_time(question._replace(cost=shortest)))
    return sorted((each for each in distinct.values() if each.least < fastest), key=lambda each: each.least)


def _searched_program(placed: _PlacedCandidate, memory: float, budget: int, redo: bool) -> Program | None:
    """The program of the best order; None if a built-in order is as good, no order fits, or weights move.

    memory  bytes a worker
    budget  as for `search_order`
    redo    whether the search also decides which forwards are redone or offloaded
    """
    ways = (Way.REDO, Way.AWAY) if placed.question.machine.network.host.is_known else (Way.REDO,)
    question = placed.question._replace(limits=Limits(bytes=memory if math.isfinite(memory) else None), ways=ways)
    try:
        found = (search_ways if redo else search_order)(question, budget)
    except UsageError:
        return None
    return found.program if found.source == "search" else None


def _searched(hopeful: Sequence[_PlacedCandidate], fastest: float, memory: float, budget: int) -> Iterator[_Entry]:
    """The best order found for each placement that may be faster than `fastest`; with a memory limit, the placements
    of least bound may also redo forwards."""
    for k, placed in enumerate(over(hopeful, "search orders", len(hopeful))):
        redo = math.isfinite(memory) and k < MOST_REDONE
        if placed.least >= fastest or (program := _searched_program(placed, memory, budget, redo)) is None:
            continue
        if schedule := _timed(program, placed.candidate, placed.costs):
            schedule = schedule._replace(order="search", sums=ALLREDUCE)
            fastest = min(fastest, schedule.step_time)
            yield _Entry(schedule, placed.candidate, placed.costs, program)


def _compiled(candidate: Candidate, costs: StageCosts) -> Program:
    """The candidate with the layers of `costs`, ordered by the first of its costs."""
    ratios = cost_ratios(candidate.costs[0].durations(candidate.scheme.split))
    stages, hosts = range(candidate.sizes.stages), costs.machine.network.hosts
    redone, away = (stages if candidate.way == way else () for way in (Way.REDO, Way.AWAY))
    options = Options(cost=ratios, recompute=redone, offload=away, tied=costs.tied, sums=candidate.sums, hosts=hosts)
    return compile(with_layers(candidate.scheme, costs), candidate.sizes, options)
