"""Rule 4: every rank reaches its end even if every SEND is a rendezvous.

Every rank's list is executed as far as the wait graph allows. In which order does not matter: what can be reached
does not depend on it.
"""

from __future__ import annotations

import numpy as np

from schedgen.analysis import Waits
from schedgen.checker.proof import Proof
from schedgen.ir.instructions import Ints, Numbers
from schedgen.util.jit import kernel

SHOWN = 4  # rows of a circle that are named


def rule_4(proof: Proof, waits: Waits) -> None:
    """Refuse a program with rules 3, 6 and 7 proved whose ranks wait for one another in a circle."""
    reached = _advance.sized(len(proof.program))(proof.rank, proof.program.bounds, *waits)
    circle = _circle(proof, waits, reached)
    if circle:
        others = "; ".join(f"line {proof.where(row)}" for row in circle[1:SHOWN])
        others += f"; and {len(circle) - SHOWN} more" if len(circle) > SHOWN else ""
        proof.refuse(4, circle[0], f"waits for ever, in a circle with {others}")


@kernel
def _advance(
    rank: Ints, bounds: Numbers, first: Numbers, sends: Numbers, receiver: Ints, collective: Ints, members: Numbers
) -> Numbers:
    """Take every rank as far as it gets; the row each ends up at."""
    workers = len(bounds) - 1
    at = bounds[:-1].copy()
    left = first.copy()  # of each row, the first of its sends that may not be past
    outside = members.copy()  # of each collective, members still to arrive
    # Ranks asleep on a row (or, behind all rows, on a collective), as linked lists.
    asleep = np.full(len(rank) + len(members), -1, np.int32)
    next_asleep = np.full(workers, -1, np.int32)
    runnable = np.arange(workers)
    top = workers
    while top:
        top -= 1
        r = runnable[top]
        while at[r] < bounds[r + 1]:
            row = at[r]
            wait = -1
            entered = collective[row]
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
                while left[row] < first[row + 1] and at[rank[sends[left[row]]]] > sends[left[row]]:
                    left[row] += 1
                if left[row] < first[row + 1]:
                    wait = sends[left[row]]
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
    return at


def _circle(proof: Proof, waits: Waits, at: Numbers) -> list[int]:
    """The rows that wait for one another, `at` being what each rank has reached; empty where every rank has ended."""
    stuck = np.flatnonzero(at < proof.program.bounds[1:])
    if not len(stuck):
        return []
    entering = np.argsort(waits.collective, kind="stable")
    begin = np.searchsorted(waits.collective[entering], np.arange(len(waits.members) + 1))
    path: dict[int, int] = {}  # rows, and how many are before
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
