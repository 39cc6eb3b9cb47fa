"""The orders that `schedgen search` finds, against published tables, their gaps to lower bounds, and CPU seconds.

`search.py [--quick] [TABLE ...]`, without a name all of them:

table-5  Zero Bubble (Qi et al. 2023), table 5, column 2p: rates of the longest own window, memory of 2p forwards
table-8  the same, table 8: V placement, memory of 1F1B; theirs is ZB-V
capped   V placement by memory limit, longest own window: sail-sg/zero-bubble's v_auto_schedule.py, or a CP-SAT model
tessel   Tessel (Lin et al. 2024), placements V (a chain) and X (both directions), forward 1, backward 3, memory of 4
gaps     latency over its bound: chain and V, with 1F1B's memory and without a limit; three costs, with and without
         messages of 5 % of a forward
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from schedgen.planner.order_search.question import FoundOrder, Limits, Question
from schedgen.planner.order_search.search_order import search_order
from schedgen.schemes import load
from schedgen.schemes.scheme import Sizes
from schedgen.simulator.machine import Machine

PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "published-orders.json").read_text())
CAPPED: list[tuple[int, int, tuple[float, ...], int, int | None]] = [
    (4, 8, (1, 1, 1), cap, theirs) for cap, theirs in zip(range(4, 9), (59, 56, 53, 51, 48), strict=True)
]
CAPPED += [(4, 8, (10, 12, 8), 4, 642), (4, 8, (10, 12, 8), 8, 496)]
CAPPED += [(6, 12, (1, 1, 1), cap, None) for cap in (6, 8, 10, 12)]
CAPPED += [(8, 24, (1, 1, 1), cap, theirs) for cap, theirs in PUBLISHED["windows"]["rows"]]
COSTS = ((1, 1, 1), (10, 12, 8), (1, 1.2, 0.6))
ROOM = 10_000  # bytes for messages of one byte: far less than a forward saves; without bytes they would take no time
BUDGET = 1000  # millions of job start times computed
GAP_BUDGET, QUICK_BUDGET = 20, 0.1


class Case(NamedTuple):
    """A search: placement, workers, stages a worker, microbatches, costs by name."""

    scheme: str
    workers: int
    chunks: int
    microbatches: int
    cost: dict[str, float]

    def search(self, machine: Machine, limits: Limits, budget: float) -> tuple[FoundOrder, float]:
        """The best order, and the CPU seconds it took."""
        sizes = Sizes(self.chunks * self.workers, self.microbatches, self.workers)
        begin = time.process_time()
        best = search_order(Question(load(self.scheme, sizes), sizes, self.cost, machine, limits), budget)
        return best, time.process_time() - begin


def case(scheme: str, workers: int, chunks: int, microbatches: int, cost: tuple[float, ...]) -> Case:
    """A case with costs of F, I, W, or of F and B."""
    names = "FIW" if len(cost) == 3 else "FB"
    return Case(scheme, workers, chunks, microbatches, dict(zip(names, cost, strict=True)))


def rows(table: str, quick: bool) -> list[dict[str, Any]]:
    """The rows of a published table; one of a small problem if `quick`."""
    every: list[dict[str, Any]] = PUBLISHED[table]["rows"]
    return [every[0] | {"sizes": (2, 4)}] if quick else every


def table_5(quick: bool) -> None:
    """Rates: idle part of the longest own window."""
    print(f"{'table 5':14}{'theirs':>10}{'found':>10}{'bound':>10}{'seconds':>10}")
    for row in rows("table-5", quick):
        (p, m), (*cost, alpha), h = row["sizes"], row["times"], row["hidden"]
        saved = 34 * h + 5 * row["heads"] * 1024
        machine = Machine(alpha, activation=1, weight=0, saved=saved, half=32 * h - saved)
        limits = Limits("window", bytes=2 * p * saved + ROOM)
        best, seconds = case("zb-h1", p, 1, m, tuple(cost)).search(machine, limits, QUICK_BUDGET if quick else BUDGET)
        rates = (1 - m * sum(cost) / value for value in (best.value, best.bound))
        print(
            f"{f'{p}, {m}':14}{row['rates'][-1]:10.4f}{''.join(f'{each:10.4f}' for each in rates)}{seconds:10.1f}",
            flush=True,
        )


def table_8(quick: bool) -> None:
    """Rates as above; two half stages a worker."""
    print(f"{'table 8':14}{'theirs':>10}{'found':>10}{'bound':>10}{'seconds':>10}  source")
    for row in rows("table-8", quick):
        (p, m), (*cost, alpha) = row["sizes"], row["times"]
        limits = Limits("window", 2 * p)
        best, seconds = case("zb-v", p, 2, m, tuple(cost)).search(
            Machine(alpha), limits, QUICK_BUDGET if quick else BUDGET
        )
        rates = (1 - 2 * m * sum(cost) / value for value in (best.value, best.bound))
        numbers = f"{row['rates'][-1]:10.4f}{''.join(f'{each:10.4f}' for each in rates)}{seconds:10.1f}"
        print(f"{f'{p}, {m}':14}{numbers}  {best.source}", flush=True)


def capped(quick: bool) -> None:
    """Longest own windows."""
    print(f"{'V, cap':24}{'theirs':>10}{'found':>10}{'bound':>10}{'seconds':>10}")
    for p, m, cost, cap, theirs in CAPPED[: 1 if quick else None]:
        best, seconds = case("zb-v", p, 2, m, cost).search(
            Machine(), Limits("window", cap), QUICK_BUDGET if quick else BUDGET
        )
        title = f"{p}, {m}, {cost}, {cap}".replace(" ", "")
        print(f"{title:24}{theirs or '':>10}{best.value:10.6g}{best.bound:10.6g}{seconds:10.1f}", flush=True)


def tessel(quick: bool) -> None:
    """Latencies of m microbatches, where no worker may hold more than 4."""
    print(f"{'Tessel, m':24}{'found':>10}{'bound':>10}{'seconds':>10}  source")
    for name, scheme in (("V", "1f1b"), ("X", "chimera")):
        for m in (6,) if quick else (6, 8, 16):
            best, seconds = case(scheme, 4, 1, m, (1, 3)).search(
                Machine(), Limits("latency", 4), QUICK_BUDGET if quick else 200
            )
            print(f"{f'{name}, {m}':24}{best.value:10.6g}{best.bound:10.6g}{seconds:10.1f}  {best.source}", flush=True)


def gaps(quick: bool) -> None:
    """Gaps of latencies, for a chain and a V, with 1F1B's memory and without a limit."""
    print(f"{'latency':30}{'message':>10}{'found':>10}{'bound':>10}{'gap':>10}{'seconds':>10}")
    budget = QUICK_BUDGET if quick else GAP_BUDGET
    for name, scheme, chunks in (("chain", "zb-h2", 1), ("V", "zb-v", 2)):
        for is_limited in (True, False):
            found = []
            for p in (4,) if quick else (4, 8, 16, 32):
                for m in (p,) if quick else (p, 2 * p, 4 * p):
                    for cost in COSTS[: 1 if quick else None]:
                        for part in (0.0, 0.05):
                            alpha, limits = part * cost[0], Limits("latency", chunks * p if is_limited else None)
                            best, seconds = case(scheme, p, chunks, m, cost).search(Machine(alpha), limits, budget)
                            found.append(best.value / best.bound - 1)
                            title = f"{name}, {limits.saved}, {p}, {m}, {cost}".replace(" ", "")
                            numbers = f"{best.value:10.6g}{best.bound:10.6g}{found[-1]:10.2%}{seconds:10.1f}"
                            print(f"{title:30}{alpha:10.3g}{numbers}", flush=True)
            kind = f"{name}, {'1F1B memory' if is_limited else 'no limit'}"
            print(f"{kind}: {len(found)} gaps, median {statistics.median(found):.2%}, largest {max(found):.2%}")


TABLES = {"table-5": table_5, "table-8": table_8, "capped": capped, "tessel": tessel, "gaps": gaps}


def main() -> None:
    names = [name for name in sys.argv[1:] if name != "--quick"]
    if unknown := [name for name in names if name not in TABLES]:
        sys.exit(f"search.py: no table {unknown[0]}: one of {', '.join(TABLES)}")
    for name in names or TABLES:
        TABLES[name]("--quick" in sys.argv)
        print()


if __name__ == "__main__":
    main()
