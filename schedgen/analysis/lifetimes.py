"""Liveness: where the lives of every buffer on every rank begin and end, and the memory that they take.

In: a projected program and its accesses. Out: `Lifetimes`. Buffers are followed once: peaks in numbers of buffers
or in bytes, the memory timeline and the memory plan are all computed from the lives found here.

The accesses to one buffer on one rank, in the order of the list, must be of the form
    DEFINE READ* END
where ADD may take the place of DEFINE and of READ. An owned weight exists from start to end. A fetched weight and a
gradient may have several lives, and so may what a forward saves: before and after it is on the host. A buffer that an
instruction ends takes memory until the instruction is done.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from schedgen.ir.accesses import Accesses, Slots, numbers_in_all, numbers_per_size, slots
from schedgen.ir.effects import RECEIVERS, Buffer, Effect
from schedgen.ir.instructions import Kind, Op
from schedgen.ir.program import Program
from schedgen.util.arrays import Flags, Ints, Numbers, Small
from schedgen.util.jit import kernel

UNDEFINED, AGAIN, TWICE, OWNED, LEFT, NOTHING = range(1, 7)  # codes of faults
_NEW, _ENDED, _KEPT = -1, -2, -3  # in place of a life: not begun, ended, held by its owner throughout
_RANK, _LIFE, _ARRIVING, _SENT = range(4)  # the columns of `known` in `_follow`


class Fault(NamedTuple):
    """The first wrong access; for a buffer that is never ended, its last access."""

    code: int  # UNDEFINED, AGAIN (after its end), TWICE (defined), OWNED (by the rank), LEFT, NOTHING (no such buffer)
    row: int
    buffer: Buffer
    number: int  # within its kind, as in `Accesses`


class Memory(NamedTuple):
    """The most buffers (or bytes) of each kind that are alive at once, in the order of `Buffer`; one entry a rank."""

    activation: Numbers
    gradient: Numbers
    weight: Numbers  # copies of stages the rank does not own; of its own stages, all versions but one
    weight_gradient: Numbers
    partial: Numbers
    saved: Numbers
    half: Numbers
    host: Numbers  # in the memory of the host
    optimizer: Numbers  # state on the device, where it lives in the memory of the host


class MemoryTimeline(NamedTuple):
    """What every row takes and frees on its rank, in numbers of buffers or in bytes."""

    taken: Numbers  # when the row starts
    freed: Numbers  # when the row ends

    @property
    def during(self) -> Numbers:
        """What a rank holds while it executes each row, provided that everything taken is freed by the rank's end."""
        level: Numbers = np.cumsum(self.taken - self.freed) + self.freed
        return level


@dataclass(frozen=True, eq=False)
class Lifetimes:
    """Every life of every buffer, ordered by first access; one array entry per life unless stated otherwise.

    Weights that their owner holds throughout have no life. If weights have versions, those of an owner have lives: the
    first begins at -1, the newest does not end, and one that a STEP changes in place continues as the next version.
    """

    program: Program
    fault: Fault | None  # later accesses are not followed
    rank: Ints
    buffer: Small  # a Buffer
    number: Ints  # within its kind, as in `Accesses`
    begin: Ints  # the row that defines or receives it; -1: it exists from the start
    end: Ints  # the row that ends it; -1: it stays
    # One entry per first use of a received buffer, in the order of the list: the using row and the receiving row.
    users: Ints
    received: Ints
    # By row that sends, changes or ends a buffer: the last SEND of it in its life and since a change; -1: none.
    send_before: Ints

    @cached_property
    def size_column(self) -> Numbers:
        """By life, the column of the buffer's size in an array of sizes by kind: see `numbers_per_size`."""
        columns: Numbers = self.number // numbers_per_size(self.program.header)[self.buffer]
        return columns

    def stages_of(self, lives: Numbers) -> Numbers:
        """The stage of these lives, all of weights or all of their gradients."""
        header, is_weight = self.program.header, (self.buffer[lives] == Buffer.W).all()
        return (header.weight_shards if is_weight else header.gradient_units).stage_of[self.size_column[lives]]

    @cached_property
    def is_received(self) -> Flags:
        """By life, whether it begins with a message that has a planned place; what forwards save has none."""
        begins = np.isin(self.program.rows.op[self.begin], RECEIVERS)
        return begins & (self.begin >= 0) & ~np.isin(self.buffer, Buffer.SAVED)

    def amounts(self, sizes: Numbers) -> Numbers:
        """Bytes of every life. `sizes`: by kind of buffer and size column, as from `BufferSizes.by_kind`."""
        bytes: Numbers = sizes[self.buffer, self.size_column]
        if len(sizes) > len(Buffer):
            away = (self.buffer == Buffer.HALF) & np.isin(self.number, self._halves_that_leave())
            bytes[away] = sizes[len(Buffer), self.size_column[away]]
        return bytes

    def _halves_that_leave(self) -> Numbers:
        """The numbers of saved forwards that leave their rank between BWD_I and BWD_W."""
        leave, table = self.program.rows_of(Op.OFFLOAD, Op.SEND), self.program.rows
        leave = leave[table.kind[leave] == Kind.SAVED]
        first_half = self.program.job_rows(Op.BWD_I)[table.stage[leave], table.mb[leave]]
        halves = leave[(first_half >= 0) & (first_half < leave) & (table.rank[first_half] == table.rank[leave])]
        job: Numbers = table.stage[halves].astype(np.int64) * self.program.header.microbatches + table.mb[halves]
        return job

    def timeline(self, amounts: Numbers) -> MemoryTimeline:
        """The memory timeline of every rank, where each life counts as its entry of `amounts`."""
        taken, freed = np.zeros((2, len(self.program) + 1), np.int64)
        np.add.at(taken, self.begin, amounts)  # -1 is the extra entry after all rows
        np.add.at(freed, self.end, amounts)
        return MemoryTimeline(taken[:-1], freed[:-1])

    def saved(self) -> MemoryTimeline:
        """The memory timeline of saved forwards alone, in numbers of them."""
        return self.timeline((self.buffer == Buffer.SAVED).astype(np.int64))

    def peaks(self, sizes: Numbers | None = None) -> Memory:
        """The most of each kind at once: in bytes, with `sizes` as for `amounts`; without, in numbers of buffers."""
        amounts = np.ones(len(self.buffer), np.int64) if sizes is None else self.amounts(sizes)
        peak = np.zeros((self.program.header.workers, len(Buffer)), np.int64)
        _peaks.sized(2 * len(self.program))(
            self.program.rows.rank, self.buffer, amounts, self.begin, self.end, np.zeros(len(Buffer), np.int64),
            np.full(len(self.program), -1, np.int32), np.empty(len(amounts), np.int32), peak,
        )  # fmt: skip
        return Memory(*peak.T)


