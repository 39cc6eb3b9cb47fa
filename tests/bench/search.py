"""What `schedgen search` finds, against published tables, and how far its bounds are away; seconds of each search.

Table 5 of Zero Bubble (Qi et al. 2023), column 2p; V placements under memory limits against sail-sg/zero-bubble's
v_auto_schedule.py; and gaps of V placements with 1F1B's memory.
"""

from __future__ import annotations

import statistics
import sys
import time

from schedgen.planner.order_search.order_search import FoundOrder, Limits, search_order
from schedgen.schemes import load
from schedgen.schemes.scheme import Sizes
from schedgen.simulator.machine import Machine

# workers, microbatches, F, B, W, message (us), hidden size, heads, the paper's rate
TABLE_5 = [
    (8, 24, 18522, 18086, 9337, 601, 2304, 24, 0.0433),
    (8, 32, 18513, 18086, 9331, 626, 2304, 24, 0.0039),
    (8, 64, 18546, 18097, 9321, 762, 2304, 24, 0.0026),
    (8, 24, 29718, 29444, 19927, 527, 4096, 32, 0.0029),
    (16, 48, 11347, 11248, 8132, 377, 5120, 40, 0.0066),
    (16, 64, 11307, 11254, 8101, 379, 5120, 40, 0.0054),
    (32, 96, 10419, 10207, 7715, 408, 6144, 48, 0.0038),
]
CAPPED = [(4, 8, (1, 1, 1), cap, theirs) for cap, theirs in zip(range(4, 9), (59, 56, 53, 51, 48), strict=True)]
CAPPED += [(4, 8, (10, 12, 8), 4, 668), (4, 8, (10, 12, 8), 8, 504)]
CAPPED += [
    (8, 24, (1, 1, 1), cap, theirs)
    for cap, theirs in zip(range(8, 17), (167, 164, 161, 158, 155, 152, 149, 147, 144), strict=True)
]


def found(
    name: str, sizes: Sizes, cost: tuple[float, ...], machine: Machine, limits: Limits, budget: int
) -> tuple[FoundOrder, float]:
    """The best order, and the seconds it took."""
    begin = time.perf_counter()
    best = search_order(load(name, sizes), sizes, dict(zip("FIW", cost, strict=True)), machine, limits, budget)
    return best, time.perf_counter() - begin


def main() -> None:
    quick = "--quick" in sys.argv
    budget = 5 if quick else 1000
    print(f"{'table 5':14}{'theirs':>10}{'found':>10}{'bound':>10}{'seconds':>10}")
    for p, m, *cost, alpha, h, a, rate in TABLE_5[: 1 if quick else None]:
        saved = 34 * h + 5 * a * 1024
        machine = Machine(alpha, activation=0, weight=0, saved=saved, half=32 * h - saved)
        best, seconds = found("zb-h1", Sizes(p, m, p), cost, machine, Limits("window", bytes=2 * p * saved), budget)
        rates = (1 - m * sum(cost) / value for value in (best.value, best.bound))
        print(f"{f'{p}, {m}':14}{rate:10.4f}{''.join(f'{each:10.4f}' for each in rates)}{seconds:10.1f}", flush=True)
    print(f"\n{'V, cap':24}{'theirs':>10}{'found':>10}{'bound':>10}{'seconds':>10}")
    for p, m, cost, cap, theirs in CAPPED[: 1 if quick else None]:
        best, seconds = found("zb-v", Sizes(2 * p, m, p), cost, Machine(), Limits("window", cap), budget)
        title = f"{p}, {m}, {cost}, {cap}".replace(" ", "")
        print(f"{title:24}{theirs:10}{best.value:10.6g}{best.bound:10.6g}{seconds:10.1f}", flush=True)
    print(f"\n{'V, cap 2p, makespan':24}{'alpha':>10}{'value':>10}{'bound':>10}{'gap':>10}{'seconds':>10}")
    gaps = []
    for p in (4,) if quick else (4, 8, 16, 32):
        for m in (p,) if quick else (p, 2 * p, 4 * p):
            for cost in ((1, 1, 1), (10, 12, 8), (1, 1.2, 0.6))[: 1 if quick else None]:
                for part in (0.0, 0.05):
                    alpha, limits = part * cost[0], Limits("makespan", 2 * p)
                    best, seconds = found("zb-v", Sizes(2 * p, m, p), cost, Machine(alpha=alpha), limits, budget // 5)
                    gaps.append(best.value / best.bound - 1)
                    title = f"{p}, {m}, {cost}".replace(" ", "")
                    numbers = f"{alpha:10.3g}{best.value:10.6g}{best.bound:10.6g}{gaps[-1]:10.1%}{seconds:10.1f}"
                    print(f"{title:24}{numbers}", flush=True)
    print(f"gaps: median {statistics.median(gaps):.1%}, largest {max(gaps):.1%}")


if __name__ == "__main__":
    main()
