"""Rule 4: every rank reaches its end even if every SEND is a rendezvous.

Every rank's list is executed as far as the wait graph allows. The order in which ranks advance does not change what
can be reached.
"""

from __future__ import annotations

import numpy as np

from schedgen.analysis import Waits
from schedgen.checker.proof import Proof
from schedgen.util.arrays import Ints, Numbers
from schedgen.util.jit import kernel

SHOWN = 4  # rows of a cycle that a refusal names


def rule_4(proof: Proof, waits: Waits) -> None:
    """Refuse a program, with rules 3, 6 and 7 proved, whose ranks wait for one another in a cycle."""
    length, collectives, workers = len(proof.program), len(waits.members), proof.header.workers
    reached = proof.program.bounds[:-1].copy()
    _advance.sized(2 * length)(
        proof.rank, proof.program.bounds, *waits[:4], waits.members.copy(), reached, np.zeros(workers, np.int64),
        np.full(length + collectives, -1, np.int32), np.full(workers, -1, np.int32), np.arange(workers),
    )  # fmt: skip
    circle = _circle(proof, waits, reached)
    if circle:
        others = "; ".join(proof.where(row) for row in circle[1:SHOWN])
        others += f"; and {len(circle) - SHOWN} more" if len(circle) > SHOWN else ""
        proof.refuse(4, circle[0], f"waits forever, in a cycle with {others}")


@kernel
def _advance(
    rank: Ints, bounds: Numbers, first: Ints, sends: Ints, receiver: Ints, collective: Ints, outside: Numbers,
    at: Numbers, left: Numbers, asleep: Ints, next_asleep: Ints, runnable: Numbers,
) -> None:  # fmt: skip
    """Advance every rank as far as it gets: `at` becomes the row at which each stops.

    `outside`: by collective, the members still to arrive. `left`: by rank, the index in `sends` of the first that its
    row waits for and that may not have been executed. `asleep`: by row and, after all rows, by collective, the first
    rank that sleeps on it; `next_asleep`: by rank, the next that sleeps on the same. `runnable`: a stack of ranks, at
    first all.
    """
    top = len(runnable)
    while top:
        top -= 1
        r = runnable[top]
        while at[r] < bounds[r + 1]:
            row = at[r]
            wait, entered = -1, collective[row]
            left[r] = max(left[r], first[row])
            if entered >= 0:
                outside[entered] -= 1
                if outside[entered] > 0:
                    wait = len(rank) + entered
                else:
                    woken = asleep[len(rank) + entered]
                    while woken >= 0:
                        at[woken] += 1
                        runnable[top] = woken
                        top += 1
                        woken = next_asleep[woken]
            else:
                while left[r] < first[row + 1] and at[rank[sends[left[r]]]] > sends[left[r]]:
                    left[r] += 1
                if left[r] < first[row + 1]:
                    wait = sends[left[r]]
                elif receiver[row] >= 0 and at[rank[receiver[row]]] <= receiver[row]:
                    wait = receiver[row]
            if wait >= 0:
                next_asleep[r] = asleep[wait]
                asleep[wait] = r
                break
            at[r] = row + 1
            woken = asleep[row]
            asleep[row] = -1
            while woken >= 0:
                runnable[top] = woken
                top += 1
                woken = next_asleep[woken]


def _circle(proof: Proof, waits: Waits, at: Numbers) -> list[int]:
    """A cycle of rows that wait for one another, given `at`, the row of each rank; empty if all have ended."""
    stuck = np.flatnonzero(at < proof.program.bounds[1:])
    if not len(stuck):
        return []
    entering = np.argsort(waits.collective, kind="stable")
    begin = np.searchsorted(waits.collective[entering], np.arange(len(waits.members) + 1))
    path: dict[int, int] = {}  # row -> number of rows before it
    row = int(at[stuck[0]])
    while row not in path:
        path[row] = len(path)
        collective = waits.collective[row]
        if collective >= 0:
            awaited = entering[begin[collective] : begin[collective + 1]]
            awaited = awaited[at[proof.rank[awaited]] < awaited]
        else:
            awaited = np.append(waits.sends[waits.first[row] : waits.first[row + 1]], waits.receiver[row])
            awaited = awaited[(awaited >= 0) & (at[proof.rank[awaited]] <= awaited)]
        row = int(at[proof.rank[awaited[0]]])
    return list(path)[path[row] :]
