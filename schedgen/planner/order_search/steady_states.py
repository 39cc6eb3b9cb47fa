"""Starting orders from the steady states of a V, repeated for every microbatch: all that a few parameters give.

Every worker has two stages, down and up again. F of the first stage and I of the second go down from worker to worker,
the others up, one slot for each worker. Going down takes 1 to 5 slots for each worker, one number for the first workers
and another, no greater, for the rest. There may be a gap where a microbatch turns. These are the building blocks of Qi
et al. 2024, "Pipeline parallelism with controllable memory", appendix A. Each is repeated every six slots and squeezed
until it fills the limit (`schemes.building_block`): as it is, with a warm-up that first fills the memory with forwards,
and with a cool-down that leaves W jobs for last. These variants are from the authors' code,
sail-sg/zero-bubble-pipeline-parallelism, v_auto_schedule.py.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from schedgen.compiler.place import PlacedScheme
from schedgen.ir.instructions import B, F, W
from schedgen.ir.stage_graph import chain
from schedgen.planner.order_search.problem import OrderProblem, fits, most_held, order_of
from schedgen.planner.order_search.run_order import new_run, run_and_judge, run_order
from schedgen.schemes.building_block import PERIOD, by_job, by_worker, repeated, squeeze
from schedgen.schemes.looped import vee
from schedgen.util.arrays import Numbers

KEPT = 3  # best orders
BLOCK_JOBS = 40  # squeezing a steady state takes this many times as long as computing its start times
Job = tuple[int, int, int]  # direction, stage, microbatch


def steady_orders(problem: OrderProblem, placed: PlacedScheme, limit: int, work: int) -> list[Numbers]:
    """The best orders with up to `limit` saved forwards a worker, of all blocks that can be tried with `work` job start
    times: none unless backwards are split, and the stages are a V in which each reads the one before."""
    directions, stages, batches = placed.compute.shape
    is_chain = {*chain(stages)} <= {*placed.graph.edges}
    is_vee = stages == 2 * placed.workers and (placed.compute == vee(np.arange(stages), stages)[:, None]).all()
    tries = work // (BLOCK_JOBS * len(problem.worker))
    if directions < 3 or not (is_chain and is_vee and tries):
        return []
    blocks, run = steady_states(placed.workers), new_run(problem)
    best: dict[float, Numbers] = {}  # by value
    for k in np.linspace(0, len(blocks) - 1, min(len(blocks), tries)).astype(np.int64):
        for order in _orders(problem, repeated(blocks[k], batches), limit):
            value = run_and_judge(problem, order, run)
            if np.isfinite(value) and fits(problem, order):
                best.setdefault(value, order)
    return [best[value] for value in sorted(best)[:KEPT]]


def steady_states(p: int) -> list[Numbers]:
    """The slots (p, 4) of every block: for each worker, those of F first, F second, I second, I first."""
    up = np.arange(p)[::-1]
    gaps = np.array(list(product(range(1, PERIOD + 1), repeat=3)))
    blocks: dict[bytes, Numbers] = {}
    for far, near in product(range(1, PERIOD), repeat=2):
        for first_workers in range(1, p) if near <= far else ():
            down = np.cumsum([0, *[far] * first_workers, *[near] * (p - 1 - first_workers)])
            second = down[-1] + gaps[:, :1] + up
            back = second[:, :1] + gaps[:, 1:2] + down
            all_down = np.broadcast_to(down, back.shape)
            slots = np.stack([all_down, second, back, back[:, -1:] + gaps[:, 2:] + up], axis=2)
            is_apart = (np.diff(np.sort(slots % PERIOD, axis=2), axis=2) > 0).all(axis=(1, 2))
            for block in slots[is_apart]:
                blocks.setdefault(block.tobytes(), block)
    return list(blocks.values())


def _orders(problem: OrderProblem, slots: Numbers, limit: int) -> list[Numbers]:
    """The orders of a repeated block, if it fits: with its own warm-up and cool-down, and with others."""
    if most_held(problem, order_of(problem, by_job(slots).ravel())).max() > limit:
        return []
    in_slots = problem._replace(length=np.ones_like(problem.length), hop=0 * problem.hop, own_window=False)
    run = new_run(problem)

    def with_order(numbers: list[Numbers]) -> list[Numbers]:
        """Slots of jobs that run in the order of these numbers, squeezed; orders that cannot run are left out."""
        found = []
        for start in numbers:
            order = order_of(problem, start.ravel())
            if np.isfinite(run_order.sized(len(order))(in_slots, order, np.inf, run)):
                found.append(squeeze(by_worker(run.start.astype(np.int64).reshape(start.shape)), limit))
        return found

    begun = [squeeze(slots, limit), *with_order([_with_filled_warm_up(by_job(slots), limit)])]
    ended = with_order([_with_dense_cool_down(each, limit) for each in begun])
    return [order_of(problem, by_job(each).ravel()) for each in (*begun, *ended)]


def _with_filled_warm_up(start: Numbers, memory: int) -> Numbers:
    """Numbers of every job (3, S, B) that grow along each worker, with another order of the jobs before the first I of
    a worker's first stage: first as many F as the memory holds, those of the second stage last, since their I soon
    follow; then I, W and F in turn."""
    start = start.copy()
    stages = start.shape[1]
    p = stages // 2
    for r in range(p):
        second = stages - 1 - r
        until = start[B, r, 0]  # here the warm-up ends
        down, up = _jobs_before(until, start, F, [r]), _jobs_before(until, start, F, [second])
        back, weights = _jobs_before(until, start, B, [second]), _jobs_before(until, start, W, [r, second])
        # Of the F that fill the memory, those of the second stage come last, in turn with F of the first one. Before
        # them F of the first stage are alone: a microbatch is with the workers behind for 2 (p - 1 - r) slots.
        turning = min(r + 1, memory // 2)
        filling = memory - turning
        alone = min(2 * (p - 1 - r), filling)
        jobs = down[:alone] + _in_turn(down[alone:filling], up[:turning])
        jobs += _in_turn(back, weights, up[turning:] + down[filling:])
        places = sorted(int(start[job]) for job in jobs)
        for place, job in zip(places, jobs, strict=True):
            start[job] = place
    return start


def _jobs_before(until: int, start: Numbers, direction: int, stages: list[int]) -> list[Job]:
    """The jobs of a direction and of these stages that start before a slot, by start."""
    jobs = [(direction, s, b) for s in stages for b in range(start.shape[2]) if start[direction, s, b] < until]
    return sorted(jobs, key=lambda job: int(start[job]))


def _in_turn(*groups: list[Job]) -> list[Job]:
    """The first job of each group, then the second of each, and so on."""
    longest = max(map(len, groups))
    return [group[k] for k in range(longest) for group in groups if k < len(group)]


def _with_dense_cool_down(slots: Numbers, memory: int) -> Numbers:
    """Numbers of every job (3, S, B) that grow along each worker, in which the last I jobs, as many as the memory
    holds, run in every second slot after the first worker's last F; W jobs among them move to the end."""
    p, _, batches = slots.shape
    numbers, last = 2 * by_job(slots), 2 * int(slots[0, 1, -1])
    up = min((memory + 1) // 2, batches)
    for r in range(p):  # slots are doubled: a worker's I go up in the even ones and down in the odd ones
        second = 2 * p - 1 - r
        numbers[B, r, batches - up :] = last + 2 * (2 * p - r) - 4 * np.arange(up)[::-1]
        down = min(r + 1, memory - up, batches)
        numbers[B, second, batches - down :] = last + 2 * (r + 1) + 1 - 4 * np.arange(down)[::-1]
        weights = numbers[W, [r, second]].ravel()
        weights[np.argsort(weights)[-memory:]] += 10 * batches * p * PERIOD  # after all others
        numbers[W, [r, second]] = weights.reshape(2, batches)
    return numbers
