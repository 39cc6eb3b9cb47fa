"""Where one stage ends and the next begins, so that the slowest is fastest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NEVER = float("inf")


def even(count: int, parts: int) -> list[int]:
    """Where each of `parts` runs of `count` things begins; the first ones are longer where they do not divide."""
    short, longer = divmod(count, parts)
    return [short * k + min(k, longer) for k in range(parts)]


def balanced(
    costs: Sequence[float], parts: int, tolls: Sequence[float] | None = None, slack: float = 0.0
) -> list[int] | None:
    """Where each of `parts` runs of `costs` begins, so that the largest sum is least; None: there is no way.

    `tolls`: whole numbers, what a border in front of each costs; NEVER: there may be none. Of all cuts whose
    largest sum is within `slack` of the least, it is the one of least toll, and then that of the least squares.
    """
    count = len(costs)
    ends = np.concatenate([[0.0], np.cumsum(costs if any(costs) else np.ones(count))])
    toll = np.zeros(count) if tolls is None else np.asarray(tolls, float)
    closed = np.where(np.isinf(toll), NEVER, 0.0)
    least = np.full(count + 1, NEVER)
    least[0] = 0.0
    for _ in range(parts):
        least = np.array(
            [NEVER, *(np.maximum(least[:j] + closed[:j], ends[j] - ends[:j]).min() for j in range(1, count + 1))]
        )
    if not np.isfinite(least[-1]):
        return None
    limit = least[-1] * (1 + slack + 1e-12)
    paid = np.full(count + 1, NEVER)
    paid[0] = 0.0
    choices: list[list[int]] = []
    for _ in range(parts):
        before, paid, chosen = paid, np.full(count + 1, NEVER), [0] * (count + 1)
        for j in range(1, count + 1):
            sums = ends[j] - ends[:j]
            price = np.where(sums > limit, NEVER, before[:j] + toll[:j] + 0.5 * (sums / ends[-1]) ** 2)
            chosen[j] = int(price.argmin())
            paid[j] = price[chosen[j]]
        choices.append(chosen)
    starts, end = [], count
    for chosen in reversed(choices):
        end = chosen[end]
        starts.append(end)
    return starts[::-1]
