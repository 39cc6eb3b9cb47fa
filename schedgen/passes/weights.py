"""Weights: a worker that computes a stage it does not own fetches w.s from someone who has it.

Where w.s is divided it fetches the parts that it does not own, those of its nearest neighbours upwards first, so
that workers which begin together ask different ones.

At most `weight_slots` foreign copies are held at a time. The future is known,
so the copy needed furthest ahead goes first, which gives the fewest fetches
possible [Belady, "A study of replacement algorithms", 1966].

A fetch stands `prefetch` jobs before the one that needs the copy, or before the
job its server is busy with then: there the server can still send it in time.
It never stands earlier than the slot it takes is empty. Owner and copies each serve at most `fan_out` fetches
at a time; who comes later asks a copy, so that the copies form a tree. K parts count as one fetch.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from schedgen.cost import DIRECTION
from schedgen.passes.lookup import Places, home
from schedgen.passes.options import Options
from schedgen.program import COMPUTE, Kind, Op, Program, rows


class Copy(NamedTuple):
    """A foreign copy on a worker. All numbers but the first are rows or ranks."""

    job: int  # the first job that needs it
    rank: int
    stage: int
    room: int  # its slot is empty behind this row
    wanted: int  # the job before which it should be on its way
    end: int  # its last use


@dataclass
class Held:
    """A copy on a worker that may serve others."""

    rank: int
    at: int  # it is there behind this row ...
    end: int  # ... and up to this
    depth: int  # copies between it and the owner
    served: int = 0  # copies it has sent out


def weights(program: Program, options: Options) -> Program:
    header, table = program.header, program.rows
    owned = np.zeros((header.workers, header.stages), bool)  # as a whole
    for stage, ranks in enumerate(header.owners):
        owned[list(ranks), stage] = header.several[stage] or len(ranks) == 1
    compute = np.flatnonzero(np.isin(table.op, COMPUTE))
    compute = compute[np.argsort(table.rank[compute], kind="stable")]
    busy = np.split(compute, np.searchsorted(table.rank[compute], np.arange(1, header.workers)))
    copies: list[Copy] = []
    for rank, jobs in enumerate(busy):
        foreign = jobs[~owned[rank, table.stage[jobs]]]
        if len(foreign):
            copies += _copies(program, rank, foreign, jobs, options)
    fields: list[tuple[int, int, int, int, int, int]] = []  # op, rank, stage, via, peer, after
    sources = {(copy.rank, copy.stage): _sources(program, copy.rank, copy.stage) for copy in copies}
    # What is freed behind a row makes room for what is fetched there.
    for copy in copies:
        fields += [(Op.FREE, copy.rank, copy.stage, via, -1, copy.end) for via, _ in sources[copy.rank, copy.stage]]
    served = _served(program, copies, sources, busy, options.fan_out)
    if header.shards:  # behind one row: what comes from an owner, nearest neighbours first, and then what is passed on
        served.sort(key=lambda one: (one[3], one[4], (one[2] - one[0].rank) % header.workers))
    for copy, via, server, at, _ in served:
        fields.append((Op.SEND, server, copy.stage, via, copy.rank, at))
        fields.append((Op.FETCH_W, copy.rank, copy.stage, via, server, at))
    op, rank_, stage_, via_, peer, after = np.array(fields, np.int64).reshape(-1, 6).T
    return program.insert(rows(op, rank_, kind=Kind.W, stage=stage_, via=via_, peer=peer), after=after)


def _sources(program: Program, rank: int, stage: int) -> list[tuple[int, int]]:
    """(`via`, owner) of the parts of a stage that `rank` fetches, in the order in which it does."""
    header = program.header
    if header.parts(stage) == (-1,):
        return [(-1, home(program, rank, stage))]
    parts = [(via, owner) for via, owner in enumerate(header.shards[stage]) if owner != rank]
    return sorted(parts, key=lambda part: ((part[1] - rank) % header.workers, part[0]))


def _copies(program: Program, rank: int, foreign: Places, jobs: Places, options: Options) -> list[Copy]:
    """The copies that `rank` fetches; `foreign`: those of its jobs whose stage it does not own."""
    uses = program.rows.stage[foreign].tolist()
    next_use = _next_uses(uses)
    places = np.searchsorted(jobs, foreign)
    wanted = jobs[np.maximum(places - options.prefetch, 0)].tolist()
    begun: dict[int, tuple[int, int]] = {}  # by held stage: index of its first use, row behind which there is room
    last: dict[int, int] = {}  # by held stage: index of its last use so far
    empty = [-1] * min(options.weight_slots, len(set(uses)))  # rows behind which the free slots are empty
    left: dict[int, int] = {}  # stage -> row behind which its last copy went
    copies: list[Copy] = []

    def drop(stage: int) -> None:
        first, room = begun.pop(stage)
        left[stage] = int(foreign[last.pop(stage)])
        heappush(empty, left[stage])
        copies.append(Copy(int(foreign[first]), rank, stage, room, wanted[first], left[stage]))

    for i, stage in enumerate(uses):
        if stage not in begun:
            if not empty:
                drop(max(begun, key=lambda s: next_use[last[s]]))
            begun[stage] = i, max(heappop(empty), left.get(stage, -1))
        last[stage] = i
        if next_use[i] == len(uses):
            drop(stage)
    return copies


def _served(
    program: Program, copies: list[Copy], sources: dict[tuple[int, int], list[tuple[int, int]]], busy: list[Places],
    fan_out: int,
) -> list[tuple[Copy, int, int, int, int]]:  # fmt: skip
    """(copy, `via`, who sends that part, behind which row, copies it has gone through).

    The owner sends, or else the oldest copy that can in time.
    """
    time = program.time
    assert time is not None
    length = np.array([program.header.cost.get(DIRECTION.get(op, ""), 0.0) for op in Op])
    begins = [time[jobs] for jobs in busy]
    ends = [time[jobs] + length[program.rows.op[jobs]] for jobs in busy]
    found: list[tuple[Copy, int, int, int, int]] = []
    held: dict[tuple[int, int, int], list[Held]] = {}
    parts = [len(program.header.parts(stage)) for stage in range(program.header.stages)]
    wanted = [(one, *part) for one in sorted(copies) for part in sources[one.rank, one.stage]]
    for copy, via, owner in wanted:
        most = fan_out * parts[copy.stage]

        def place(server: int, copy: Copy = copy) -> int:
            """Behind which row `server` can send the copy in time."""
            then = time[copy.wanted]
            before = int(np.searchsorted(begins[server], then))
            late = before and ends[server][before - 1] > then  # it is busy at that time
            row = int(busy[server][before - 1]) if late else int(np.searchsorted(time, then))
            return max(row - 1, copy.room)

        alive = held.setdefault((copy.stage, via, owner), [])
        server, at, depth = owner, place(owner), 0
        alive[:] = [one for one in alive if one.end > copy.room and one.end > at]
        if sum(one.depth == 0 for one in alive) >= most:
            for one in alive:
                if one.served < most and one.at <= (relayed := place(one.rank)) < one.end:
                    server, at, depth = one.rank, relayed, one.depth + 1
                    one.served += 1
                    break
        found.append((copy, via, server, at, depth))
        alive.append(Held(copy.rank, at, copy.end, depth))
    return found


def _next_uses(uses: list[int]) -> list[int]:
    """For every i, the next j > i with uses[j] == uses[i], or len(uses)."""
    following: dict[int, int] = {}
    result = [0] * len(uses)
    for i in range(len(uses) - 1, -1, -1):
        result[i] = following.get(uses[i], len(uses))
        following[uses[i]] = i
    return result
