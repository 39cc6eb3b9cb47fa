"""Weights: a worker that computes a stage it does not own fetches w.s from a worker that has it.

Of divided weights it fetches the shards that it does not own, first from the next worker, then from the one after it,
and so on, so that workers that begin together fetch from different owners. K shards count as one fetch.

1. At most `weight_slots` foreign copies are held at a time. The future is known, so the copy whose next use is furthest
   away is dropped, which gives the fewest fetches possible [Belady, "A study of replacement algorithms", 1966].
2. A fetch comes `prefetch` jobs before the job that needs the copy or, if its server is busy at that time, before the
   job that the server is running then, so that the server can still send in time. It never comes before its slot is
   empty.
3. Once `fan_out` live copies have come from the owner, a fetch goes to the oldest copy that can send in time and has
   served fewer than `fan_out`, if there is one, so that the copies form a tree. With fan_out 2, workers 1 to 7 that
   fetch in this order from owner 0, each while the copies before it are live:

       0 ---- 1 ---- 3        the owner sends to 1 and 2; then 1, the oldest copy, to 3 and 4; then 2 to 5 and 6;
       |      `----- 4        then 3, the oldest that has served fewer than two, to 7.
       `----- 2 ---- 5
              `----- 6        If 1 were dropped before 4 is wanted, the owner would have one live copy less and would
       3 ---- 7               send to 4 itself.
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
from schedgen.compiler.passes.find_rows import serving_owners
from schedgen.compiler.passes.send_recv import transfers
from schedgen.compiler.place import PlacedScheme
from schedgen.ir.cost import DIRECTION, redo_duration
from schedgen.ir.instructions import COMPUTE, Kind, Op
from schedgen.ir.program import Program, concatenate, rows
from schedgen.util.arrays import Numbers, stable_order


class Copy(NamedTuple):
    """A foreign copy on a worker. All numbers but the first are rows or ranks."""

    job: int  # the first job that needs it
    rank: int
    stage: int
    room: int  # its slot is empty after this row
    wanted: int  # the job before which its transfer should start
    end: int  # its last use


@dataclass
class Server:
    """A copy on a worker that may serve others."""

    rank: int
    begin: int  # it is available after this row ...
    end: int  # ... and up to this
    depth: int  # copies between it and the owner
    served: int = 0  # copies it has sent out


@dataclass
class Servers:
    """The live copies of one shard of one stage that come from one owner."""

    count: int = 0  # how many there have ever been
    direct: int = 0  # how many of the live copies the owner has sent
    able: dict[int, Server] = field(default_factory=dict)  # by number, those that may serve more fetches, oldest first
    ends: list[tuple[int, int, bool]] = field(default_factory=list)  # heap: last row, number, whether from the owner

    def add(self, copy: Server) -> None:
        """Add a copy that has just been fetched."""
        self.able[self.count] = copy
        heappush(self.ends, (copy.end, self.count, copy.depth == 0))
        self.direct += copy.depth == 0
        self.count += 1

    def forget(self, row: int) -> None:
        """Drop the copies whose last use is at or before this row."""
        while self.ends and self.ends[0][0] <= row:
            _, number, direct = heappop(self.ends)
            self.able.pop(number, None)
            self.direct -= direct


def weight_fetch(program: Program, placed: PlacedScheme) -> Program:
    """The program with the SENDs, FETCH_Ws and FREEs of all weight copies."""
    header, table, options = program.header, program.rows, placed.options
    owned = np.zeros((header.workers, header.stages), bool)  # with all shards
    for stage, ranks in enumerate(header.owners):
        owned[list(ranks), stage] = header.several_owners[stage] or len(ranks) == 1
    compute = program.rows_of(*COMPUTE)
    compute = compute[stable_order(table.rank[compute])]
    jobs = np.split(compute, np.searchsorted(table.rank[compute], np.arange(1, header.workers)))  # by rank
    copies: list[Copy] = []
    for rank, own_jobs in enumerate(jobs):
        foreign = own_jobs[~owned[rank, table.stage[own_jobs]]]
        if len(foreign):
            copies += _copies(program, rank, foreign, own_jobs, options)
    if not copies:
        return program
    serving = serving_owners(program)
    sources = {pair: _sources(program, serving, *pair) for pair in {(copy.rank, copy.stage) for copy in copies}}
    # What is freed after a row makes room for what is fetched there.
    freed = [(copy.rank, copy.stage, shard, copy.end) for copy in copies for shard, _ in sources[copy.rank, copy.stage]]
    rank_, stage_, shard_, end = _columns(freed, 4)
    frees = rows(Op.FREE, rank_, kind=Kind.W, stage=stage_, shard=shard_)
    fetches = _fetches(program, copies, sources, jobs, placed)
    rank_, stage_, shard_, server, after, depth = _columns(fetches, 6)
    if header.shard_owners:  # after one row: copies from an owner, the nearest first, and then relayed ones
        order = np.lexsort(((server - rank_) % header.workers, depth, after))
        rank_, stage_, shard_, server, after = (column[order] for column in (rank_, stage_, shard_, server, after))
    moves, after = transfers(Op.FETCH_W, Kind.W, server, rank_, after, stage=stage_, shard=shard_)
    return program.insert(concatenate([frees, moves]), after=np.concatenate([end, after]))


def _columns(tuples: Sequence[tuple[int, ...]], count: int) -> list[Numbers]:
    return list(np.fromiter(chain.from_iterable(tuples), np.int64, count * len(tuples)).reshape(-1, count).T)


def _sources(program: Program, serving: list[list[int]], rank: int, stage: int) -> list[tuple[int, int]]:
    """(shard, owner) of the shards of a stage that `rank` fetches, in the order of its fetches."""
    header = program.header
    if not header.is_sharded(stage):
        return [(-1, serving[stage][rank])]
    shards = [(shard, owner) for shard, owner in enumerate(header.shard_owners[stage]) if owner != rank]
    return sorted(shards, key=lambda source: ((source[1] - rank) % header.workers, source[0]))


def _copies(program: Program, rank: int, foreign: Numbers, jobs: Numbers, options: Options) -> list[Copy]:
    """The copies that `rank` fetches; `jobs`: its jobs, `foreign`: the jobs whose stage it does not own."""
    uses, job_rows = program.rows.stage[foreign].tolist(), foreign.tolist()
    next_use = _next_uses(uses)
    places = np.searchsorted(jobs, foreign)
    wanted = jobs[np.maximum(places - options.prefetch, 0)].tolist()
    begun: dict[int, tuple[int, int]] = {}  # by held stage: index of its first use, row after which its slot is empty
    last: dict[int, int] = {}  # by held stage: index of its last use so far
    empty = [-1] * min(options.weight_slots, len(set(uses)))  # rows after which the free slots are empty
    left: dict[int, int] = {}  # stage -> row after which its last copy was dropped
    copies: list[Copy] = []

    def drop(stage: int) -> None:
        first, room = begun.pop(stage)
        left[stage] = job_rows[last.pop(stage)]
        heappush(empty, left[stage])
        copies.append(Copy(job_rows[first], rank, stage, room, wanted[first], left[stage]))

    for i, stage in enumerate(uses):
        if stage not in begun:
            if not empty:
                drop(max(begun, key=lambda s: next_use[last[s]]))
            begun[stage] = i, max(heappop(empty), left.get(stage, -1))
        last[stage] = i
        if next_use[i] == len(uses):
            drop(stage)
    return copies


def _fetches(
    program: Program, copies: list[Copy], sources: dict[tuple[int, int], list[tuple[int, int]]],
    jobs: list[Numbers], placed: PlacedScheme,
) -> list[tuple[int, ...]]:  # fmt: skip
    """The fetches: (rank and stage of a copy, shard, its sender, the row after which it is sent, number of relays).

    The policy is *owner first, then the oldest relay in time*: the owner sends until `fan_out` of its copies are live;
    then the oldest live copy that arrived before the row after which it must send, and stays until then, sends in its
    place, up to `fan_out` times; if there is none, the owner sends after all. `jobs`: by rank.
    """
    time, lengths, fan_out = program.time, placed.lengths, placed.options.fan_out
    assert time is not None
    rows, length = program.rows, np.stack([lengths.get(DIRECTION.get(op, ""), 0 * lengths["F"])[:, 0] for op in Op])
    length[Op.RECOMPUTE] = redo_duration(lengths)[:, 0]
    begins = [time[own].tolist() for own in jobs]
    ends = [(time[own] + length[rows.op[own], rows.stage[own]]).tolist() for own in jobs]
    job_rows = [own.tolist() for own in jobs]
    fetches: list[tuple[int, ...]] = []
    servers: dict[tuple[int, int, int], Servers] = {}
    shards = program.header.weight_shards.counts.tolist()
    copies = sorted(copies)
    times = time[[copy.wanted for copy in copies]]
    firsts: list[int] = np.searchsorted(time, times).tolist()
    for copy, then, first in zip(copies, times.tolist(), firsts, strict=True):
        most = fan_out * shards[copy.stage]
        relays: dict[int, int] = {}  # by rank: the row after which it can send

        def send_row(server: int) -> int:
            """The row after which `server` can send the copy in time."""
            before = bisect_left(begins[server], then)
            busy = before and ends[server][before - 1] > then
            return max((job_rows[server][before - 1] if busy else first) - 1, copy.room)

        for shard, owner in sources[copy.rank, copy.stage]:  # each shard has a tree of its own
            alive = servers.setdefault((copy.stage, shard, owner), Servers())
            server, after, depth = owner, send_row(owner), 0
            alive.forget(after)
            if alive.direct >= most:
                for number, relay in alive.able.items():
                    row = relays.get(relay.rank)
                    if row is None:
                        row = relays[relay.rank] = send_row(relay.rank)
                    if relay.begin <= row < relay.end:
                        server, after, depth = relay.rank, row, relay.depth + 1
                        relay.served += 1
                        if relay.served == most:
                            del alive.able[number]
                        break
            fetches.append((copy.rank, copy.stage, shard, server, after, depth))
            alive.add(Server(copy.rank, after, copy.end, depth))
    return fetches


def _next_uses(uses: list[int]) -> list[int]:
    """For every i, the next j > i with uses[j] == uses[i], or len(uses)."""
    following: dict[int, int] = {}
    result = [0] * len(uses)
    for i in range(len(uses) - 1, -1, -1):
        result[i] = following.get(uses[i], len(uses))
        following[uses[i]] = i
    return result
