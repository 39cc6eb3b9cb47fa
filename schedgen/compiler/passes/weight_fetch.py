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

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain
from typing import NamedTuple

import numpy as np

from schedgen.compiler.options import Options
from schedgen.compiler.passes.find_rows import Places, home
from schedgen.ir.cost import DIRECTION
from schedgen.ir.instructions import COMPUTE, Kind, Op
from schedgen.ir.program import Program, concatenate, rows


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


@dataclass
class Alive:
    """The copies of one part of one stage that have not ended, by their number."""

    count: int = 0  # how many there have ever been
    direct: int = 0  # of those alive, how many the owner has sent
    able: dict[int, Held] = field(default_factory=dict)  # those that may serve more, the oldest first
    ends: list[tuple[int, int, bool]] = field(default_factory=list)  # heap: last row, number, whether from the owner

    def add(self, one: Held) -> None:
        self.able[self.count] = one
        heappush(self.ends, (one.end, self.count, one.depth == 0))
        self.direct += one.depth == 0
        self.count += 1

    def forget(self, row: int) -> None:
        """Those that end before or behind this row."""
        while self.ends and self.ends[0][0] <= row:
            _, number, direct = heappop(self.ends)
            self.able.pop(number, None)
            self.direct -= direct


def weights(program: Program, options: Options) -> Program:
    header, table = program.header, program.rows
    owned = np.zeros((header.workers, header.stages), bool)  # as a whole
    for stage, ranks in enumerate(header.owners):
        owned[list(ranks), stage] = header.several_owners[stage] or len(ranks) == 1
    compute = np.flatnonzero(np.isin(table.op, COMPUTE))
    compute = compute[np.argsort(table.rank[compute], kind="stable")]
    busy = np.split(compute, np.searchsorted(table.rank[compute], np.arange(1, header.workers)))
    copies: list[Copy] = []
    for rank, jobs in enumerate(busy):
        foreign = jobs[~owned[rank, table.stage[jobs]]]
        if len(foreign):
            copies += _copies(program, rank, foreign, jobs, options)
    sources = {(copy.rank, copy.stage): _sources(program, copy.rank, copy.stage) for copy in copies}
    # What is freed behind a row makes room for what is fetched there.
    freed = [(one.rank, one.stage, via, one.end) for one in copies for via, _ in sources[one.rank, one.stage]]
    rank_, stage_, via_, end = _columns(freed, 4)
    frees = rows(Op.FREE, rank_, kind=Kind.W, stage=stage_, via=via_)
    rank_, stage_, via_, server, at, depth = _columns(_served(program, copies, sources, busy, options.fan_out), 6)
    if (
        header.part_owners
    ):  # behind one row: what comes from an owner, nearest neighbours first, and then what is passed on
        order = np.lexsort(((server - rank_) % header.workers, depth, at))
        rank_, stage_, via_, server, at = (column[order] for column in (rank_, stage_, via_, server, at))
    ends, others = (np.stack(pair, axis=1).ravel() for pair in ((server, rank_), (rank_, server)))
    stage_, via_, at = (np.repeat(column, 2) for column in (stage_, via_, at))
    ops = np.tile(np.array([Op.SEND, Op.FETCH_W], np.int8), len(server))
    copied = rows(ops, ends, kind=Kind.W, stage=stage_, via=via_, peer=others)
    return program.insert(concatenate([frees, copied]), after=np.concatenate([end, at]))


def _columns(found: Sequence[tuple[int, ...]], count: int) -> list[Places]:
    """Rows of `count` numbers as columns."""
    return list(np.fromiter(chain.from_iterable(found), np.int64, count * len(found)).reshape(-1, count).T)


def _sources(program: Program, rank: int, stage: int) -> list[tuple[int, int]]:
    """(`via`, owner) of the parts of a stage that `rank` fetches, in the order in which it does."""
    header = program.header
    if header.weight_shards.parts(stage) == (-1,):
        return [(-1, home(program, rank, stage))]
    parts = [(via, owner) for via, owner in enumerate(header.part_owners[stage]) if owner != rank]
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
) -> list[tuple[int, ...]]:  # fmt: skip
    """(rank and stage of a copy, `via`, who sends that part, behind which row, copies it has gone through).

    The owner sends, or else the oldest copy that can in time.
    """
    time = program.time
    assert time is not None
    length = np.array([program.header.cost.get(DIRECTION.get(op, ""), 0.0) for op in Op])
    begins = [time[jobs].tolist() for jobs in busy]
    ends = [(time[jobs] + length[program.rows.op[jobs]]).tolist() for jobs in busy]
    jobs_of = [jobs.tolist() for jobs in busy]
    found: list[tuple[int, ...]] = []
    held: dict[tuple[int, int, int], Alive] = {}
    parts = [len(program.header.weight_shards.parts(stage)) for stage in range(program.header.stages)]
    for copy in sorted(copies):
        most = fan_out * parts[copy.stage]
        then = float(time[copy.wanted])
        first = int(np.searchsorted(time, then))
        known: dict[int, int] = {}

        def place(server: int, then: float = then, first: int = first, room: int = copy.room) -> int:
            """Behind which row `server` can send the copy in time."""
            before = bisect_left(begins[server], then)
            late = before and ends[server][before - 1] > then  # it is busy at that time
            return max((jobs_of[server][before - 1] if late else first) - 1, room)

        for via, owner in sources[copy.rank, copy.stage]:
            alive = held.setdefault((copy.stage, via, owner), Alive())
            server, at, depth = owner, place(owner), 0
            alive.forget(at)
            if alive.direct >= most:
                for number, one in alive.able.items():
                    relayed = known.get(one.rank)
                    if relayed is None:
                        relayed = known[one.rank] = place(one.rank)
                    if one.at <= relayed < one.end:
                        server, at, depth = one.rank, relayed, one.depth + 1
                        one.served += 1
                        if one.served == most:
                            del alive.able[number]
                        break
            found.append((copy.rank, copy.stage, via, server, at, depth))
            alive.add(Held(copy.rank, at, copy.end, depth))
    return found


def _next_uses(uses: list[int]) -> list[int]:
    """For every i, the next j > i with uses[j] == uses[i], or len(uses)."""
    following: dict[int, int] = {}
    result = [0] * len(uses)
    for i in range(len(uses) - 1, -1, -1):
        result[i] = following.get(uses[i], len(uses))
        following[uses[i]] = i
    return result
