"""When every instruction of a program happens, if messages take no time.

The list itself is executed: an instruction starts when the one before it on
its rank has ended and what it uses has been sent. Compute takes the duration
of its direction, everything else none; only NORM holds ranks together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedgen.check.deadlock import Waits, waits
from schedgen.check.lives import lives
from schedgen.check.messages import rule_3
from schedgen.check.subject import Subject
from schedgen.cost import DIRECTION, durations
from schedgen.program import Op, Program


class Times(NamedTuple):
    """When each row starts and ends, in the units of the cost."""

    start: NDArray[np.float64]
    end: NDArray[np.float64]


def simulate(program: Program, cost: Mapping[str, float]) -> Times:
    """Times of every row of a checked, projected program.

    `cost`: the duration of F and B, or of F, I and W; see `schedgen.cost`.
    """
    duration = np.zeros(len(program))
    lengths = durations(cost, split="W" in program.header.cost)
    for op, direction in DIRECTION.items():
        duration[program.rows.op == op] = lengths.get(direction, 0)
    subject = Subject(program, "")
    start = np.array(_execute(subject, waits(subject, lives(subject), rule_3(subject)), duration.tolist()))
    return Times(start, start + duration)


def _execute(subject: Subject, needs: Waits, duration: list[float]) -> list[float]:
    bounds, rank_of = subject.program.bounds.tolist(), subject.rank.tolist()
    at, ends = bounds[:-1], bounds[1:]
    norms = set(subject.having(Op.NORM).tolist())
    start = [0.0] * len(rank_of)
    clock = [0.0] * len(at)
    asleep: dict[int, list[int]] = {}  # ranks by the SEND they wait for
    runnable = list(range(len(at)))
    waiting: list[int] = []  # ranks at NORM
    while runnable:
        rank = runnable.pop()
        while at[rank] < ends[rank]:
            row = at[rank]
            if row in norms and len(waiting) < len(at):
                waiting.append(rank)
                if len(waiting) == len(at):
                    clock = [max(clock)] * len(at)
                    runnable = waiting[:]
                break
            sends = needs.sends[needs.first[row] : needs.first[row + 1]]
            missing = next((send for send in sends if at[rank_of[send]] <= send), -1)
            if missing >= 0:
                asleep.setdefault(missing, []).append(rank)
                break
            start[row] = max([clock[rank], *(start[send] for send in sends)])
            clock[rank] = start[row] + duration[row]
            at[rank] = row + 1
            if row in asleep:
                runnable += asleep.pop(row)
    return start
