"""A building block, repeated and squeezed: the order of schedules in which every worker has two stages, down and up.

A block gives the slots in which a worker runs F and I of a microbatch, the jobs that others wait for, on its two
stages. It is repeated every six slots, once for each microbatch, and W jobs fill the two slots that are left [Qi et al.
2024, "Pipeline parallelism with controllable memory", sections 3 and 4]. At the beginning and end of a schedule more
slots are empty. So jobs move, in the order of their slots, to the first free slot in which their input is available, as
long as the worker never exceeds its limit of saved forwards: the paper calls this squeezing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from schedgen.ir.instructions import B, F, W
from schedgen.util.arrays import Numbers
from schedgen.util.jit import kernel

PERIOD = 6  # slots from one microbatch to the next
FREE, FORWARD, BACKWARD = 0, 1, 2  # what a slot runs; BACKWARD: an I

# The time slots in which worker r of p runs a microbatch on its first stage, going down, and its second, going up:
# those of (F first, F second, I second, I first).
Block = Callable[[int, int], tuple[int, int, int, int]]


def half(r: int, p: int) -> tuple[int, int, int, int]:
    """The block of V-Half, with half of 1F1B's activation memory."""
    gap = 3 if p % 2 == 0 else 0
    return 2 * r, 3 * p - r - 2, 3 * p + gap + 2 * r - 1, 6 * p + gap - r - 2


def third(r: int, p: int) -> tuple[int, int, int, int]:
    """The block of V-Min, with a third of 1F1B's activation memory.

    The gap is the one of 0, 2 and 4 that keeps slots apart and the memory at a third. The authors' code has no gap
    where p mod 3 = 2. A gap of 4 has the same memory there, and a bubble shorter by two.
    """
    gap = 2 * ((1 - p) % 3)
    return r, 2 * p - r - 1, 2 * p + gap + r, 4 * p + gap - r - 1


def squeezed_starts(p: int, batches: int, block: Block, memory: int = 0, keep_steady: bool = False) -> Numbers:
    """The slots of all jobs (3, S, B) of p workers; each saves at most `memory` forwards, or as many as the block does.

    `keep_steady`: jobs of the steady state keep their slots in the block, whose gaps leave time for messages.
    """
    slots = repeated(np.array([block(r, p) for r in range(p)]), batches)
    fixed = (0, 0)
    if keep_steady:  # from the end of the first microbatch to the beginning of the last
        fixed = int(slots[0, 3, 0]), int(slots[0, 0, -1]) + 1
    return by_job(squeeze(slots, memory, fixed))


def repeated(block: Numbers, batches: int) -> Numbers:
    """The slots (p, 4, B) of jobs, by worker and kind, from those (p, 4) of a block."""
    return block[:, :, None] + PERIOD * np.arange(batches)


def squeeze(slots: Numbers, memory: int, fixed: tuple[int, int] = (0, 0)) -> Numbers:
    """Move jobs into earlier free slots and return the new slots; jobs in slots fixed[0] to fixed[1] - 1 stay."""
    order = np.argsort(slots.ravel(), kind="stable")
    at = slots.ravel()[order]
    order = order[(at < fixed[0]) | (at >= fixed[1])]
    return _squeeze.sized(10 * slots.size)(slots, order, memory)


def by_job(slots: Numbers) -> Numbers:
    """The slots (3, S, B) of all jobs: W jobs, oldest first, go into the slots left free."""
    p, _, batches = slots.shape
    first, second = np.arange(p), 2 * p - 1 - np.arange(p)
    start = np.empty((3, 2 * p, batches), np.int64)
    start[F, first], start[F, second] = slots[:, 0], slots[:, 1]
    start[B, second], start[B, first] = slots[:, 2], slots[:, 3]
    last = int(slots.max()) + 2 * batches + 1
    weight = np.empty((p, 2, batches), np.int64)
    _fill.sized(p * last)(slots, np.full(last, -1), np.empty(2 * batches, np.int64), weight)
    start[W, second], start[W, first] = weight[:, 0], weight[:, 1]
    return start


def by_worker(start: Numbers) -> Numbers:
    """The slots (p, 4, B) of jobs, by worker and kind, from slots (3, S, B)."""
    p = start.shape[1] // 2
    first, second = np.arange(p), 2 * p - 1 - np.arange(p)
    return np.stack([start[F, first], start[F, second], start[B, second], start[B, first]], axis=1)


