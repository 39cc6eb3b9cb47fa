"""All dw of a rank: where each lies, when it is zero again, and which of them one owner adds up alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from mpirun.engine.grad_buffer import Gradient, Part
from mpirun.engine.memory_slots import Memory
from mpirun.engine.stage import Stage
from mpirun.engine.weight_shards import Unit
from schedgen.ir.header import Header
from schedgen.ir.instructions import EXCHANGED, Instruction, Kind, Op

Act = Callable[[], None]


class Gradients:
    def __init__(self, header: Header, stages: Mapping[int, Stage], memory: Memory, rank: int) -> None:
        self.header, self.stages, self.memory, self.rank = header, stages, memory, rank
        self.whole: dict[int, Gradient] = {}  # by stage
        self.parts: dict[Unit, Part] = {}
        self.added: set[Unit] = set()  # what is owned and has an instruction that adds up the rows

    def __call__(self, stage: int) -> Gradient:
        """dw.s"""
        if stage not in self.whole:
            self.whole[stage] = Gradient(self.stages[stage], *self.memory.gradient(self.stages[stage]))
        return self.whole[stage]

    def part(self, unit: Unit) -> Gradient | Part:
        """The rows of dw.s, or of a part of it."""
        stage, via = self.stages[unit[0]], unit[1]
        if via < 0:
            return self(unit[0])
        if unit not in self.parts:
            keys = self.memory.keys(self.rank, *unit) or [-1]
            if stage.apart and via in stage.own:
                rows = stage.own[via].new_zeros((len(keys), len(stage.own[via])))
                self.parts[unit] = Part(keys, list(rows), None)
            else:
                whole = self(unit[0])
                views = [whole.data[whole.keys.index(key), stage.spans[via]] for key in keys]
                self.parts[unit] = Part(keys, views, whole)
        return self.parts[unit]

    def owned(self) -> dict[Unit, Gradient | Part]:
        """Of all weights that this rank owns."""
        return {(s, via): self.part((s, via)) for s, stage in self.stages.items() for via in stage.own}

    def single(self, owned: Mapping[Unit, Gradient | Part]) -> list[Gradient | Part]:
        """Of what has one owner, those whose rows nobody has added up yet."""
        mine = [unit for unit in owned if len(self.header.weight_shards.holders(*unit)) == 1 and unit not in self.added]
        self.added.update(mine)
        return [owned[unit] for unit in mine]

    def begins(self, instructions: Sequence[Instruction]) -> list[tuple[int, Act]]:
        """(row, what it does first): instructions that define dw.stage, or a part, make it zero.

        What lies in the rows of all weights is made zero with them, once.
        """
        found: list[tuple[int, Act]] = []
        begun: set[int] = set()
        for row, unit in _defined(instructions, self.header):
            one = self.part(unit)
            if isinstance(one, Part) and one.within is not None:
                if unit[0] not in begun:
                    begun.add(unit[0])
                    found.append((row, one.within.begin))
            else:
                found.append((row, one.begin))
        return found

    def ends(self, instructions: Sequence[Instruction]) -> list[tuple[int, Act]]:
        """(row, what it does last): a stage's last backward hands an owner's parts over to where they stay."""
        last = {i.stage: row for row, i in enumerate(instructions) if i.op in (Op.BWD, Op.BWD_W)}
        found: list[tuple[int, Act]] = []
        for index, row in last.items():
            stage = self.stages[index]
            for via in stage.own if stage.apart else ():
                part = self.part((index, via))
                assert isinstance(part, Part)
                found.append((row, partial(part.take, self(index), stage.spans[via])))
        return found


def _defined(instructions: Sequence[Instruction], header: Header) -> list[tuple[int, Unit]]:
    """(row, unit) of the instructions that define a dw: the first to add to it, and the first behind a FREE."""
    adding = (Op.BWD, Op.BWD_W, Op.ADD, Op.ALLREDUCE)
    defined: set[Unit] = set()
    found = []
    for row, i in enumerate(instructions):
        if i.op in adding and i.kind not in (Kind.T, *EXCHANGED):
            parts = (i.via,) if i.kind == Kind.DW else header.weight_shards.parts(i.stage)
            new = [(i.stage, via) for via in parts if (i.stage, via) not in defined]
            defined.update(new)
            found += [(row, unit) for unit in new]
        elif i.op == Op.FREE and i.kind == Kind.DW:
            defined.discard((i.stage, i.via))
    return found
