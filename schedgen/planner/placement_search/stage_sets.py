"""`StageSets`: lower bounds on the time of a worker, given the set of its stages, and so of any placement.

A placement here has each stage on one worker for all microbatches. The bound of a worker with the stages U is that of
a placement in which U has a worker, each other stage one of its own, and messages take time only between U and others.
Any placement with U on a worker takes at least as long: stages that share a worker also wait for one another. So a
placement takes no less than the bound of any of its sets, and no placement takes less than

    min over partitions of the stages into at most W sets    max over sets U    bound(U).

That is computed for up to `MOST_STAGES` stages. With more, no placement takes less than a single stage without
messages, nor less than

    min over k in 1..W    (work + the k least heads + the k least tails) / k,

since k workers that have jobs begin and end with jobs of k different stages. The head of a stage is the longest path to
its first job, its tail the longest path after its last job; with own windows they do not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np

from schedgen.planner.order_search.placed_problem import Nodes
from schedgen.simulator.lower_bounds import longest_ways, order_bound
from schedgen.util.arrays import Flags, Times

MOST_STAGES = 12  # up to which all partitions are considered

Placement = tuple[int, ...]  # by stage its worker, in the order of their first stages: 0, then 0 or 1, and so on
StageSet = int  # bit s: stage s


class StageSets:
    """Lower bounds for sets of stages on one worker."""

    def __init__(
        self, nodes: Nodes, stages: int, microbatches: int, capacity: float, owned: Times, own_window: bool
    ) -> None:
        """`nodes`: with stages on workers of their own; `owned`: by stage, memory it always takes of `capacity`."""
        self.nodes, self.stages, self.microbatches, self.own_window = nodes, stages, microbatches, own_window
        self.capacity, self.owned = capacity, owned
        self.work = microbatches * nodes.lengths.reshape(-1, stages).sum(axis=0)  # by stage
        way = longest_ways(nodes.before, nodes.lengths, {})
        tails = (way + nodes.lengths).max(axis=1) - nodes.lengths
        ends = np.stack([way[:, :stages].max(axis=0), tails.reshape(-1, stages).min(axis=0)])
        # By set: a lower bound for a worker that has these stages and no others.
        self.bound = cache(self._of_worker)
        self.heads, self.tails = 0 * ends if own_window else ends  # by stage: paths to its first job, after its last

    def of(self, placement: Placement) -> float:
        """A lower bound on the time of a placement."""
        return max(self.bound(stages) for stages in sets_of(placement))

    def quick_bound(self, placement: Placement) -> float:
        """A bound from the work, least head and least tail of each worker alone: lower, but cheap."""
        workers, count = np.array(placement), max(placement) + 1
        heads, tails = np.full((2, count), np.inf)
        np.minimum.at(heads, workers, self.heads)
        np.minimum.at(tails, workers, self.tails)
        return float((heads + np.bincount(workers, self.work) + tails).max())

    def room(self, stages: StageSet) -> float:
        """The memory of a worker besides what it holds throughout for its stages."""
        return self.capacity - float(self.owned[self._has(stages)].sum())

    def least(self, workers: int, enough: float) -> tuple[float, Placement | None]:
        """A lower bound for any placement, or `enough` if that is less; and a placement with this bound, if known."""
        if self.stages > MOST_STAGES:
            return min(enough, self._least_of_many(workers)), None
        subsets = np.arange(1 << self.stages)
        work = ((subsets[:, None] >> np.arange(self.stages)) & 1) @ self.work
        light = [np.flatnonzero((work < enough) & (subsets & -subsets == 1 << s)).tolist() for s in range(self.stages)]

        @cache
        def least(left: StageSet, workers: int) -> tuple[float, tuple[StageSet, ...]]:
            if not left:
                return 0.0, ()
            best: tuple[float, tuple[StageSet, ...]] = (enough, ())
            for stages in light[(left & -left).bit_length() - 1] if workers else ():
                if stages & ~left == 0 and work[stages] < best[0] and self.bound(stages) < best[0]:
                    behind, sets = least(left ^ stages, workers - 1)
                    best = min(best, (max(self.bound(stages), behind), (stages, *sets)))
            return best

        value, sets = least((1 << self.stages) - 1, workers)
        if value >= enough:
            return enough, None
        return value, tuple(k for s in range(self.stages) for k, stages in enumerate(sets) if stages >> s & 1)

    def _least_of_many(self, workers: int) -> float:
        singles = max(self._bound(1 << s, {}) for s in range(self.stages))  # others may be on its worker, too
        idle = np.cumsum(np.sort(self.heads) + np.sort(self.tails))
        few = np.arange(1, min(workers, self.stages) + 1)
        return max(singles, float(((self.work.sum() + idle[few - 1]) / few).min()))

    def _has(self, stages: StageSet) -> Flags:
        return np.array([stages >> s & 1 for s in range(self.stages)], bool)

    def _of_worker(self, stages: StageSet) -> float:
        inside, S = self._has(stages), self.stages
        hops = {(k, j): time for (k, j), time in self.nodes.hops.items() if inside[k % S] != inside[j % S]}
        return self._bound(stages, hops)

    def _bound(self, stages: StageSet, hops: Mapping[tuple[int, int], float]) -> float:
        """The bound with these times of messages between nodes."""
        inside, room = self._has(stages), self.room(stages)
        if room <= 0:
            return np.inf
        worker = np.where(inside, 0, 1 + np.arange(self.stages))
        compute = np.broadcast_to(
            worker[:, None], (len(self.nodes.lengths) // self.stages, self.stages, self.microbatches)
        )
        return order_bound(
            self.nodes.before, compute, self.nodes.lengths, hops, self.own_window, self.nodes.takes,
            np.full(1 + self.stages, room), [0],
        )  # fmt: skip


def sets_of(placement: Placement) -> list[StageSet]:
    """The set of stages of each worker that has any."""
    return [sum(1 << s for s, other in enumerate(placement) if other == w) for w in range(max(placement) + 1)]
