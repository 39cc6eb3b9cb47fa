"""What a list does, computed once for everyone: checker, simulator, planner and reports share one `Analysis`.

    analysis = analyse(program)     projected; the same object every time
    analysis.accesses               what every row does to which buffers
    analysis.lifetimes              from where to where every buffer lives, and the first fault
    analysis.messages               which receive each SEND belongs to
    analysis.waits                  the graph of what rows wait for
    analysis.memory                 the most buffers of each kind at once

Nothing is refused here: a damaged program has faults in `lifetimes` and unmatched rows in `messages`, which the
checker words. `waits` is for programs that the checker has accepted so far.
"""

from __future__ import annotations

from functools import cached_property
from weakref import WeakKeyDictionary

from schedgen.analysis.lifetimes import Lifetimes, Memory, MemoryTimeline, follow_buffers
from schedgen.analysis.messages import Messages, match_messages
from schedgen.analysis.waits import Waits, wait_graph
from schedgen.ir.accesses import Accesses, accesses
from schedgen.ir.program import Program

__all__ = ["Accesses", "Analysis", "Lifetimes", "Memory", "MemoryTimeline", "Messages", "Waits", "analyse"]


class Analysis:
    """What there is to know about one projected program; every part is computed when it is first asked for."""

    def __init__(self, program: Program) -> None:
        """Nothing is computed yet. Ask `analyse` for the analysis of a program."""
        self._program = Program(program.header, program.rows)  # a twin: what refers to its own key is never forgotten

    @cached_property
    def accesses(self) -> Accesses:
        """What every row does to which buffers."""
        return accesses(self._program)

    def forget_accesses(self) -> None:
        """Give the memory of `accesses` back; they are computed again if they are asked for."""
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
    def waits(self) -> Waits:
        """What rows wait for; for programs with rules 3, 6 and 7 proved."""
        return wait_graph(self._program, self.lifetimes, self.messages)

    @cached_property
    def memory(self) -> Memory:
        """Rule 8: the most buffers of each kind that every rank holds at once."""
        return self.lifetimes.peaks()


_analyses: WeakKeyDictionary[Program, Analysis] = WeakKeyDictionary()


def analyse(program: Program) -> Analysis:
    """The analysis of a projected program, which lives as long as the program does."""
    if program not in _analyses:
        _analyses[program] = Analysis(program)
    return _analyses[program]
