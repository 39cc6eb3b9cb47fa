"""Updates without a flush: the gradients of a few microbatches change the weights as soon as they are complete.

The backward of a microbatch is followed by STEP, which makes the next version of the stage's weights [PipeDream,
section 3.3]. An update of a stage with m owners takes m microbatches (a round), one for each owner; with two buffers
the scheme sets m. Each owner enters ALLREDUCE after its own backwards and steps when the last owner is done, but
before its next backward of the stage. A version that jobs after the next STEP still use is freed after the last of
those jobs; any other ends with that STEP.

In the time order no instruction inserted here waits for a later one, so the order stays executable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from schedgen.compiler.passes.find_rows import rows_at_end
from schedgen.compiler.place import PlacedScheme
from schedgen.ir.header import Header
from schedgen.ir.instructions import B, F, Kind, Op
from schedgen.ir.program import Program, rows
from schedgen.ir.weights import TWO_BUFFERS, VERTICAL
from schedgen.util.arrays import Numbers
from schedgen.util.errors import NeedsOption, UsageError

Fields = tuple[int, int, int, int, int, int]  # op, rank, kind, stage, group or version, after


class Updates(NamedTuple):
    """The updates of one owner of a stage, by round."""

    sums: Numbers  # the row after which the owner enters the sum
    steps: Numbers  # the row after which the owner steps


def weight_versions(program: Program, placed: PlacedScheme) -> Program:
    """The program with versions in its jobs, and with the ALLREDUCEs, STEPs and FREEs of all updates, and NORM."""
    header = program.header
    check_placement(header)
    backward, forward = program.job_rows(Op.BWD, Op.BWD_W), program.job_rows(Op.FWD)
    ended = rows_at_end(program, backward, placed.lengths)
    updates = {
        (rank, stage): _updates(header, rank, stage, backward[stage], ended[stage])
        for stage, owners in enumerate(header.owners)
        for rank in owners
    }
    newest = np.empty(forward.shape, np.int64)  # the newest version when each forward starts
    for (rank, stage), owned in updates.items():
        own = header.compute[F, stage] == rank
        newest[stage, own] = np.searchsorted(owned.steps, forward[stage, own])
    version, table = _used(header, newest), program.rows  # only compute instructions so far
    table = table._replace(operand=version[table.stage, table.mb].astype(np.int32))
    program = Program(header, table, program.time)
    last_uses = _last_uses(program, updates)
    fields: list[Fields] = []
    for (rank, stage), (sums, steps) in updates.items():
        owners = header.owners[stage]
        for k, (summed, stepped) in enumerate(zip(sums.tolist(), steps.tolist(), strict=True)):
            if len(owners) > 1:
                fields.append((Op.ALLREDUCE, rank, Kind.DW, stage, header.group_numbers[owners], summed))
            fields.append((Op.STEP, rank, Kind.NONE, stage, k + 1, stepped))
            fields.append((Op.FREE, rank, Kind.DW, stage, -1, stepped))
            if last_uses[rank, stage][k] > stepped:
                fields.append((Op.FREE, rank, Kind.W, stage, k, last_uses[rank, stage][k]))
    everyone = header.group_numbers[tuple(range(header.workers))]
    fields += [(Op.NORM, rank, Kind.NONE, -1, everyone, len(program) - 1) for rank in range(header.workers)]
    op, rank_, kind, stage_, operand, after = np.array(fields, np.int64).T
    return program.insert(rows(op, rank_, kind=kind, stage=stage_, operand=operand), after=after)


def check_placement(header: Header) -> None:
    """UsageError if a schedule cannot have versions of weights."""
    if (header.weights != header.compute).any() or (header.compute[F] != header.compute[B]).any():
        raise UsageError(
            f"--updates {header.weight_versions.updates}: w must put a job's weights where it is computed, "
            "and a backward where its forward is"
        )
    if header.stepped_together:
        what = f"{header.stepped_together} step together"
        raise NeedsOption(f"--updates {header.weight_versions.updates}: {what}, which needs --updates flush")


def _last_uses(program: Program, updates: Mapping[tuple[int, int], Updates]) -> dict[tuple[int, int], list[int]]:
    """By rank and stage that it owns, the last row that uses each version; -1: none."""
    header, table = program.header, program.rows
    begin, count = np.full((header.workers, header.stages), -1, np.int64), 0
    for (rank, stage), owned in updates.items():
        begin[rank, stage] = count
        count += len(owned.steps) + 1
    last = np.full(count, -1, np.int64)
    np.maximum.at(last, begin[table.rank, table.stage] + table.version, np.arange(len(program)))
    return {key: last[begin[key] : begin[key] + len(owned.steps) + 1].tolist() for key, owned in updates.items()}


def _updates(header: Header, rank: int, stage: int, backward: Numbers, ended: Numbers) -> Updates:
    """The updates of one owner of a stage; by microbatch, `backward`: its row, `ended`: the row after which it ends."""
    size = header.weight_versions.round(stage)
    count = -(-header.microbatches // size)
    own = header.compute[B, stage] == rank
    rounds, rows = np.flatnonzero(own) // size, backward[own]
    last = np.full(count, -1, np.int64)  # by round: its own last backward
    np.maximum.at(last, rounds, rows)
    first = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(first, rounds, rows)
    complete_at = ended if header.several_owners[stage] else backward
    complete = np.maximum.reduceat(complete_at, np.arange(0, header.microbatches, size))
    next_first = np.minimum.accumulate(np.append(first[1:], first.dtype.type(2**62))[::-1])[::-1]
    sums = np.where(last < 0, complete, last)
    steps = np.maximum.accumulate(np.minimum(np.maximum(complete, sums), next_first - 1))
    sums = np.clip(sums, np.append(-1, steps[:-1]), steps)  # after the previous step
    if (last > steps).any():
        k = int(np.argmax(last > steps))
        raise UsageError(
            f"--updates {header.weight_versions.updates}: worker {rank} does a backward of stage {stage} that belongs "
            f"to update {k + 1} after one of a later update: backwards of a stage must follow the order of microbatches"
        )
    return Updates(sums, steps)


def _used(header: Header, newest: Numbers) -> Numbers:
    """The version that each forward uses, (S, B); `newest`: the newest version when it starts.

    With vertical sync, at each stage the newest whose microbatches are all in the first stage's; if several stages read
    the input, the one furthest behind counts. With two buffers, at all stages that made by the update before the last.
    """
    versions, used = header.weight_versions, newest
    if versions.updates == VERTICAL:
        sizes = np.array(versions.rounds)
        first = [stage for stage, producers in enumerate(header.graph.producers) if not producers]
        microbatches = (newest[first] * sizes[first, None]).min(axis=0)  # whose updates all stages may use
        used = np.minimum(microbatches // sizes[:, None], -(-header.microbatches // sizes)[:, None])
    elif versions.updates == TWO_BUFFERS:
        used = np.broadcast_to(versions.delayed(np.arange(header.microbatches)), newest.shape)
    for s, b in np.argwhere(used > newest)[:1].tolist():
        why = f"reaches stage {s} before the stage has made version {used[s, b]}: more microbatches are in flight than "
        why += f"the {versions.accumulated} of an update"
        if versions.updates == VERTICAL:
            why = f"enters with version {used[s, b]} but reaches stage {s} before the stage has made it: stages must "
            why += "update from the last to the first"
        raise UsageError(f"--updates {versions.updates}: microbatch {b} {why}")
    return used
