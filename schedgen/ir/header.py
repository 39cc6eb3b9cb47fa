"""The header of a schedule: everything but its instructions.

Each feature of a schedule is a value with its own methods: `graph`, `weight_shards`, `weight_versions`,
`tensor_parallel`. The header itself has the queries that most callers need: which of the model's stages a stage is,
which ranks own a unit of weights, whether there is a flush.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from schedgen.ir.instructions import DIRECTIONS
from schedgen.ir.stage_graph import StageGraph
from schedgen.ir.tensor_parallel import TensorParallel
from schedgen.ir.weights import FLUSH, WeightShards, WeightVersions
from schedgen.util.arrays import Flags, Ints

_Stage = TypeVar("_Stage", int, Ints)  # one stage, or an array of them


def owners_of(weights: Ints) -> tuple[tuple[int, ...], ...]:
    """By stage, every worker that `weights` names, ascending; its shape: (directions, stages, microbatches)."""
    return tuple(tuple(np.unique(weights[:, s]).tolist()) for s in range(weights.shape[1]))


@dataclass(frozen=True, eq=False)
class Header:
    """Everything in a schedule but its instructions.

    `compute` and `weights` are the two workers that w gives for every job, shape
    (directions, stages, microbatches). In a list of forwards alone `compute` has
    only direction F; `weights` has others, too, if they name owners that F does not.
    """

    scheme: Mapping[str, Any]  # name, workers, stages, microbatches, then the scheme's own: numbers, words, lists
    mode: str  # "greedy" or "strict": what n means
    n: str  # name of the order
    cost: Mapping[str, float]  # duration of each direction, by which the jobs were ordered
    # weight_slots, fan_out, prefetch, recompute, and memory_limit if there is one: `compiler.options`;
    # updates, one of UPDATES, unless flush; accumulated with 2bw; sums, how owners sum gradients, unless by ALLREDUCE
    lowering: Mapping[str, Any]
    graph: StageGraph
    groups: tuple[tuple[int, ...], ...]  # the sets of ranks that collectives name, each once
    compute: Ints
    weights: Ints
    generator: str
    tied: tuple[tuple[int, ...], ...] = ()  # stages that share parameters: each tie has 2 or more, ascending
    shard_owners: tuple[tuple[int, ...], ...] = ()  # by stage, the owner of each shard of its weights; empty: no shards
    tensor_parallel: TensorParallel = TensorParallel(1, (), 0)  # noqa: RUF009  frozen
    parts: tuple[int, ...] = ()  # by stage, the parts in which its owners sum its gradient; empty: none is cut

    @property
    def workers(self) -> int:
        """W, the number of ranks."""
        return int(self.scheme["workers"])

    @property
    def stages(self) -> int:
        """S, the stages of the schedule: T for each stage of the model if it is tensor-parallel."""
        return int(self.scheme["stages"])

    @property
    def microbatches(self) -> int:
        """B, the microbatches of a step."""
        return int(self.scheme["microbatches"])

    @property
    def directions(self) -> tuple[str, ...]:
        """F and B, or F, I and W if the backward is split; F alone in a list of forwards."""
        return DIRECTIONS[len(self.compute)]

    @property
    def is_forward(self) -> bool:
        """Whether the list has forwards alone: it evaluates or predicts, and trains nothing."""
        return len(self.compute) == 1

    @property
    def model_stages(self) -> int:
        """The number of stages of the model: `stages` divided by the slices of each."""
        return self.stages // self.tensor_parallel.degree

    def model_stage(self, stage: _Stage) -> _Stage:
        """The model's stage that `stage` is, or is a slice of; elementwise for an array."""
        return stage // self.tensor_parallel.degree

    @property
    def first_slices(self) -> range:
        """By stage of the model, the stage that is its first slice, or the whole of it."""
        return range(0, self.stages, self.tensor_parallel.degree)

    def is_first_slice(self, stage: int) -> bool:
        """Whether a stage is the first slice of the model's, or the whole of it."""
        return stage in self.first_slices

    @cached_property
    def model_graph(self) -> StageGraph:
        """The stage graph of the model."""
        edges = {(self.model_stage(producer), self.model_stage(consumer)) for producer, consumer in self.graph.edges}
        per_consumer = {self.model_stage(stage) for stage in self.graph.per_consumer}
        return StageGraph(self.model_stages, tuple(sorted(edges)), tuple(sorted(per_consumer)))

    def sharers(self, tie: int) -> tuple[int, ...]:
        """The owners of the stages of a tie, ascending: the ranks that enter its ALLREDUCE."""
        return tuple(sorted({rank for stage in self.tied[tie] for rank in self.owners[stage]}))

    @property
    def model_ties(self) -> tuple[tuple[int, ...], ...]:
        """The ties between stages of the model, in the form of `tied`; ties of one stage's slices are left out."""
        ties = {tuple(sorted({self.model_stage(stage) for stage in tie})) for tie in self.tied}
        return tuple(sorted(tie for tie in ties if len(tie) > 1))

    def ties_slices(self, tie: int) -> bool:
        """Whether a tie joins the slices of one stage, which share the parameters that are not cut."""
        stages = self.tied[tie]
        return bool(self.tensor_parallel) and stages == tuple(self.tensor_parallel.slices_of(stages[0]))

    @cached_property
    def owners(self) -> tuple[tuple[int, ...], ...]:
        """By stage, every worker that w_weights names, ascending; for a divided stage, the owners of its shards."""
        if self.shard_owners:
            return tuple(tuple(sorted(set(ranks))) for ranks in self.shard_owners)
        return owners_of(self.weights)

    @cached_property
    def group_numbers(self) -> dict[tuple[int, ...], int]:
        """By the ranks of a collective, their index in `groups`."""
        return {ranks: number for number, ranks in enumerate(self.groups)}

    @cached_property
    def several_owners(self) -> tuple[bool, ...]:
        """By stage, whether several ranks own all of its weights, and so sum its gradients among themselves."""
        return tuple(not self.shard_owners and len(ranks) > 1 for ranks in self.owners)

    @property
    def sums_by_messages(self) -> bool:
        """Whether owners of a stage sum its gradients by SEND, RECV and ADD, and not by an ALLREDUCE."""
        return "sums" in self.lowering

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the state of optimizers lives in the memory of the host, and comes to the device for each STEP."""
        return "offload_optimizer" in self.lowering

    @cached_property
    def weight_shards(self) -> WeightShards:
        """The shards that weights are divided into, and who owns each."""
        return WeightShards(self.shard_owners, self.owners)

    @cached_property
    def gradient_units(self) -> WeightShards:
        """The units that gradients are divided into: the shards of weights, or parts of what several owners sum."""
        return WeightShards(self.shard_owners, self.owners, self.parts) if self.parts else self.weight_shards

    @cached_property
    def owns_gradient(self) -> Flags:
        """Whether a rank owns a unit of gradients; shape (workers, units)."""
        return self.gradient_units.is_owner(self.workers) if self.parts else self.is_owner

    @cached_property
    def is_owner(self) -> Flags:
        """Whether a rank owns a unit (a stage, or one shard of its weights); shape (workers, units)."""
        return self.weight_shards.is_owner(self.workers)

    def units_of(self, rank: int) -> list[tuple[int, int]]:
        """The units that a rank owns, each as its stage and its shard: -1 where the stage is not divided."""
        return [unit for unit, owns in zip(self.weight_shards.units, self.is_owner[rank], strict=True) if owns]

    def is_sharded(self, stage: int) -> bool:
        """Whether the weights of a stage are divided into shards."""
        return bool(self.weight_shards.counts[stage] > 1)

    def first_owner(self, stage: int, shard: int = 0) -> int:
        """The first owner of a shard of a stage's weights, or of all of them where they are not divided."""
        return self.shard_owners[stage][shard] if self.is_sharded(stage) else self.owners[stage][0]

    @cached_property
    def weight_versions(self) -> WeightVersions:
        """When weights change, and how many versions of them there are."""
        accumulated = self.lowering.get("accumulated", 0)
        assert isinstance(accumulated, int)
        return WeightVersions(str(self.lowering.get("updates", FLUSH)), self.microbatches, self.owners, accumulated)

    @property
    def has_flush(self) -> bool:
        """Whether weights change only once per list, after all microbatches, so that they have one version."""
        return not self.weight_versions

    @property
    def stepped_together(self) -> str | None:
        """The stages, in words, that must step together, so that weights have no versions; None: there are none."""
        return "tied stages" if self.tied else "slices of stages" if self.tensor_parallel else None

    @property
    def memory_limit(self) -> int | None:
        """The most saved forwards that a rank may hold at once; None: any number."""
        limit = self.lowering.get("memory_limit")
        return limit if isinstance(limit, int) else None
