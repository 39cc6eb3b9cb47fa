"""ZB-V: two stages a worker, down and up again, split backward, at 1F1B's memory.
Where F = I = W, no bubble between a worker's first and last job.
w(s, b, d) = (h(s), h(s)), h(s) = min(s, 2W - 1 - s)   [Qi et al. 2023, "Zero bubble", section 6; S = 2W]
n: a list a worker, strict
"""

from __future__ import annotations

from schedgen.schemes.job_lists import Counter, Job, n_of
from schedgen.schemes.looped import chunked, vee
from schedgen.schemes.scheme import Scheme, Sizes

PARAMETERS = ("workers",)


def scheme(sizes: Sizes) -> Scheme:
    W, _ = chunked("zb-v", sizes, chunks=2)
    n = n_of(sizes, (_list(r, W, sizes.microbatches) for r in range(W)))
    S = sizes.stages
    return Scheme("zb-v", W, lambda s, b, d: (vee(s, S), vee(s, S)), n, "zb-v", "strict", split=True)


def _list(r: int, p: int, batches: int) -> list[Job]:
    """Worker r of p: warm-up, a steady state of F0 I0 W0 F1 I1 W1, and W jobs kept back to fill the end."""
    total = max(batches, 2 * p - 1)  # the pattern needs so many to form; what is beyond B is skipped
    one = Counter(r, 2 * p - 1 - r)
    for _ in range(2 * (p - r) - 1):
        one.f(0)
    for _ in range(r):
        one.f(1)
        one.f(0)
    for _ in range(p - r):
        one.f(1)
        one.i(1)
        one.w()
    while one.done[0, 1] < total:
        if one.done[0, 0] < total:
            one.f(0)
        one.i(0)
        one.w()
        one.f(1)
        one.i(1)
        one.w()
    for _ in range(r):
        one.i(0)
        one.i(1)
    for _ in range(p - r):
        one.i(0)
        one.w(0)
    for chunk in (1, 0):
        for _ in range(total):
            one.w(chunk)
    return one.jobs
