"""Lower: the jobs of a refined scheme, in time order, become the program of every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from schedgen.compiler.passes import FORWARDS, PIPELINE, WITH_VERSIONS
from schedgen.compiler.passes.free import free
from schedgen.compiler.passes.offload import named_forwards, offload, offload_optimizer
from schedgen.compiler.place import PlacedScheme
from schedgen.compiler.sum_trees import ALLREDUCE
from schedgen.ir.header import Header
from schedgen.ir.instructions import B, Op, W
from schedgen.ir.limits import check_workers
from schedgen.ir.program import Program, rows
from schedgen.ir.weights import FLUSH, TWO_BUFFERS
from schedgen.util.arrays import Ints, Times, stable_order
from schedgen.util.errors import UsageError
from schedgen.util.progress import over
from schedgen.util.version import __version__

Dump = Callable[[str, Program], object]  # is called with the name of a pass, and the program after it
OPS = {1: (Op.FWD,), 2: (Op.FWD, Op.BWD), 3: (Op.FWD, Op.BWD_I, Op.BWD_W)}  # by the number of directions


def lower(placed: PlacedScheme, start: Times, dump: Dump = lambda name, program: None) -> Program:
    """The projected program for jobs that start at `start` (flat, indexed by job)."""
    program = emit_jobs(header_of(placed), start, placed)
    dump("emit_jobs", program)
    header = program.header
    passes = FORWARDS if header.is_forward else PIPELINE if header.has_flush else WITH_VERSIONS
    for insert in over(passes, "lower", len(passes)):
        program = insert(program, placed)
        dump(insert.__name__, program)
    program = program.project()  # a separate statement: it frees the global program, a third of the memory
    program = free(program)
    dump("free", program)
    program = offload(program, placed)
    dump("offload", program)
    program = offload_optimizer(program)
    dump("offload_optimizer", program)
    return program


def emit_jobs(header: Header, start: Times, placed: PlacedScheme) -> Program:
    """The program of all jobs, in time order; `start`: when every job starts, flat over (direction, stage, microbatch).

    RECOMPUTE redoes a forward before its backward if the forward keeps nothing, or if its backward runs on another
    worker, which has nothing saved.
    """
    d, s, b = (index.ravel() for index in np.indices(header.compute.shape, np.int32))
    worker = header.compute.ravel()
    order = stable_order(worker)
    order = order[np.argsort(start[order], kind="stable")]
    ops = np.array(OPS[len(header.compute)], np.int32)[d]
    if placed.unsplit_backward.any():
        unsplit = placed.unsplit_backward[s, b]
        ops[(d == B) & unsplit] = Op.BWD
        order = order[~((d == W) & unsplit)[order]]
    program = Program(header, rows(ops[order], worker[order], stage=s[order], mb=b[order]), start[order])
    redone = np.flatnonzero(placed.redone[program.rows.stage, program.rows.mb] & (d[order] == B))
    job = order[redone]
    return program.insert(rows(Op.RECOMPUTE, worker[job], stage=s[job], mb=b[job]), after=redone - 1)


def header_of(placed: PlacedScheme) -> Header:
    """The header of the program, with a group for every set of ranks that a collective needs."""
    scheme, options = placed.scheme, placed.options
    _, stages, microbatches = placed.compute.shape
    counts = [len(owners) for owners in placed.shard_owners]
    accumulated = scheme.replicas * (scheme.accumulated or stages)
    header = Header(
        scheme={
            "name": scheme.name, "workers": placed.workers, "stages": stages, "microbatches": microbatches,
            **({"shards": counts[0] if len(set(counts)) == 1 else counts} if counts else {}), **scheme.parameters,
            **({} if options.substages == 1 else {"substages": options.substages}),
        },
        mode=scheme.mode,
        n=scheme.order,
        cost=placed.cost,
        lowering={
            "weight_slots": options.weight_slots,
            "fan_out": options.fan_out,
            "prefetch": options.prefetch,
            "recompute": named_forwards(placed.recompute),
            **({} if options.memory_limit is None else {"memory_limit": options.memory_limit}),
            **({} if scheme.updates == FLUSH else {"updates": scheme.updates}),
            **({"accumulated": accumulated} if scheme.updates == TWO_BUFFERS else {}),
            **({} if options.in_order is None else {"transport": options.in_order.name}),
            **({} if options.sums == ALLREDUCE else {"sums": options.sums}),
            **{name: True for name in ("offload_optimizer", "evict") if getattr(options, name)},
        },
        graph=placed.graph,
        tied=placed.tied,
        groups=(),
        compute=placed.compute,
        weights=placed.weights,
        generator=f"schedgen {__version__}",
        shard_owners=placed.shard_owners,
        tensor_parallel=placed.tensor_parallel,
    )  # fmt: skip
    groups = _slice_groups(placed)
    if header.sums_by_messages:
        header = replace(header, parts=_parts(placed, header))
    elif not header.is_forward:
        groups |= {ranks for ranks, several in zip(header.owners, header.several_owners, strict=True) if several}
    if not header.is_forward:
        groups |= {header.sharers(tie) for tie in range(len(header.tied))}
        groups |= {tuple(range(placed.workers))}
    return replace(header, groups=tuple(sorted(groups, key=lambda group: (-len(group), group))))


def _parts(placed: PlacedScheme, header: Header) -> tuple[int, ...]:
    """By stage, the parts of its gradient that have a tree each; (): none is cut."""
    pairs = zip(header.owners, header.several_owners, strict=True)
    parts = tuple(len(placed.sum_trees(owners)) if several else 1 for owners, several in pairs)
    if not any(header.several_owners):
        raise UsageError(f"--sums {placed.options.sums}: no stage has several owners, whose gradients would be summed")
    check_workers(header.workers, sum(parts), "parts of gradients")
    return parts if max(parts) > 1 else ()


def _slice_groups(placed: PlacedScheme) -> set[tuple[int, ...]]:
    """The groups of ranks, ascending, that sum the outputs and gradients of the slices of a sliced stage."""
    T, split = placed.tensor_parallel.degree, placed.tensor_parallel.sliced
    if T == 1:
        return set()
    directions, stages, microbatches = placed.compute.shape
    by_slice = placed.compute.reshape(directions, stages // T, T, microbatches)[:2, split[::T]]
    ranks: Ints = np.sort(np.moveaxis(by_slice, 2, 3).reshape(-1, T), axis=1)
    return {tuple(group) for group in np.unique(ranks, axis=0).tolist()}
