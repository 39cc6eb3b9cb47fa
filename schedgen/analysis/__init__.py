"""What a list does, computed once and shared: checker, simulator, planner and reports use the same `Analysis`.

    analysis = analyse(program)     of a projected program; the same object every time
    analysis.accesses               what every row does to which buffers
    analysis.lifetimes              where every buffer's lives begin and end, and the first fault
    analysis.messages               which receive each SEND is matched with
    analysis.named                  the same by the names of buffers, in whatever order messages come
    analysis.waits                  the graph of what rows wait for
    analysis.memory                 the most buffers of each kind at once

Nothing is refused here: a damaged program has faults in `lifetimes` and unmatched rows in `messages`, which the
checker puts into words. `waits` is only for programs that have passed the checker's rules so far.
"""

from __future__ import annotations

from functools import cached_property
from weakref import WeakKeyDictionary

from schedgen.analysis.lifetimes import Lifetimes, Memory, MemoryTimeline, follow_buffers
from schedgen.analysis.messages import Messages, Waits, match_messages, names, wait_graph
from schedgen.ir.accesses import Accesses, accesses
from schedgen.ir.program import Program

__all__ = ["Accesses", "Analysis", "Lifetimes", "Memory", "MemoryTimeline", "Messages", "Waits", "analyse"]


class Analysis:
    """The analysis of one projected program; each part is computed on first use."""

    def __init__(self, program: Program) -> None:
        self._program = Program(program.header, program.rows)  # a copy: a value that holds its own key is never freed

    @cached_property
    def accesses(self) -> Accesses:
        """What every row does to which buffers."""
        return accesses(self._program)

    def forget_accesses(self) -> None:
        """Release the memory of `accesses`, which are computed again if they are needed."""
        self.__dict__.pop("accesses", None)

    @cached_property
    def lifetimes(self) -> Lifetimes:
        """Every life of every buffer on every rank."""
        return follow_buffers(self._program, self.accesses)

    @cached_property
    def messages(self) -> Messages:
        """Every SEND and the RECV or FETCH_W that it belongs to."""
        return match_messages(self._program)

    @cached_property
    def named(self) -> Messages:
        """Every SEND and the receive of the same buffer."""
        return self.messages if self.messages.complete else match_messages(self._program, names(self._program))

    @cached_property
    def waits(self) -> Waits:
        """What rows wait for; only for programs for which rules 3, 6 and 7 are proved."""
        return wait_graph(self._program, self.lifetimes, self.named)

    @cached_property
    def memory(self) -> Memory:
        """The most buffers of each kind that every rank holds at once, which is rule 8's peak memory."""
        return self.lifetimes.peaks()


_analyses: WeakKeyDictionary[Program, Analysis] = WeakKeyDictionary()


def analyse(program: Program) -> Analysis:
    """The analysis of a projected program, which lives as long as the program does."""
    if program not in _analyses:
        _analyses[program] = Analysis(program)
    return _analyses[program]
