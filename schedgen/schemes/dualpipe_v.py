"""DualPipeV: DualPipe cut in half: two stages a worker, down and up again; forwards and backwards in pairs.
w(s, b, d) = (h(s), h(s)), h(s) = min(s, 2W - 1 - s)   [DeepSeek-AI 2025, DualPipe, section "DualPipeV"; S = 2W]
n: a list a worker in eight steps; in a pair F runs before B and their messages leave together, strict; B >= 2W
"""

from __future__ import annotations

import numpy as np

from schedgen.ir.instructions import F
from schedgen.schemes.job_lists import Counter, n_of
from schedgen.schemes.looped import chunked, vee
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.util.errors import UsageError

PARAMETERS = ("workers",)


def scheme(sizes: Sizes) -> Scheme:
    W, _ = chunked("dualpipe-v", sizes, chunks=2)
    if sizes.microbatches < 2 * W:
        raise UsageError(f"dualpipe-v needs at least 2W microbatches: {sizes.microbatches} are too few for {W} workers")
    S = sizes.stages
    lists = [_list(r, W, sizes.microbatches) for r in range(W)]
    whole, paired = np.zeros((2, S, sizes.microbatches), bool)
    for one in lists:
        whole[tuple(np.array(one.whole, np.int64).reshape(-1, 2).T)] = True
        paired[tuple(np.array(one.paired, np.int64).reshape(-1, 2).T)] = True
    return Scheme(
        "dualpipe-v",
        W,
        lambda s, b, d: (vee(s, S), vee(s, S)),
        n_of(sizes, (one.jobs for one in lists)),
        "dualpipe-v",
        "strict",
        split=True,
        unsplit_backward=lambda s, b: whole[s, b],
        delayed_send=lambda s, b: paired[s, b],
    )


def _list(r: int, p: int, batches: int) -> Counter:
    one = Counter(r, 2 * p - 1 - r)
    above = p - 1 - r  # workers between this one and the turn

    def pair(forward: int, backward: int) -> None:
        """A forward and a backward that DualPipe overlaps: their messages leave together."""
        one.paired.append((one.stages[forward], one.done[F, forward]))
        one.f(forward)
        one.b(backward)

    # Step 1: nF0
    for _ in range(2 * above):
        one.f(0)
    # Step 2: nF0F1
    for _ in range(r + 1):
        one.f(0)
        one.f(1)
    # Step 3: nI1W1F1
    for _ in range(above):
        one.i(1)
        one.w()
        one.f(1)
    # Step 4, the main step: nF0B1F1B0
    for k in range(batches - 2 * p + r + 1):
        if k == 0 and above == 0:  # at the turn the first two are no pair
            one.f(0)
            one.b(1)
        else:
            pair(0, 1)
        pair(1, 0)
    # Step 5: nB1F1B0
    for _ in range(above):
        one.b(1)
        pair(1, 0)
    # Step 6: nB1B0, split from the middle on
    late = False
    for k in range(r + 1):
        late |= k == (r + 1) // 2 and r % 2 == 1
        (one.i if late else one.b)(1)
        late |= k == (r + 1) // 2 and r % 2 == 0
        (one.i if late else one.b)(0)
    # Step 7: nW0B0
    for _ in range(above):
        one.w()
        (one.i if late else one.b)(0)
    # Step 8: nW0
    while one.waiting:
        one.w()
    return one
