"""The wait graph: which rows every row waits for, apart from the row before it on its rank.

A SEND waits until its receiver has reached the RECV or FETCH_W (rendezvous); the first use of what arrives waits until
its SEND has been executed; a collective waits for all its members.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedgen.analysis.lifetimes import Lifetimes
from schedgen.analysis.messages import Messages, entries
from schedgen.ir.instructions import Ints, Numbers
from schedgen.ir.program import Program


class Waits(NamedTuple):
    """The graph as arrays by row, -1 where a row has none; only for programs for which rules 3, 6 and 7 are proved."""

    first: Ints  # row r is the first to use what SENDs sends[first[r] : first[r + 1]] bring; shape (rows + 1,)
    sends: Ints
    receiver: Ints  # of a SEND: the RECV or FETCH_W
    collective: Ints  # of an ALLREDUCE or NORM: the number of the collective it enters ...
    members: Numbers  # ... and by that number, how many rows enter it


def wait_graph(program: Program, lifetimes: Lifetimes, messages: Messages) -> Waits:
    """Build the graph from the lifetimes and the matched messages."""
    length = len(program)
    receiver, sender = np.full(length, -1, np.int32), np.full(length, -1, np.int32)
    receiver[messages.sends], sender[messages.receives] = messages.receives, messages.sends
    first = np.zeros(length + 1, np.int32)
    first[1:] = np.cumsum(np.bincount(lifetimes.users, minlength=length))
    collective, members = np.full(length, -1, np.int32), [np.zeros(0, np.int64)]
    begin = 0
    for group, rows in entries(program):
        size = len(program.header.groups[group])
        rounds = len(rows) // size  # all ranks enter equally often
        collective[rows] = np.tile(np.arange(begin, begin + rounds), size)
        members.append(np.full(rounds, size))
        begin += rounds
    return Waits(first, sender[lifetimes.received], receiver, collective, np.concatenate(members))
