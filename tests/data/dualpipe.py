"""DualPipe: rank r has stages r and p - 1 - r, and half of the microbatches enters at each end.

The list of a rank is that of the authors' dualpipe.py [DeepSeek-AI 2025, DualPipe].
"""

import functools

import numpy as np

from schedgen import F, I, W

mode = "strict"
split = True


def w(s, b, d, *, stages, microbatches):
    """Ranks of the first half of the microbatches are numbered as the stages, those of the second the other way."""
    rank = np.where(b < microbatches // 2, s, stages - 1 - s)
    return rank, rank


def n(s, b, d, *, stages, microbatches):
    """The place of a job in its rank's list."""
    return lists(stages, microbatches)[0][d, s, b]


def unsplit_backward(s, b, *, stages, microbatches):
    """The backwards whose weights' half is not put off."""
    return lists(stages, microbatches)[1][s, b]


def delayed_send(s, b, *, stages, microbatches):
    """The forwards that overlap with a backward: what both give leaves together."""
    return lists(stages, microbatches)[2][s, b]


@functools.cache
def lists(p, m):
    """Of all ranks: n of each job, (3, p, m); and, (p, m), which backwards are whole, and which forwards are paired."""
    place, whole, paired = np.zeros((3, p, m), int), np.zeros((p, m), bool), np.zeros((p, m), bool)
    for r in range(p):
        _fill(r, p, m, place, whole, paired)
    return place, whole, paired


def _fill(r, p, m, place, whole, paired):
    near, clock, done, put_off = min(r, p - 1 - r), iter(range(6 * m)), {}, []

    def next_of(d, phase):
        """The next job of direction d: phase 0 is the half of the microbatches whose end is nearer."""
        k = done[d, phase] = done.get((d, phase), -1) + 1
        end = phase if r < p // 2 else 1 - phase
        return (r, k) if end == 0 else (p - 1 - r, m // 2 + k)

    def f(phase, pair=False):
        job = next_of(F, phase)
        place[(F, *job)], paired[job] = next(clock), pair

    def b(phase, late=False):
        job = next_of(I, phase)
        place[(I, *job)], whole[job] = next(clock), not late
        put_off.append(job)
        if not late:
            weights(-1)

    def weights(which=0):
        place[(W, *put_off.pop(which))] = next(clock)

    above = p // 2 - 1 - near
    for _ in range(2 * above):
        f(0)
    for _ in range(near + 1):
        f(0)
        f(1)
    for _ in range(above):
        b(1, late=True)
        weights()
        f(1)
    for k in range(m // 2 - p + near + 1):
        f(0, pair=k > 0 or above > 0)
        b(1)
        f(1, pair=True)
        b(0)
    for _ in range(above):
        b(1)
        f(1, pair=True)
        b(0)
    late = False
    for k in range(near + 1):
        late |= k == (near + 1) // 2 and near % 2 == 1
        b(1, late)
        late |= k == (near + 1) // 2 and near % 2 == 0
        b(0, late)
    for _ in range(above):
        weights()
        b(0, late)
    while put_off:
        weights()
