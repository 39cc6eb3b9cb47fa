"""The loss of one microbatch, or of the whole minibatch, as the core calls it.

- The backward of a microbatch's loss starts from the microbatch's share of the minibatch, usually 1 / (microbatches of
  a step), so that the gradients of a step add up to the gradient of the mean loss. With weight versions it starts from
  1, because STEP divides by the number of microbatches in an update.
- A loss of the whole minibatch, such as a contrastive loss, takes the outputs of all microbatches together. The last
  stage's forwards collect them. The first backward computes the loss and its gradient with respect to all outputs, from
  which the backwards start. Ranks that compute the last stage exchange their outputs there, and compute the same loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from mpirun.comm.fail_together import refuse
from mpirun.data.microbatches import Microbatch, joined, one_per_sample
from mpirun.data.values import to_device
from mpirun.engine.core.context import Score
from mpirun.engine.core.stage import LocalStage
from mpirun.model.contract import Model
from mpirun.model.loss import autocast, loss_and_metrics, loss_input, without_padding
from mpirun.model.rng import LOSS, generator_states
from schedgen.ir.header import Header
from schedgen.ir.instructions import F, Instruction, Kind, Op
from schedgen.util.errors import UsageError

Parts = dict[int, tuple[Any, Any, int]]  # by microbatch: outputs, target, samples
Exchange = Callable[[Parts], list[Parts]]
TAG = 1  # of the outputs that ranks exchange


def score(function: Callable[[Any, Any], Any], stage: LocalStage, i: Instruction) -> Score:
    """A function that computes the loss of a microbatch and its metrics, after the forward `i` of the last stage."""
    rng, draws = stage.layer_rng, None

    def loss_of(batch: Microbatch, metrics: dict[str, Tensor], outputs: list[Tensor]) -> Tensor:
        nonlocal draws
        if draws is not False:
            rng.begin(LOSS)
        before = generator_states() if draws is None else []
        loss, returned = loss_and_metrics(function, loss_input(outputs), batch)
        if not loss.requires_grad:
            raise ValueError("the loss has no gradient: it depends on no parameter")
        if draws is None and (batch.padding < batch.size or not batch.size):  # the first loss shows whether all do
            draws = not all(map(torch.equal, before, generator_states()))
        metrics |= returned
        return loss

    return loss_of


def check_minibatch_loss(header: Header) -> None:
    """UsageError unless the outputs of all microbatches of a step can be taken together."""
    if not header.has_flush:
        raise UsageError("the model's loss is of the whole minibatch, and this schedule updates weights before its end")
    last = header.compute[:, -1]
    if (last != last[0]).any():
        raise UsageError(
            "the model's loss is of the whole minibatch: the last stage's backwards must be where its forwards are"
        )


def check_forwards_first(comm: MPI.Intracomm, header: Header, instructions: Sequence[Instruction]) -> None:
    """Stop if a rank has forwards of the last stage behind its first backward of it. Collective.

    If several ranks compute the last stage they wait there for one another: no forward may need what comes later.
    """
    several, end = len(minibatch_ranks(header)) > 1, header.stages - 1
    of_end = [(row, i.op) for row, i in enumerate(instructions) if several or i.stage == end]
    begin = next((row for row, op in of_end if op in (Op.BWD, Op.BWD_I)), len(instructions))
    late = any(op == Op.FWD and row > begin for row, op in of_end)
    if several:
        used = {i.stage: row for row, i in enumerate(instructions) if i.op == Op.FWD}  # weights by the last of these
        sent = Counter((i.to, i.kind, i.stage, i.mb, i.piece) for i in instructions[:begin] if i.op == Op.SEND)
        fetched = [i for row, i in enumerate(instructions) if i.op == Op.FETCH_W and row < used.get(i.stage, 0)]
        needed = Counter((i.source, int(Kind.W), i.stage, i.mb, i.piece) for i in fetched)
        needed.update((i.source, *i[1:5]) for i in instructions if i.op == Op.RECV and i.kind == Kind.X)
        by_rank = comm.allgather((sent, needed))
        late = late or any(count > by_rank[source][0][comm.rank, *what] for (source, *what), count in needed.items())
    refuse(
        comm, late, "the model's loss is of the whole minibatch: the last stage's forwards must all come before its "
        'first backward, as in gpipe, or in ddp with n="breadth-first"',
    )  # fmt: skip


def minibatch_ranks(header: Header) -> list[int]:
    """The ranks that compute the last stage."""
    return sorted({*header.compute[F, -1].tolist()})


def exchange_among(comm: MPI.Intracomm, ranks: Sequence[int]) -> Exchange:
    """A function that gives each of these ranks what the others give; it is called by all of them."""
    others = [rank for rank in ranks if rank != comm.rank]

    def exchange(own: Parts) -> list[Parts]:
        sent = tree_map_only(Tensor, lambda x: x.detach().cpu(), own)
        requests = [comm.isend(sent, dest=rank, tag=TAG) for rank in others]
        received = [comm.recv(source=rank, tag=TAG) for rank in others]
        for request in requests:
            request.wait()
        return received

    return exchange if others else lambda own: []


class MinibatchLoss:
    """A step's loss, computed from the outputs of all its microbatches, which several ranks may have."""

    def __init__(
        self,
        model: Model,
        device: torch.device,
        autocast_dtype: torch.dtype | None,
        seed: Callable[[], None] = lambda: None,
        exchange: Exchange = lambda own: [],
    ) -> None:
        """`seed`: called before the loss; `exchange`: gives the parts of the other ranks."""
        self.model, self.device, self.autocast_dtype = model, device, autocast_dtype
        self.seed, self.exchange = seed, exchange
        self.collected: dict[int, tuple[list[Tensor], Microbatch]] = {}  # by number: outputs, and all but the input
        self.computed: tuple[Tensor, dict[str, Tensor]] | None = None

    def forget(self) -> None:
        """Drop what is collected."""
        self.collected.clear()
        self.computed = None

    def add_outputs(self, number: int, outputs: Sequence[Tensor], batch: Microbatch) -> None:
        """Collect a microbatch's outputs."""
        leaves = [x.detach().requires_grad_(x.is_floating_point() or x.is_complex()) for x in outputs]
        self.collected[number] = leaves, batch._replace(leaves=[])

    def loss(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of all that is collected on all ranks, without padding, and its metrics; UsageError as for losses.

        The same on all ranks that compute the last stage, which all call this.
        """
        own = self._own()
        parts = {number: part for of_rank in self.exchange(own) for number, part in of_rank.items()}
        parts = to_device(parts, self.device) | own
        outputs, targets, sizes = zip(*(parts[number] for number in sorted(parts)), strict=True)
        _, spec = tree_flatten(targets[0], is_leaf=one_per_sample(sizes[0]))
        leaves = zip(*(spec.flatten_up_to(target) for target in targets), strict=True)
        target = tree_unflatten(map(joined, leaves), spec)  # a leaf that is not by sample is taken once
        self.seed()
        with autocast(self.device.type, self.autocast_dtype):
            output = loss_input(list(map(joined, zip(*outputs, strict=True))))
            return loss_and_metrics(self.model.loss, output, Microbatch([], target, 1.0))

    def take(self, number: int) -> tuple[list[Tensor | None], Tensor, dict[str, Tensor]]:
        """The gradients of a microbatch's outputs, the loss and its metrics; all outputs have been collected."""
        if self.computed is None:
            with torch.enable_grad():
                loss, metrics = self.loss()
            if loss.requires_grad:
                loss.backward()
            elif self._own():
                raise UsageError("the loss has no gradient: it depends on no parameter")
            self.computed = loss.detach(), metrics
        loss, metrics = self.computed
        outputs, _ = self.collected.pop(number)
        if not self.collected:
            self.forget()
        return [leaf.grad for leaf in outputs], loss, metrics

    def _own(self) -> Parts:
        """Outputs, target and number of samples of each microbatch that has some, without padding."""
        parts: Parts = {}
        for number, (outputs, batch) in self.collected.items():
            if not batch.padding:
                parts[number] = outputs, batch.target, batch.size
            elif batch.padding < batch.size:
                target = without_padding("target", batch.target, batch)
                parts[number] = without_padding("output", outputs, batch), target, batch.size - batch.padding
        return parts
