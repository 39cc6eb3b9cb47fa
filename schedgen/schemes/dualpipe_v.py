"""DualPipeV: DualPipe cut in half: two stages a worker, down and up again; forwards and backwards in pairs.
w(s, b, d) = (h(s), h(s)), h(s) = min(s, 2W - 1 - s)   [DeepSeek-AI 2025, DualPipe, section "DualPipeV"; S = 2W]
n: a list a worker in eight steps; in a pair F runs before B and their messages leave together, strict; B >= 2W
"""

from __future__ import annotations

import numpy as np

from schedgen.ir.instructions import F
from schedgen.schemes.looped import chunked, vee
from schedgen.schemes.orders import JobList, place_in_list
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.util.errors import UsageError

PARAMETERS = ("workers",)


def scheme(sizes: Sizes, name: str) -> Scheme:
    """DualPipeV for S = 2 W and B >= 2 W."""
    W, _ = chunked(name, sizes, chunks=2)
    if sizes.microbatches < 2 * W:
        raise UsageError(f"{name} needs at least 2W microbatches: {sizes.microbatches} are too few for {W} workers")
    S = sizes.stages
    lists = [_list(r, W, sizes.microbatches) for r in range(W)]
    unsplit, delayed = np.zeros((2, S, sizes.microbatches), bool)
    for worker in lists:
        unsplit[tuple(np.array(worker.unsplit, np.int64).reshape(-1, 2).T)] = True
        delayed[tuple(np.array(worker.delayed, np.int64).reshape(-1, 2).T)] = True
    return Scheme(
        name,
        W,
        lambda s, b, d: (vee(s, S), vee(s, S)),
        place_in_list(sizes, (worker.jobs for worker in lists)),
        name,
        "strict",
        split=True,
        unsplit_backward=lambda s, b: unsplit[s, b],
        delayed_send=lambda s, b: delayed[s, b],
    )


def _list(r: int, p: int, batches: int) -> JobList:
    jobs = JobList(r, 2 * p - 1 - r)
    above = p - 1 - r  # workers between this one and the turn

    def pair(forward: int, backward: int) -> None:
        """A forward and a backward that DualPipe overlaps: their messages leave together."""
        jobs.delayed.append((jobs.stages[forward], jobs.done[F, forward]))
        jobs.f(forward)
        jobs.b(backward)

    # Step 1: nF0
    for _ in range(2 * above):
        jobs.f(0)
    # Step 2: nF0F1
    for _ in range(r + 1):
        jobs.f(0)
        jobs.f(1)
    # Step 3: nI1W1F1
    for _ in range(above):
        jobs.i(1)
        jobs.w()
        jobs.f(1)
    # Step 4, the main step: nF0B1F1B0
    for k in range(batches - 2 * p + r + 1):
        if k == 0 and above == 0:  # at the turn the first two are not a pair
            jobs.f(0)
            jobs.b(1)
        else:
            pair(0, 1)
        pair(1, 0)
    # Step 5: nB1F1B0
    for _ in range(above):
        jobs.b(1)
        pair(1, 0)
    # Step 6: nB1B0, split from the middle on
    late = False
    for k in range(r + 1):
        late |= k == (r + 1) // 2 and r % 2 == 1
        (jobs.i if late else jobs.b)(1)
        late |= k == (r + 1) // 2 and r % 2 == 0
        (jobs.i if late else jobs.b)(0)
    # Step 7: nW0B0
    for _ in range(above):
        jobs.w()
        (jobs.i if late else jobs.b)(0)
    # Step 8: nW0
    while jobs.waiting:
        jobs.w()
    return jobs
