"""ZB-V: two stages a worker, down and up again, split backward, at 1F1B's memory.
Where F = I = W and B >= 2W, no bubble between a worker's first and last job.
w(s, b, d) = (h(s), h(s)), h(s) = min(s, 2W - 1 - s)   [Qi et al. 2023, "Zero bubble", section 6; S = 2W]
n: a list for each worker, strict; at most 3W/2 microbatches: V-Half's building block, squeezed at the same memory
"""

from __future__ import annotations

from schedgen.schemes.building_block import half, squeezed_starts
from schedgen.schemes.looped import chunked, vee
from schedgen.schemes.orders import Job, JobList, place_in_list
from schedgen.schemes.scheme import Function, Scheme, Sizes

PARAMETERS = ("workers",)


def scheme(sizes: Sizes, name: str) -> Scheme:
    """ZB-V for S = 2 W."""
    W, _ = chunked(name, sizes, chunks=2)
    S, batches = sizes.stages, sizes.microbatches
    if 2 * batches <= 3 * W:  # too few for the steady state: squeezed blocks end sooner
        start = squeezed_starts(W, batches, half, memory=2 * W)
        n: Function = lambda s, b, d: start[d, s, b]  # noqa: E731
    else:
        n = place_in_list(sizes, [_list(r, W, batches) for r in range(W)])
    return Scheme(name, W, lambda s, b, d: (vee(s, S), vee(s, S)), n, name, "strict", split=True)


def _list(r: int, p: int, batches: int) -> list[Job]:
    """The jobs of worker r of p: warm-up, a steady state of F0 I0 W0 F1 I1 W1, and W jobs held back to fill the end."""
    total = max(batches, 2 * p - 1)  # the pattern needs at least this many; those beyond B are skipped
    jobs = JobList(r, 2 * p - 1 - r)
    for _ in range(2 * (p - r) - 1):
        jobs.f(0)
    for _ in range(r):
        jobs.f(1)
        jobs.f(0)
    for _ in range(p - r):
        jobs.f(1)
        jobs.i(1)
        jobs.w()
    while jobs.done[0, 1] < total:
        if jobs.done[0, 0] < total:
            jobs.f(0)
        jobs.i(0)
        jobs.w()
        jobs.f(1)
        jobs.i(1)
        jobs.w()
    for _ in range(r):
        jobs.i(0)
        jobs.i(1)
    for _ in range(p - r):
        jobs.i(0)
        jobs.w(0)
    for chunk in (1, 0):
        for _ in range(total):
            jobs.w(chunk)
    return jobs.jobs
