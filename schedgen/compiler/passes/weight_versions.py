"""Updates without a flush: every microbatch's gradient changes the weights as soon as it is there.

Behind the backward of a microbatch stands STEP, which makes the next version
of the stage's weights [PipeDream, section 3.3]. A stage with m owners takes m
microbatches, one for each of them, to an update: each owner enters ALLREDUCE
behind its own backward and steps when the last of them is done, but before its
next backward of the stage. A version that jobs behind its STEP still use is
freed behind the last of them; all others end with the STEP.

In the order of time nothing here waits for anything later, so that the order
stays one that works.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedgen.compiler.options import Options
from schedgen.compiler.passes.find_rows import Places, behind, rows_of
from schedgen.ir.header import Header
from schedgen.ir.instructions import B, F, Kind, Op
from schedgen.ir.program import Program, rows
from schedgen.util.errors import UsageError

Field = tuple[int, int, int, int, int, int]  # op, rank, kind, stage, peer, after


class Updates(NamedTuple):
    """Those of one owner of a stage: behind which row it enters the sum, and steps; by round."""

    sums: Places
    steps: Places


def update(program: Program, options: Options) -> Program:
    header = program.header
    refuse(header)
    done = rows_of(program, Op.BWD, Op.BWD_W)
    ended = behind(program, done)
    found = {
        (rank, stage): _of_owner(header, rank, stage, done[stage], ended[stage])
        for stage, owners in enumerate(header.owners)
        for rank in owners
    }
    forward = rows_of(program, Op.FWD)
    newest = np.empty(forward.shape, np.int64)
    for (rank, stage), updates in found.items():
        mine = header.compute[F, stage] == rank
        newest[stage, mine] = np.searchsorted(updates.steps, forward[stage, mine])
    version = _entered(header, newest) if header.weight_versions.updates == "vertical" else newest
    table = program.rows
    jobs = np.flatnonzero(table.stage >= 0)  # the compute instructions, and nothing else as yet
    peer = table.peer.copy()
    peer[jobs] = version[table.stage[jobs], table.mb[jobs]]
    program = Program(header, table._replace(peer=peer), program.time)
    # By owner and version, one owner's behind another's: the last job that uses it.
    begin = np.full((header.stages, header.workers), -1, np.int64)
    count = 0
    for (rank, stage), updates in found.items():
        begin[stage, rank] = count
        count += len(updates.steps) + 1
    last = np.full(count, -1, np.int64)
    np.maximum.at(last, begin[table.stage[jobs], table.rank[jobs]] + peer[jobs], jobs)
    groups = {group: index for index, group in enumerate(header.groups)}
    fields: list[Field] = []
    for (rank, stage), (sums, steps) in found.items():
        owners = header.owners[stage]
        for k, (summed, stepped) in enumerate(zip(sums.tolist(), steps.tolist(), strict=True)):
            if len(owners) > 1:
                fields.append((Op.ALLREDUCE, rank, Kind.DW, stage, groups[owners], summed))
            fields.append((Op.STEP, rank, Kind.NONE, stage, k + 1, stepped))
            fields.append((Op.FREE, rank, Kind.DW, stage, -1, stepped))
            if last[begin[stage, rank] + k] > stepped:
                fields.append((Op.FREE, rank, Kind.W, stage, k, int(last[begin[stage, rank] + k])))
    everyone = groups[tuple(range(header.workers))]
    fields += [(Op.NORM, rank, Kind.NONE, -1, everyone, len(program) - 1) for rank in range(header.workers)]
    op, rank_, kind, stage_, peer_, after = np.array(fields, np.int64).T
    return program.insert(rows(op, rank_, kind=kind, stage=stage_, peer=peer_), after=after)


def refuse(header: Header) -> None:
    """UsageError where a schedule cannot have versions of weights."""
    if (header.weights != header.compute).any() or (header.compute[F] != header.compute[B]).any():
        raise UsageError(
            f"--updates {header.weight_versions.updates}: w must put a job's weights where it is computed, "
            "and a backward where its forward is"
        )
    if header.tied:
        raise UsageError(
            f"--updates {header.weight_versions.updates}: tied stages step together, which is --updates flush"
        )


def _of_owner(header: Header, rank: int, stage: int, done: Places, ended: Places) -> Updates:
    """`done`, `ended`: by microbatch, the row of its backward, and the one behind which that has ended."""
    size, count = header.weight_versions.round(stage), -(-header.microbatches // header.weight_versions.round(stage))
    b = np.arange(header.microbatches)
    mine = header.compute[B, stage] == rank
    own = np.full(count, -1, np.int64)  # by round: behind its own part
    np.maximum.at(own, b[mine] // size, done[mine])
    whole = np.maximum.reduceat(done if size == 1 else ended, np.arange(0, header.microbatches, size))
    first = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(first, b[mine] // size, done[mine])
    before = np.minimum.accumulate(np.append(first[1:], first.dtype.type(2**62))[::-1])[::-1]  # the next round's first
    sums = np.where(own < 0, whole, own)
    steps = np.maximum.accumulate(np.minimum(np.maximum(whole, sums), before - 1))
    sums = np.clip(sums, np.append(-1, steps[:-1]), steps)  # behind the step before
    if (own > steps).any():
        k = int(np.argmax(own > steps))
        raise UsageError(
            f"--updates {header.weight_versions.updates}: worker {rank} does a backward of stage {stage} that belongs "
            f"to update {k + 1} behind one of a later update: backwards of a stage go in the order of the microbatches"
        )
    return Updates(sums, steps)


def _entered(header: Header, newest: Places) -> Places:
    """The versions of vertical sync: of each stage the newest that has no microbatch which the first has not.

    `newest`: the newest version when each forward starts, (S, B). Where several stages read the input, the one
    behind counts.
    """
    sizes = np.array([header.weight_versions.round(stage) for stage in range(header.stages)])
    first = [stage for stage, producers in enumerate(header.graph.producers) if not producers]
    known = (newest[first] * sizes[first, None]).min(axis=0)
    entered: Places = np.minimum(known // sizes[:, None], -(-header.microbatches // sizes)[:, None])
    for s, b in np.argwhere(entered > newest)[:1].tolist():
        raise UsageError(
            f"--updates {header.weight_versions.updates}: microbatch {b} enters with version {entered[s, b]} and comes "
            f"to stage {s} before that is made there: stages must update from the last to the first"
        )
    return entered
