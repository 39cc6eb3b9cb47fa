"""dw.s on a rank: buffers that sum the gradient of a stage's weights over backwards and over ranks.

A buffer has rows of equal length, each with a key. Like the weights, rows are bytes.
- Usually there is one row, to which every backward adds.
- With --canonical there is one row per microbatch. The rows are added up at the very end, in microbatch order, so that
  every scheme gives the same bits as one process that runs the microbatches one by one.
- If the weights are divided, backwards add to rows that cover all weights. Unless the rank owns all shards, each shard
  that it owns has separate rows: other ranks' sums and, after the last backward, the rank's own are added to these.
- A part of a gradient that owners sum in parts is a slice of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpirun.comm.ordered_allreduce import add, numbers
from mpirun.engine.core.stage import LocalStage
from mpirun.model.stage_shape import Unit, shard_spans
from schedgen.ir.header import Header
from schedgen.ir.instructions import EXCHANGED, Instruction, Kind, Op

if TYPE_CHECKING:
    from mpirun.engine.memory_slots import MemorySlots

RowAct = tuple[int, Callable[[], None]]  # a row, and an act that runs before or after the instruction in that row


class GradBuffer:
    """dw.s or dw.s/k: the rows of a unit, each of shape (bytes,)."""

    def __init__(
        self,
        stage: LocalStage,
        keys: Sequence[int],
        rows: Sequence[Tensor],
        first: int = 0,
        sliced_from: StageGradBuffer | None = None,
    ) -> None:
        """`rows`: one per key, keys ascending; they begin at byte `first` of the stage's weights.

        `sliced_from`: the buffer of all weights that the rows are slices of; None: they are not slices.
        """
        self.stage, self.first, self.sliced_from = stage, first, sliced_from
        self.keys, self.rows = list(keys), list(rows)
        self.places = {key: place for place, key in enumerate(keys)}
        self.numbers = [self.as_numbers(row) for row in rows]

    def as_numbers(self, row: Tensor) -> list[Tensor]:
        """Bytes that are laid out like a row, viewed as numbers: one tensor per type."""
        return numbers(row, self.stage.sections, self.first)

    @property
    def total(self) -> Tensor:
        """The first row, which holds the sum after `sum_rows` or ALLREDUCE."""
        return self.rows[0]

    def zero(self) -> None:
        """Set all rows to zero."""
        for row in self.rows:
            row.zero_()

    def add_rows(self, keys: Sequence[int], rows: Sequence[Sequence[Tensor]]) -> None:
        """Add a partial sum that was received; `rows`: one per key, as numbers."""
        places = [0] if len(self.keys) == 1 else [self.places[key] for key in keys]
        for place, row in zip(places, rows, strict=True):
            add(self.numbers[place], row)

    def slices_adder(self, buffer: StageGradBuffer, span: slice) -> Callable[[], None]:
        """An act that adds the rank's own sums to this shard: the slice `span` of every row of `buffer`."""
        pairs = [
            (self.numbers[self.places[key]], self.as_numbers(row))
            for key, row in zip(buffer.keys, buffer.data[:, span], strict=True)
            if key in self.places  # rows with other keys belong to sums that the rank only passes on
        ]

        def act() -> None:
            for total, row in pairs:
                add(total, row)

        return act

    def sum_rows(self) -> None:
        """Add all rows to the first, in the order of their keys."""
        for row in self.numbers[1:]:
            add(self.numbers[0], row)

    def message(self) -> tuple[Tensor, Callable[[], None] | None]:
        """The tensor to send, shape (rows, n), or (n,) for one row, and an act that packs it; None: no packing."""
        if len(self.rows) == 1:
            return self.rows[0], None
        packed = self.total.new_empty((len(self.rows), len(self.total)))

        def pack() -> None:
            torch.stack(self.rows, out=packed)

        return packed, pack


class StageGradBuffer(GradBuffer):
    """dw.s: rows laid out like the stage's flat weights; backwards add to them."""

    def __init__(self, stage: LocalStage, keys: Sequence[int], memory: Tensor) -> None:
        """`keys`: of the rows, ascending; `memory`: of the rows, shape (len(keys) * n,); it is not set to zero here."""
        self.data = memory.view(len(keys), stage.size)
        super().__init__(stage, keys, list(self.data))
        self.views = {key: stage.views(row) for key, row in zip(keys, self.data, strict=True)}
        self.autograd_adds_to: tuple[int, LocalStage] | None = None

    def attach(self, key: int, stage: LocalStage) -> None:
        """Make autograd add to the row of `key`; `stage`: the version of the stage whose backward runs."""
        if (key, stage) != self.autograd_adds_to:
            self.autograd_adds_to = key, stage
            for parameter, view in zip(stage.parameters, self.views[key], strict=True):
                parameter.grad = view

    def message(self) -> tuple[Tensor, Callable[[], None] | None]:
        """All rows in place, shape (rows, n)."""
        return self.data, None