def follow_buffers(program: Program, accesses: Accesses) -> Lifetimes:
    """Follow every buffer of every rank, up to the first fault; `accesses` are the program's."""
    header, number = program.header, accesses.number
    owner, versions = header.is_owner, header.weight_versions.count
    numbers = numbers_in_all(header)
    for rare in (Buffer.HALF, Buffer.HOST, Buffer.OPT):
        numbers[rare] *= (accesses.buffer == rare).any()
    # Only few of the possible partials exist: they are renumbered.
    partial = np.flatnonzero(accesses.buffer == Buffer.PARTIAL)
    partials, numbered = np.unique(number[partial], return_inverse=True)
    numbers[Buffer.PARTIAL] = len(partials)
    if len(partials):
        number = number.copy()
        number[partial] = np.where(partials < 0, -1, np.arange(len(partials)))[numbered]
    begins = [np.count_nonzero(accesses.effect == effect) for effect in (Effect.RECEIVE, Effect.DEFINE, Effect.ADD)]
    most = sum(begins) + int(owner.sum()) * (versions > 1)
    rank, named, begin, end = np.empty((4, most), np.int32)
    buffer, (users, received) = np.empty(most, np.int8), np.empty((2, begins[0]), np.int32)
    send_before = np.full(len(program), -1, np.int32)
    places = slots(numbers)
    code, access, lives, uses = _follow.sized(4 * len(program))(
        program.rows.rank, *accesses[:3], number, places, np.zeros((places.total, 4), np.int32),
        np.zeros(len(Buffer), np.int64), owner, versions, rank, buffer, named, begin, end, users, received, send_before,
    )  # fmt: skip
    of_partial = np.flatnonzero(buffer[:lives] == Buffer.PARTIAL)
    named[of_partial] = partials[named[of_partial]]
    rank, named, begin, end = (column[:lives].copy() for column in (rank, named, begin, end))
    buffer, users, received = buffer[:lives].copy(), users[:uses].copy(), received[:uses].copy()
    lifetimes = Lifetimes(program, None, rank, buffer, named, begin, end, users, received, send_before)
    if code == LEFT:
        return replace(lifetimes, fault=_left(lifetimes, accesses, int(program.rows.rank[accesses.row[access]])))
    if code:
        row, buffer_, number_ = (column[access] for column in (accesses.row, accesses.buffer, accesses.number))
        return replace(lifetimes, fault=Fault(code, int(row), Buffer(buffer_), int(number_)))
    return lifetimes


