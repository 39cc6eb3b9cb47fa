"""Local search on the cuts between stages: balanced stages do not always end first.

The slowest stage sets the pace of a long pipeline. With few microbatches the latency of one microbatch counts as much,
and if workers have several stages, the sum of their times sets the pace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush

Cuts = tuple[int, ...]  # where each stage ends, in layers; the last number is the number of layers

PATIENCE = 8  # expansions without an improvement before a search ends


def best_cuts(start: Cuts, seconds: Callable[[Cuts], float], evaluations: int) -> Cuts:
    """The fastest cuts that best-first search finds; `seconds` is called for `start`, and at most `evaluations` times.

    Each expansion evaluates the neighbours of the fastest cuts not yet expanded. The search ends when PATIENCE
    expansions in a row find nothing faster than the best.
    """
    best = (seconds(start), start)
    seen, open_cuts, patience = {start}, [best], PATIENCE
    while open_cuts and patience:
        patience -= 1
        for cuts in moves(heappop(open_cuts)[1]):
            if cuts in seen:
                continue
            if len(seen) >= evaluations:
                return best[1]
            seen.add(cuts)
            heappush(open_cuts, (seconds(cuts), cuts))
        if open_cuts and open_cuts[0] < best:
            best, patience = open_cuts[0], PATIENCE
    return best[1]


def moves(cuts: Cuts) -> Iterator[Cuts]:
    """Cuts that differ in a run of neighbours shifted by a layer, one cut moved anywhere, or two cuts shifted by one.

    No stage is left without layers. The last cut, which is the end, stays.
    """
    inner = range(len(cuts) - 1)
    runs = [range(first, last + 1) for first in inner for last in inner[first:]]
    shifted = [dict.fromkeys(run, by) for run in runs for by in (-1, 1)]
    elsewhere = [{k: by} for k in inner for by in range(-cuts[k], cuts[-1] - cuts[k])]
    pairs = [{a: by, b: other} for a in inner for b in inner[a + 1 :] for by in (-1, 1) for other in (-1, 1)]
    for move in (*shifted, *elsewhere, *pairs):
        new = tuple(cut + move.get(k, 0) for k, cut in enumerate(cuts))
        if new != cuts and all(begin < end for begin, end in zip((0, *new[:-1]), new, strict=True)):
            yield new