@kernel
def _fill(slots: Numbers, row: Numbers, queue: Numbers, weight: Numbers) -> None:
    """Write the slots of W jobs (p, 2, B), the second stage first, into `weight`; row and queue are scratch space."""
    p, batches = slots.shape[0], slots.shape[2]
    for r in range(p):
        for slot in range(len(row)):
            row[slot] = -1
        for kind in range(4):
            for b in range(batches):
                row[slots[r, kind, b]] = kind * batches + b
        begun, waiting = 0, 0
        for slot in range(len(row)):
            job = row[slot]
            if job >= 2 * batches:
                queue[waiting] = job - 2 * batches
                waiting += 1
            elif job < 0 and begun < waiting:
                weight[r, queue[begun] // batches, queue[begun] % batches] = slot
                begun += 1


@kernel
def _after(what: int, saved: int, waiting: int) -> tuple[int, int]:
    """Forwards saved and W jobs waiting after a slot that runs `what`; in a free slot a W runs, if one waits."""
    if what == FORWARD:
        return saved + 1, waiting
    if what == BACKWARD:
        return saved, waiting + 1
    ended = min(waiting, 1)
    return saved - ended, waiting - ended


@kernel
def _squeeze(slots: Numbers, order: Numbers, memory: int) -> Numbers:
    """New slots of the jobs (worker, kind, microbatch), moved one by one in `order`; W jobs go into free slots.

    What holds before and after every move:

    1. `slots` has the slot of every F and I, and row[r, t] what slot t of worker r runs: FREE, FORWARD or BACKWARD.
    2. Every job's slot comes after those of its inputs: the same kind on the worker before, the turn's job before it on
       the same worker, and the same kind of the microbatch before.
    3. saved[r, t] and waiting[r, t] are what one gets by running row r from its first slot: forwards saved, and W jobs
       that could run, when slot t begins. A free slot runs a W if one waits. So nothing says which W runs where.
    4. saved[r, t] <= memory everywhere.

    A move takes a job out of its slot `now` and puts it into the first free slot from `ready` on, the earliest that 2
    allows, for which 4 holds. Only the slots up to `now` have to be run again to know: by then the same F and I have
    run as before the move, and no fewer W, as the free slot has become a later one, where no fewer W wait. So
    from there on no more is saved than before. If there is no such slot, the job stays where it is.
    """
    p, batches = slots.shape[0], slots.shape[2]
    last = slots.max() + 1
    row = np.full((p, last), FREE)
    saved, waiting = np.zeros((p, last + 1), np.int64), np.zeros((p, last + 1), np.int64)
    for r in range(p):
        for kind in range(4):
            for b in range(batches):
                row[r, slots[r, kind, b]] = FORWARD if kind < 2 else BACKWARD
        for slot in range(last):
            saved[r, slot + 1], waiting[r, slot + 1] = _after(row[r, slot], saved[r, slot], waiting[r, slot])
            memory = max(memory, saved[r, slot + 1])
    slots = slots.copy()
    for job in order:
        r, kind, b = job // (4 * batches), job // batches % 4, job % batches
        now, down = slots[r, kind, b], kind % 2 == 0
        ready = 0
        if r != (0 if down else p - 1):  # its input comes from the worker before
            ready = slots[r - 1 if down else r + 1, kind, b] + 1
        elif kind > 0:  # at a turn it comes from the worker itself
            ready = slots[r, kind - 1, b] + 1
        if b > 0:
            ready = max(ready, slots[r, kind, b - 1] + 1)
        what = row[r, now]
        row[r, now] = FREE
        new = ready
        while new < now:
            if row[r, new] == FREE:
                row[r, new] = what
                held, jobs = saved[r, new], waiting[r, new]
                slot = new
                while slot <= now and held <= memory:
                    held, jobs = _after(row[r, slot], held, jobs)
                    slot += 1
                if held <= memory:
                    break
                row[r, new] = FREE
            new += 1
        row[r, new] = what
        slots[r, kind, b] = new
        slot = new
        while new < now and slot < last:  # make 3 true again, up to where nothing differs any more
            held, jobs = _after(row[r, slot], saved[r, slot], waiting[r, slot])
            if slot > now and held == saved[r, slot + 1] and jobs == waiting[r, slot + 1]:
                break
            saved[r, slot + 1], waiting[r, slot + 1] = held, jobs
            slot += 1
    return slots