class GradBuffers:
    """All grad buffers of a rank: where each lies, and which instructions set it to zero or complete it."""

    def __init__(
        self,
        header: Header,
        stages: Mapping[int, LocalStage],
        slots: MemorySlots,
        rank: int,
        others: GradBuffers | None,
    ) -> None:
        """`stages`: by number, those that this rank owns or computes or whose gradients it passes on.

        `others`: the buffers for microbatches of another shape; those outside of memory slots are shared.
        """
        self.header, self.stages, self.slots, self.rank = header, stages, slots, rank
        self.by_stage: dict[int, StageGradBuffer] = {}
        self.by_shard: dict[Unit, GradBuffer] = {}
        self.rows_claimed: set[Unit] = set()
        if others is not None:
            self.by_stage = {s: buffer for s, buffer in others.by_stage.items() if s not in slots.foreign_dw}
            shared = (None, *self.by_stage.values())
            self.by_shard = {unit: buffer for unit, buffer in others.by_shard.items() if buffer.sliced_from in shared}

    def detach(self) -> None:
        """Forget which row autograd adds to: the gradients of parameters may have been pointed elsewhere."""
        for buffer in self.by_stage.values():
            buffer.autograd_adds_to = None

    def of_stage(self, stage: int) -> StageGradBuffer:
        """The buffer dw.s."""
        if stage not in self.by_stage:
            self.by_stage[stage] = StageGradBuffer(self.stages[stage], *self.slots.gradient(self.stages[stage]))
        return self.by_stage[stage]

    def of_unit(self, unit: Unit) -> GradBuffer:
        """The buffer dw.s, or dw.s/k if the weights of the stage are divided."""
        stage, shard = self.stages[unit[0]], unit[1]
        if shard < 0:
            return self.of_stage(unit[0])
        if unit not in self.by_shard:
            keys = self.slots.keys(self.rank, *unit) or [-1]
            span = shard_spans(stage.size, self.header.gradient_units.of(unit[0]))[shard]
            if stage.owns_separate_shards and shard in stage.owned:
                rows = stage.owned[shard].new_zeros((len(keys), len(stage.owned[shard])))
                self.by_shard[unit] = GradBuffer(stage, keys, list(rows), span.start)
            else:
                buffer = self.of_stage(unit[0])
                slices = [buffer.data[buffer.places[key], span] for key in keys]
                self.by_shard[unit] = GradBuffer(stage, keys, slices, span.start, buffer)
        return self.by_shard[unit]

    def owned(self) -> dict[Unit, GradBuffer]:
        """The buffers of all units that this rank owns."""
        return {(s, shard): self.of_unit((s, shard)) for s, stage in self.stages.items() for shard in stage.owned}

    def claim_row_sums(self, units: Iterable[Unit]) -> list[GradBuffer]:
        """The buffers whose rows the caller has to sum: of units with one owner that no earlier caller has claimed.

        An ALLREDUCE sums the rows of a unit with several owners.
        """
        several, by_messages = self.header.several_owners, self.header.sums_by_messages
        summed = [unit for unit in units if by_messages or not several[unit[0]]]
        claimed = [unit for unit in summed if unit not in self.rows_claimed]
        self.rows_claimed.update(claimed)
        return [self.of_unit(unit) for unit in claimed]

    def zeroing_acts(self, instructions: Sequence[Instruction]) -> list[RowAct]:
        """Acts that run before an instruction, and zero a buffer whose sum begins there.

        Slices of the rows of all weights are set to zero together with these rows, once, and then each for itself.
        """
        acts: list[RowAct] = []
        zeroed: set[int | Unit] = set()  # stages, and units
        for row, unit in _first_additions(instructions, self.header):
            buffer = self.of_unit(unit)
            if buffer.sliced_from is None or unit in zeroed:
                acts.append((row, buffer.zero))
                continue
            if unit[0] not in zeroed:
                acts.append((row, buffer.sliced_from.zero))
            zeroed |= {unit[0], unit}
        return acts

    def completing_acts(self, instructions: Sequence[Instruction]) -> list[RowAct]:
        """Acts that run after a stage's last backward, and add its sums to an owned shard."""
        last_backward = {i.stage: row for row, i in enumerate(instructions) if i.op in (Op.BWD, Op.BWD_W)}
        acts: list[RowAct] = []
        for index, row in last_backward.items():
            stage = self.stages[index]
            for shard in stage.owned if stage.owns_separate_shards else ():
                buffer = self.of_unit((index, shard))
                acts.append((row, buffer.slices_adder(self.of_stage(index), stage.shard_spans[shard])))
        return acts


def _first_additions(instructions: Sequence[Instruction], header: Header) -> list[tuple[int, Unit]]:
    """Pairs (row, unit) where a sum begins: the first instruction that adds to a dw, and the first after each FREE."""
    adding = (Op.BWD, Op.BWD_W, Op.ADD, Op.ALLREDUCE)
    begun: set[Unit] = set()
    additions = []
    for row, i in enumerate(instructions):
        if i.op in adding and i.kind not in (Kind.T, *EXCHANGED):
            shards = (i.shard,) if i.kind == Kind.DW else header.gradient_units.of(i.stage)
            new = [(i.stage, shard) for shard in shards if (i.stage, shard) not in begun]
            begun.update(new)
            additions += [(row, unit) for unit in new]
        elif i.op == Op.FREE and i.kind == Kind.DW:
            begun.discard((i.stage, i.shard))
    return additions
