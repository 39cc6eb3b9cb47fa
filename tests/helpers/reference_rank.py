"""One rank of the reference machine: its list, its buffers by name, and their values.

x, g                WHOLE, or t where it is the term of slice t in a sum of a sliced stage
dw, partial         a Sum, the tree of microbatches' gradients: in which order and groups they were added
w, saved, half, host  WHOLE
any                 UNDER_WAY, from RECV or FETCH_W until the message has arrived
dw                  STEPPED, where weights have versions, from STEP to FREE
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from schedgen.ir.instructions import Kind, Op, buffer_name
from schedgen.ir.program import Program

WHOLE, UNDER_WAY, STEPPED, GONE = "whole", "under way", "stepped", "gone back"


class Sum(NamedTuple):
    """A weight gradient as the sequence of its terms, which are added from left to right."""

    terms: tuple[int | Sum, ...] = ()  # a microbatch, for its gradient, or a nested sum

    def microbatches(self) -> Counter[int]:
        """How often the sum contains the gradient of each microbatch."""
        return sum((t.microbatches() if isinstance(t, Sum) else Counter([t]) for t in self.terms), Counter[int]())

    def is_of(self, microbatches: Iterable[int]) -> bool:
        """Whether this is the sum over these microbatches, each once."""
        return self.microbatches() == Counter(microbatches)

    def shape(self) -> Sum:
        """The nesting that determines the bits: zeros are dropped, and a sum whose only term is a sum is that term."""
        terms = tuple(t.shape() if isinstance(t, Sum) else t for t in self.terms)
        terms = tuple(t for t in terms if t != Sum())
        return terms[0] if len(terms) == 1 and isinstance(terms[0], Sum) else Sum(terms)


Value = str | int | Sum


class CannotExecute(Exception):
    """An instruction that makes no sense where it stands."""


class MustWait(Exception):
    """The instruction has to wait for another rank; raised before any buffer has changed."""


class Rank:
    """The state of one rank."""

    def __init__(self, rank: int, program: Program) -> None:
        self.rank = rank
        self.versions = not program.header.has_flush
        self.list = program.instructions(rank)
        self.freed = {i.buffer for i in self.list if i.op == Op.FREE and i.kind == Kind.W}
        self.at = 0  # the index in its list of the next instruction
        self.owned = set(program.header.units_of(rank))  # (stage, shard)
        self.newest = {stage: 0 if self.versions else -1 for stage, _ in self.owned}  # version, by stage
        self.held: dict[str, Value] = {self.weights(*unit): WHOLE for unit in self.owned}
        self.stepped: set[str] = set()  # the names of the weights that have had their last STEP
        self.moved: set[tuple[int, int]] = set()  # the units whose optimizer's state is back on the host
        self.ties: list[int] = []  # the ties that it has summed up
        self.redone: set[tuple[int, int]] = set()  # (stage, microbatch) whose forward it has redone
        self.normed = False  # whether it has entered NORM
        self.gradients: dict[str, Sum] = {}  # by name, the sum that each STEP has used
        self.alive: Counter[str] = Counter()  # live buffers by kind; of its own weights, all versions but one
        self.most: Counter[str] = Counter()  # the peaks of `alive`

    def weights(self, stage: int, shard: int, version: int | None = None) -> str:
        """The name of weights; if they have versions, `version` defaults to the newest."""
        if not self.versions:
            return buffer_name(Kind.W, stage, piece=shard)
        return buffer_name(Kind.W, stage, version=self.newest.get(stage, 0) if version is None else version)

    def refuse(self, reason: str) -> CannotExecute:
        """The error to raise for the instruction that the rank is at."""
        return CannotExecute(f"rank {self.rank}: instruction {self.at}: {self.list[self.at]}: {reason}")

    def need(self, condition: bool, reason: str) -> None:
        """Raise CannotExecute unless the condition holds."""
        if not condition:
            raise self.refuse(reason)

    def read(self, name: str, term: bool = False) -> Value:
        """The value of a buffer: it must exist and, unless `term`, not be a slice's term. MustWait if in flight."""
        self.need(name in self.held, f"{name} is not there")
        value = self.held[name]
        if value is UNDER_WAY:
            raise MustWait
        self.need(term or not isinstance(value, int), f"{name} is only a slice's term")
        self.need(self.versions or name not in self.stepped, f"{name} has stepped: it is the next step's")
        return value

    def define(self, name: str, value: Value) -> None:
        """Add a new buffer, which must not exist yet."""
        self.need(name not in self.held, f"{name} is there already")
        self.held[name] = value
        kind = name.split(".")[0]
        self.alive[kind] += 1
        self.most[kind] = max(self.most[kind], self.alive[kind])

    def end(self, name: str) -> None:
        """Remove a buffer."""
        del self.held[name]
        self.alive[name.split(".")[0]] -= 1

    def add(self, name: str, term: int | Sum) -> None:
        """name += term, where a dw that does not exist is zero."""
        self.change(name, Sum((*self.sum(name).terms, term)))

    def sum(self, name: str) -> Sum:
        """The dw, which may still be added to; zero if it does not exist."""
        value = self.held.get(name, Sum())
        self.need(isinstance(value, Sum), f"{name} still holds the gradient of the step before")
        assert isinstance(value, Sum)
        return value

    def change(self, name: str, value: Sum) -> None:
        """name = value; a dw that does not exist is defined."""
        if name not in self.held:
            self.define(name, value)
        self.held[name] = value