def _left(lifetimes: Lifetimes, accesses: Accesses, rank: int) -> Fault:
    """Of the buffers that are never ended on a rank, the one whose last access comes first."""
    header = lifetimes.program.header
    open_ = np.flatnonzero((lifetimes.rank == rank) & (lifetimes.end < 0))
    left = set(zip(lifetimes.buffer[open_].tolist(), lifetimes.number[open_].tolist(), strict=True))
    if not header.has_flush:  # the newest of its own weights stays
        for unit in np.flatnonzero(header.is_owner[rank]).tolist():
            versions = [n for kind, n in left if kind == Buffer.W and n // header.weight_versions.count == unit]
            left -= {(int(Buffer.W), max(versions, default=-1))}
    last: dict[tuple[int, int], int] = {}
    begin, end = accesses.begin(lifetimes.program.bounds[rank : rank + 2])
    for a in range(begin, end):
        name = int(accesses.buffer[a]), int(accesses.number[a])
        if name in left:
            last[name] = int(accesses.row[a])
    row, (kind, number) = min((row, name) for name, row in last.items())
    return Fault(LEFT, row, Buffer(kind), number)


@kernel
def _follow(
    rank: Ints, of_row: Ints, effect: Small, kind: Small, number: Ints, places: Slots, known: Ints,
    alive: Numbers, owner: Flags, versions: int, of_rank: Ints, buffer: Small, named: Ints, begin: Ints,
    end: Ints, users: Ints, received: Ints, send_before: Ints,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Fill the columns of `Lifetimes`; return (fault, its access, number of lives, number of uses), fault 0: none.

    `known`, zeros, by slot: the rank + 1 that the other columns are about; the life; the row that receives it, until
    its first use; its last SEND. `alive`: zeros, by kind.
    """
    lives, uses = 0, 0
    for a in range(len(of_row)):
        row, does, thing = of_row[a], effect[a], kind[a]
        r = rank[row]
        if number[a] < 0:
            return NOTHING, a, lives, uses
        slot = places.begin[thing] + places.step[thing] * number[a]
        own = thing == Buffer.W and owner[r, number[a] // versions] and number[a] % versions == 0
        since = -2  # where a life begins, if one does
        if known[slot, _RANK] != r + 1:
            known[slot, _RANK], known[slot, _LIFE] = r + 1, _KEPT if own else _NEW
            known[slot, _ARRIVING], known[slot, _SENT] = -1, -1
            if own and versions > 1:
                since = -1
        life, arriving, fault = known[slot, _LIFE], known[slot, _ARRIVING], 0
        is_alive = life >= 0 or life == _KEPT
        replaces = does == Effect.CHANGE and thing == Buffer.W and versions > 1  # overwrites version v - 1
        begins = does == Effect.DEFINE or does == Effect.RECEIVE or replaces
        # May have several lives, in turn.
        several = thing == Buffer.W or thing == Buffer.DW or thing == Buffer.SAVED or thing == Buffer.HOST
        if own and versions == 1 and (begins or does == Effect.END):
            fault = OWNED
        elif is_alive and begins:
            fault = TWICE
        elif life == _ENDED and not (several and (begins or does == Effect.ADD)):
            fault = AGAIN
        elif life == _NEW and not (begins or does == Effect.ADD):
            fault = UNDEFINED
        if fault:
            return fault, a, lives, uses
        if not is_alive and replaces:
            life = known[slot - 1, _LIFE]
            known[slot, _LIFE], known[slot - 1, _LIFE] = life, _ENDED
            named[life] = number[a]
        elif not is_alive:
            since = row
            known[slot, _ARRIVING] = row if does == Effect.RECEIVE else -1
        elif arriving >= 0:
            users[uses], received[uses] = row, arriving
            uses += 1
            known[slot, _ARRIVING] = -1
        if since > -2:
            life = known[slot, _LIFE] = lives
            of_rank[lives], buffer[lives], named[lives] = r, thing, number[a]
            begin[lives], end[lives] = since, -1
            lives += 1
            alive[thing] += since >= 0
        if does == Effect.SEND or does == Effect.CHANGE or does == Effect.END:
            send_before[row] = known[slot, _SENT]
            known[slot, _SENT] = row if does == Effect.SEND else -1
        if does == Effect.END:
            known[slot, _LIFE], end[life] = _ENDED, row
            alive[thing] -= 1
        if a + 1 == len(of_row) or rank[of_row[a + 1]] != r:
            for each in range(len(alive)):
                if alive[each] > 0:
                    return LEFT, a, lives, uses
                alive[each] = 0
    return 0, 0, lives, uses


@kernel
def _peaks(
    rank: Ints, buffer: Small, amount: Numbers, begin: Ints, end: Ints, alive: Numbers, ends: Ints, following: Ints,
    peak: Numbers,
) -> None:  # fmt: skip
    """Fill `peak`, (workers, kinds): the most of each kind that is alive on a rank at once.

    `alive`: zeros, by kind. `ends`: by row, the last of the lives that end there, at first -1; `following`: by life,
    the next one that ends in the same row.
    """
    for life in range(len(begin)):
        if end[life] >= 0:
            following[life] = ends[end[life]]
            ends[end[life]] = life
    life = 0
    for row in range(len(rank)):
        while life < len(begin) and begin[life] <= row:
            if begin[life] >= 0:
                thing = buffer[life]
                alive[thing] += amount[life]
                peak[rank[row], thing] = max(peak[rank[row], thing], alive[thing])
            life += 1
        ending = ends[row]
        while ending >= 0:
            alive[buffer[ending]] -= amount[ending]
            ending = following[ending]
