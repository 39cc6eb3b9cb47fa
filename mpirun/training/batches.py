"""The microbatches of the steps that a script gives, as the engine reads them: by step and number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpirun.data.chunks import chunk, sample_count
from mpirun.data.loader import Batch
from mpirun.data.microbatches import Microbatch, MicrobatchSource, copy_of, plain
from mpirun.model.contract import Model, Pair
from mpirun.model.dataflow import Input
from schedgen.ir.header import Header
from schedgen.ir.instructions import Instruction, Op
from schedgen.util.errors import UsageError


class StepBatches(MicrobatchSource):
    """The microbatches of a script's steps: those of the current step, and those kept or made again."""

    def __init__(self, example: Microbatch, count: int) -> None:
        """`example`: what a microbatch looks like; `count`: microbatches of a step."""
        self.example, self.count = example, count
        self.step = -1
        self.current: Mapping[int, Microbatch] = {}
        self.kept: dict[int, Batch] = {}  # by step; of a loader's batch only its place: the loader can make it again

    def give(self, step: int, batch: Batch, keep: bool = False) -> None:
        """Set the batch of a step; `keep`: it will be needed after the step, too."""
        self.step, self.current = step, batch.microbatches
        if keep:  # copies: the script may change the tensors of its batch after the step
            copies = copy_of(dict(batch.microbatches)) if batch.loader is None else {}
            self.kept[step] = batch._replace(microbatches=copies)

    def __call__(self, step: int, number: int) -> Microbatch:
        """A microbatch of the current step, or of one that was kept; UsageError if it cannot be made again."""
        if step == self.step and number in self.current:
            return self.current[number]
        if self.step < 0:  # a loss of the whole minibatch is tried before the first batch is given
            return self.example
        batch = self.kept[step]
        if batch.loader is None:
            return batch.microbatches[number]
        return batch.loader.microbatch(batch.epoch, batch.number, number)

    def examples(self) -> list[Microbatch]:
        """All microbatches have the size of the example."""
        return [self.example]


def read_by(rank_list: Sequence[Instruction], header: Header, model: Model, passes: int) -> list[int]:
    """The microbatches of a step that a rank reads, in the order of its list; `model`: with tensor shards.

    Inputs are read by stages with an `Input`, targets by the last stage.
    """
    reads_input = [
        any(isinstance(source, Input) for source in model.reads[stage])
        if model.reads is not None
        else not header.graph.producers[stage]
        for stage in range(header.stages)
    ]
    numbers = dict.fromkeys(
        i.mb
        for i in rank_list
        if i.op in (Op.FWD, Op.RECOMPUTE) and (reads_input[i.stage] or not header.graph.consumers[i.stage])
    )
    return [number * header.microbatches + mb for number in range(passes) for mb in numbers]


def whole_batch(data: Any, count: int, pair: Pair) -> Batch:
    """A minibatch that every rank has as a whole, cut into `count` microbatches. UsageError if it cannot be cut."""
    data = plain(data)
    samples = sample_count(data)
    if samples % count:
        raise UsageError(f"a batch of {samples} samples cannot be cut into {count} microbatches of one size")
    size = samples // count
    pairs = (pair(part) for part in chunk(data, count))
    microbatches = {
        number: Microbatch(list(leaves), target, float(count), size) for number, (leaves, target) in enumerate(pairs)
    }
    return Batch(0, 0, [size] * count, microbatches)
