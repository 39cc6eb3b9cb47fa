"""Rule 4: every rank reaches its end, even if every SEND is a rendezvous; or on a transport that delivers in order.

Every event happens that no circle of events keeps back. A message between wrong buffers is a fault of rule 3.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedgen.analysis import analyse
from schedgen.analysis.events import Events, events
from schedgen.analysis.messages import Messages, match_messages, names
from schedgen.checker.proof import Proof
from schedgen.ir.program import Program
from schedgen.ir.transport import communicators
from schedgen.util.arrays import Ints, Numbers

SHOWN = 4  # rows of a cycle that a refusal names


class Execution(NamedTuple):
    """What happens when a list is executed on a transport."""

    met: Messages  # without tags a SEND may meet the receive of another buffer
    all: Events
    happened: Ints  # events, in the order of an execution


def executed(program: Program, communicator: Numbers | None, batch: bool = False) -> Execution:
    """Execute a program; its communicators are as in `ir.transport`, None: MPI."""
    analysis = analyse(program)
    met = analysis.messages if communicator is None else match_messages(program, np.maximum(communicator, 0))
    all = events(program, analysis.lifetimes, met, analysis.waits.collective, communicator, batch)
    return Execution(met, all, all.execute())


def rule_4(proof: Proof) -> None:
    """Refuse a program, with rules 3, 6 and 7 proved, whose ranks wait for one another in a cycle."""
    program, transport = proof.program, proof.transport
    carried = None if transport is None else communicators(program, transport)
    execution = executed(program, carried, transport is not None and transport.batch)
    if not execution.met.complete:
        sends, receives, _ = execution.met  # the first message that meets another buffer before ranks wait forever
        delivered = execution.happened - len(proof.program)
        delivered = delivered[(delivered >= 0) & (delivered < len(sends))]
        name = names(proof.program)
        other = delivered[name[sends[delivered]] != name[receives[delivered]]]
        for k in other[:1].tolist():
            words = f"this meets the SEND of another buffer, {proof.where(sends[k])}"
            proof.refuse(3, receives[k], f"{words}, as {len(other)} of {len(sends)} messages do")
    if len(execution.happened) < execution.all.total:
        refuse_circle(proof, execution.all, execution.happened)


def refuse_circle(proof: Proof, all: Events, happened: Ints) -> None:
    """Refuse the first row of those that keep others back in a circle of events that do not happen."""
    circle = _circle(proof, all, happened)
    least = min(range(len(circle)), key=lambda k: circle[k][0])
    circle = circle[least:] + circle[:least]
    kept = ", ".join(str(proof.program.instruction(row)) for _, row in circle[:SHOWN])
    others = "; ".join(proof.where(row) for row, _ in circle[1:SHOWN])
    others += f"; and {len(circle) - SHOWN} more" if len(circle) > SHOWN else ""
    proof.refuse(4, circle[0][0], f"waits forever, in a cycle with {others}; behind them wait {kept}")


def _circle(proof: Proof, all: Events, happened: Ints) -> list[tuple[int, int]]:
    """Of a circle of events that do not happen, the rows that keep back another of their rank, and the other."""
    stuck = np.ones(all.total, bool)
    stuck[happened] = False
    reason = np.empty((all.total, 4), np.int64)  # by stuck event, another that it follows, and why
    for part in all.follows:
        k = np.flatnonzero(stuck[part.before] & stuck[part.after])
        why = part.before[k], part.ahead[k], part.row[k], np.full(len(k), part.keeps)
        reason[part.after[k]] = np.stack(why, axis=1)
    path: dict[int, int] = {}  # event -> number of events before it
    event = int(np.argmax(stuck))
    while event not in path:
        path[event] = len(path)
        event = int(reason[event, 0])
    links = reason[list(path)[path[event] :]].tolist()
    steps = [(ahead, kept) for _, ahead, kept, keeps in links if keeps]
    if not steps:  # each SEND needs what the one before it brings
        steps = [(ahead, kept) for _, ahead, kept, _ in links if ahead != kept]
    first = next(k for k in range(len(steps)) if steps[k][1] != steps[k - 1][0])
    circle: list[tuple[int, int]] = []
    for ahead, kept in steps[first:] + steps[:first]:
        if circle and circle[-1][0] == kept:  # rows one after another
            circle[-1] = ahead, circle[-1][1]
        else:
            circle.append((ahead, kept))
    return circle
