"""A building block, repeated and squeezed: the order of schedules in which every worker has two stages, down and up.

A block says in which slots a worker runs the four jobs of a microbatch that others wait for. It is repeated every six
slots, once for each microbatch, and W jobs fill the two slots that are left [Qi et al. 2024, "Pipeline parallelism with
controllable memory", sections 3 and 4]. Where a schedule begins and ends there are more empty slots. So jobs move, in
the order of their slots, to the first free slot in which their input is there, as long as the worker never saves more
forwards than it may: what the paper calls squeezing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from schedgen.ir.instructions import B, F, Numbers, W
from schedgen.schemes.job_lists import Job
from schedgen.util.jit import kernel

# When worker r of p runs F and then I of a microbatch, on its first stage going down and its second going up: the time
# slots of (F first, F second, I second, I first).
Block = Callable[[int, int], tuple[int, int, int, int]]


def half(r: int, p: int) -> tuple[int, int, int, int]:
    """The block of V-Half, with half of 1F1B's activation memory."""
    gap = 3 if p % 2 == 0 else 0
    return 2 * r, 3 * p - r - 2, 3 * p + gap + 2 * r - 1, 6 * p + gap - r - 2


def third(r: int, p: int) -> tuple[int, int, int, int]:
    """The block of V-Min, with a third of it. Its gap is the one of 0, 2 and 4 that keeps slots apart, and memory.

    The authors' code has no gap where p mod 3 = 2. One of 4 has the same memory there and a bubble that is two shorter.
    """
    gap = 2 * ((1 - p) % 3)
    return r, 2 * p - r - 1, 2 * p + gap + r, 4 * p + gap - r - 1


def squeezed_lists(p: int, batches: int, block: Block, memory: int = 0, keep_steady: bool = False) -> list[list[Job]]:
    """The jobs of each of p workers in their order; each saves at most `memory` forwards, or as many as the block.

    `keep_steady`: jobs of the steady state stay where the block has them. Its gaps are room for messages.
    """
    slots = np.array([block(r, p) for r in range(p)])[:, :, None] + 6 * np.arange(batches)
    order = np.argsort(slots.ravel(), kind="stable")
    if keep_steady:  # from where the first microbatch is done until the last comes in
        at = slots.ravel()[order]
        order = order[(at < slots[0, 3, 0]) | (at > slots[0, 0, -1])]
    slots = _squeeze.sized(10 * slots.size)(slots, order, memory)
    return [_with_weight_jobs(r, p, slots[r]) for r in range(p)]


def _with_weight_jobs(r: int, p: int, slots: Numbers) -> list[Job]:
    """Worker r's jobs in the order of their slots (4, batches), and W, the oldest first, in those left free."""
    first, second = r, 2 * p - 1 - r
    kinds = ((F, first), (F, second), (B, second), (B, first))
    at = {int(slot): (*kinds[kind], b) for (kind, b), slot in np.ndenumerate(slots)}
    jobs: list[Job] = []
    waiting: list[Job] = []
    for slot in range(max(at) + 1):
        if slot in at:
            jobs.append(at[slot])
            if at[slot][0] == B:
                waiting.append((W, *at[slot][1:]))
        elif waiting:
            jobs.append(waiting.pop(0))
    return jobs + waiting


@kernel
def _squeeze(slots: Numbers, order: Numbers, memory: int) -> Numbers:
    """New slots of the jobs (worker, kind, microbatch), moved one by one in `order`; W jobs are in the slots left free.

    `saved` and `waiting`: by worker and slot, forwards saved and W jobs that can run, as the slot begins.
    """
    p, batches = slots.shape[0], slots.shape[2]
    last = slots.max() + 1
    free, forward, backward = 0, 1, 2
    row = np.zeros((p, last), np.int64)
    saved, waiting = np.zeros((p, last + 1), np.int64), np.zeros((p, last + 1), np.int64)
    for r in range(p):
        for kind in range(4):
            for b in range(batches):
                row[r, slots[r, kind, b]] = forward if kind < 2 else backward
        for slot in range(last):
            run = waiting[r, slot] if row[r, slot] == free else 0
            saved[r, slot + 1] = saved[r, slot] + (row[r, slot] == forward) - min(run, 1)
            waiting[r, slot + 1] = waiting[r, slot] + (row[r, slot] == backward) - min(run, 1)
            memory = max(memory, saved[r, slot + 1])
    slots = slots.copy()
    for job in order:
        r, kind, b = job // (4 * batches), job // batches % 4, job % batches
        now, down = slots[r, kind, b], kind % 2 == 0
        turns = r == (0 if down else p - 1)  # its input comes from the worker itself
        ready = 0
        if not turns:
            ready = slots[r - 1 if down else r + 1, kind, b] + 1
        elif kind > 0:
            ready = slots[r, kind - 1, b] + 1
        if b > 0:
            ready = max(ready, slots[r, kind, b - 1] + 1)
        what = row[r, now]
        row[r, now] = free
        new = ready
        while new < now:
            if row[r, new] == free:
                row[r, new] = what
                held, jobs = saved[r, new], waiting[r, new]
                slot = new
                while slot <= now and held <= memory:  # behind `now` no more is saved than before
                    run = min(jobs, 1) if row[r, slot] == free else 0
                    held += (row[r, slot] == forward) - run
                    jobs += (row[r, slot] == backward) - run
                    slot += 1
                if held <= memory:
                    break
                row[r, new] = free
            new += 1
        row[r, new] = what
        slots[r, kind, b] = new
        slot = new
        while new < now and slot < last:
            run = min(waiting[r, slot], 1) if row[r, slot] == free else 0
            held = saved[r, slot] + (row[r, slot] == forward) - run
            jobs = waiting[r, slot] + (row[r, slot] == backward) - run
            if slot > now and held == saved[r, slot + 1] and jobs == waiting[r, slot + 1]:
                break
            saved[r, slot + 1], waiting[r, slot + 1] = held, jobs
            slot += 1
    return slots
