"""Divides a sequence into runs of equal length, or so that the costliest run costs as little as possible."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NEVER = float("inf")  # the price of a place where no run may begin


def even_starts(count: int, runs: int) -> list[int]:
    """Where each of `runs` runs of `count` items begins; the first ones are longer if needed."""
    shorter, longer = divmod(count, runs)
    return [shorter * k + min(k, longer) for k in range(runs)]


def balanced_starts(costs: Sequence[float], runs: int, prices: Sequence[float], slack: float) -> list[int] | None:
    """Where each of `runs` runs of items with these costs begins, so that the largest sum is least; None: impossible.

    `prices`, whole numbers, by item: what it costs to begin a run there, or NEVER. Of all divisions whose largest sum
    is within a fraction `slack` of the least, it is the one of least total price, and then of least sum of squares.
    """
    count = len(costs)
    ends = np.concatenate([[0.0], np.cumsum(costs if any(costs) else np.ones(count))])
    price = np.asarray(prices, float)
    closed = np.where(np.isinf(price), NEVER, 0.0)
    least = np.full(count + 1, NEVER)  # by number of items, the least largest sum of the runs so far
    least[0] = 0.0
    for _ in range(runs):
        least = np.array(
            [NEVER, *(np.maximum(least[:j] + closed[:j], ends[j] - ends[:j]).min() for j in range(1, count + 1))]
        )
    if not np.isfinite(least[-1]):
        return None
    limit = least[-1] * (1 + slack + 1e-12)
    paid = np.full(count + 1, NEVER)
    paid[0] = 0.0
    choices: list[list[int]] = []  # by run, then number of items: where the last run begins
    for _ in range(runs):
        before, paid, chosen = paid, np.full(count + 1, NEVER), [0] * (count + 1)
        for j in range(1, count + 1):
            sums = ends[j] - ends[:j]
            totals = np.where(sums > limit, NEVER, before[:j] + price[:j] + 0.5 * (sums / ends[-1]) ** 2)
            chosen[j] = int(totals.argmin())
            paid[j] = totals[chosen[j]]
        choices.append(chosen)
    starts, end = [], count
    for chosen in reversed(choices):
        end = chosen[end]
        starts.append(end)
    return starts[::-1]
