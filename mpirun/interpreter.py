"""The interpreter: one rank walks its list of instructions.

`Interpreter.table` maps every opcode to the method that executes it. Nothing
here decides anything: transfers start where the list says so, and whatever
needs an operand that is still under way waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor

from mpirun.backward import WeightHalf
from mpirun.gradient import Gradient
from mpirun.model import Model, Shape, microbatch
from mpirun.optimizer import Optimizer, share, whole_norm
from mpirun.stage import Saved, Stage
from mpirun.transport import Sum, Transport
from schedgen.program import Header, Instruction, Kind, Op

Key = tuple[int, int, int, int]  # kind, stage, microbatch, consumer: a buffer's name


def weight_key(stage: int) -> Key:
    return (Kind.W, stage, -1, -1)


class Result(NamedTuple):
    """What a step leaves behind: the same on all ranks."""

    losses: list[float]  # by microbatch
    grad_norm: float


class Interpreter:
    def __init__(
        self,
        header: Header,
        instructions: Sequence[Instruction],
        stages: dict[int, Stage],
        shapes: Sequence[Shape],
        transport: Transport,
        model: Model,
        text: Tensor,
        seed: int,
        optimizer: Optimizer,
        canonical: bool,
    ) -> None:
        self.header, self.stages, self.shapes, self.transport = header, stages, shapes, transport
        self.model, self.text, self.seed, self.optimizer = model, text, seed, optimizer
        self.rank = transport.comm.rank
        self.canonical = canonical
        self.table: dict[int, Callable[[Instruction], None]] = {
            Op.FETCH_W: self.fetch_w,
            Op.RECV: self.recv,
            Op.SEND: self.send,
            Op.FWD: self.fwd,
            Op.BWD: self.bwd,
            Op.BWD_I: self.bwd_i,
            Op.BWD_W: self.bwd_w,
            Op.RECOMPUTE: self.recompute,
            Op.ADD: self.add,
            Op.ALLREDUCE: self.allreduce,
            Op.NORM: self.norm,
            Op.STEP: self.step,
            Op.FREE: self.free,
        }
        self.code = [(self.table[instruction.op], instruction) for instruction in instructions]
        self.saves = {(i.stage, i.mb) for i in instructions if i.op in (Op.BWD, Op.BWD_I)}
        self.saves -= {(i.stage, i.mb) for i in instructions if i.op == Op.RECOMPUTE}
        self.keys = self._row_keys(instructions)
        self.now = 0  # the step being executed
        self.running = False
        self.at = 0  # the instruction being executed, for error messages
        self.values: dict[Key, Tensor] = {}
        self.saved: dict[tuple[int, int], Saved] = {}
        self.halves: dict[tuple[int, int], WeightHalf | None] = {}  # of backwards whose BWD_W is still to come
        self.gradients: dict[int, Gradient] = {}
        self.partials: dict[tuple[int, int], Tensor] = {}  # received dw by (stage, sender)
        self.sums: dict[int, Sum] = {}  # reductions under way, by stage
        self.arriving: dict[Any, MPI.Request] = {}
        self.leaving: dict[Key, list[tuple[MPI.Request, Tensor]]] = {}
        self.losses: dict[int, Tensor] = {}
        self.result = Result([], 0.0)
        self.observe: Callable[[dict[int, Tensor]], None] = lambda totals: None  # --verify looks on
        self.totals: dict[int, Tensor] = {}  # the whole gradient of each owned stage, before clipping

    def _row_keys(self, instructions: Sequence[Instruction]) -> dict[tuple[int, int], list[int]]:
        """The rows of dw.s that each rank has once it has added all it receives, by (rank, stage).

        In canonical mode a row a microbatch; otherwise one row, its key the rank.
        """
        own: dict[int, list[int]] = {}
        for i in instructions:
            if i.op in (Op.BWD, Op.BWD_W):
                own.setdefault(i.stage, []).append(i.mb)
        adds = [(i.stage, i.peer) for i in instructions if i.op == Op.ADD]
        parts = self.transport.comm.allgather((own, adds))

        def rows(rank: int, stage: int) -> list[int]:
            own, adds = parts[rank]
            found = own.get(stage, []) + [row for s, peer in adds if s == stage for row in rows(peer, stage)]
            return sorted(found) if self.canonical else [rank]

        return {(rank, stage): rows(rank, stage) for rank in range(len(parts)) for stage in range(self.header.stages)}

    def run(self, step: int) -> Result:
        """Execute the list once."""
        self.now, self.running = step, True
        self.losses.clear()
        for self.at, (method, instruction) in enumerate(self.code):  # noqa: B020
            method(instruction)
        self.running = False
        return self.result

    # Messages

    def fetch_w(self, i: Instruction) -> None:
        weights = self.stages[i.stage].acquire()
        self.arriving[weight_key(i.stage)] = self.transport.receive(weights, i.peer, Kind.W)

    def recv(self, i: Instruction) -> None:
        if i.kind == Kind.DW:
            stage = self.stages[i.stage]
            rows = torch.empty((len(self.keys[i.peer, i.stage]), stage.size), dtype=stage.dtype)
            self.partials[i.stage, i.peer] = rows
            self.arriving[i.stage, i.peer] = self.transport.receive(rows, i.peer, i.kind)
        else:
            shape = self.shapes[i.stage]
            value = self.values[i[1:5]] = torch.empty(shape.size, dtype=shape.dtype)
            self.arriving[i[1:5]] = self.transport.receive(value, i.peer, i.kind)

    def send(self, i: Instruction) -> None:
        if i.kind == Kind.W:
            value = self.weights(i.stage).weights
        elif i.kind == Kind.DW:
            value = self.gradients[i.stage].packed(self.keys[self.rank, i.stage])
        else:
            value = self.get(i[1:5])
        self.leaving.setdefault(i[1:5], []).append((self.transport.send(value, i.peer, i.kind), value))

    def get(self, key: Key) -> Tensor:
        """The value of a buffer, once it is there."""
        if key in self.arriving:
            self.arriving.pop(key).Wait()
        return self.values[key]

    def weights(self, stage: int) -> Stage:
        """A stage whose weights are there."""
        if weight_key(stage) in self.arriving:
            self.arriving.pop(weight_key(stage)).Wait()
        return self.stages[stage]

    def sent(self, key: Key) -> None:
        """Wait until a buffer has left for everyone it was sent to."""
        for request, _ in self.leaving.pop(key, ()):
            request.Wait()

    # Compute

    def fwd(self, i: Instruction) -> None:
        self.values[Kind.X, i.stage, i.mb, -1] = self.forward(i, (i.stage, i.mb) in self.saves)

    def recompute(self, i: Instruction) -> None:
        self.forward(i, save=True)

    def forward(self, i: Instruction, save: bool) -> Tensor:
        producers = self.header.producers[i.stage]
        inputs = [self.get((Kind.X, producer, i.mb, -1)) for producer in producers] or [self.data(i.mb)[0]]
        finish = None if self.header.consumers[i.stage] else lambda output: self.scaled_loss(output, i)
        output, saved = self.weights(i.stage).forward(inputs, finish, save)
        if saved is not None:
            self.saved[i.stage, i.mb] = saved
        return output

    def scaled_loss(self, output: Tensor, i: Instruction) -> Tensor:
        """The microbatch's share of the loss: its gradients then add up to the mean's."""
        loss = self.model.loss(output, self.data(i.mb)[1])
        if i.op == Op.FWD:
            self.losses[i.mb] = loss.detach()
        return loss.reshape(()) / self.header.microbatches

    def data(self, mb: int) -> tuple[Tensor, Tensor]:
        return microbatch(self.model, self.text, self.seed, self.now, mb)

    def bwd(self, i: Instruction) -> None:
        gradient, stage = self.incoming(i), self.weights(i.stage)
        inputs, grads = stage.backward(self.saved.pop((i.stage, i.mb)), gradient)
        self.outgoing(i, inputs)
        self.gradient(i.stage).add_grads(self.row(i), grads)

    def bwd_i(self, i: Instruction) -> None:
        gradient, stage = self.incoming(i), self.weights(i.stage)
        inputs, self.halves[i.stage, i.mb] = stage.backward_input(self.saved.pop((i.stage, i.mb)), gradient)
        self.outgoing(i, inputs)

    def bwd_w(self, i: Instruction) -> None:
        grads = self.weights(i.stage).backward_weight(self.halves.pop((i.stage, i.mb)))
        self.gradient(i.stage).add_grads(self.row(i), grads)

    def incoming(self, i: Instruction) -> Tensor:
        """The gradient of the stage's output: its consumers' shares added in their order."""
        consumers = self.header.consumers[i.stage]
        if not consumers:
            return torch.ones(())  # of the loss with respect to itself
        shares = [self.get((Kind.G, i.stage, i.mb, self.header.share(i.stage, c))) for c in consumers]
        return shares[0] if len(shares) == 1 else sum(shares[1:], shares[0])

    def outgoing(self, i: Instruction, inputs: Sequence[Tensor]) -> None:
        for producer, value in zip(self.header.producers[i.stage], inputs, strict=False):
            self.values[Kind.G, producer, i.mb, self.header.share(producer, i.stage)] = value

    def row(self, i: Instruction) -> int:
        """The row of dw that a backward adds to."""
        return i.mb if self.canonical else self.rank

    # Sums and the end of the step

    def gradient(self, stage: int) -> Gradient:
        if stage not in self.gradients:
            self.gradients[stage] = Gradient(self.stages[stage])
        return self.gradients[stage]

    def add(self, i: Instruction) -> None:
        self.arriving.pop((i.stage, i.peer)).Wait()
        keys = self.keys[i.peer, i.stage] if self.canonical else [self.rank]
        self.gradient(i.stage).add_rows(keys, self.partials.pop((i.stage, i.peer)))

    def allreduce(self, i: Instruction) -> None:
        keys = [self.keys[rank, i.stage] for rank in self.header.groups[i.peer]]
        gradient = self.gradient(i.stage)
        mine = [gradient.row(key) for key in self.keys[self.rank, i.stage]]
        self.sums[i.stage] = Sum(self.transport.group(i.peer), mine, keys, like=self.stages[i.stage].weights)

    def norm(self, i: Instruction) -> None:
        for stage, owners in enumerate(self.header.owners):
            if self.rank in owners:
                self.totals[stage] = (
                    self.sums.pop(stage).finish() if stage in self.sums else self.gradients[stage].total()
                )
        # Places: the norm of every parameter in the order of the model, then the loss of every microbatch.
        mine: dict[int, float] = {}
        place = 0
        for stage, shape in enumerate(self.shapes):
            if self.header.owners[stage][0] == self.rank:
                mine |= dict(enumerate(self.optimizer.norms(stage, self.totals[stage]), start=place))
            place += shape.parameters
        mine |= {place + mb: float(loss) for mb, loss in self.losses.items()}
        known = share(self.transport.group(i.peer), place + self.header.microbatches, mine)
        self.result = Result(known[place:], whole_norm(known[:place]))
        self.observe(self.totals)

    def step(self, i: Instruction) -> None:
        self.sent(weight_key(i.stage))
        self.optimizer.step(i.stage, self.totals[i.stage], self.result.grad_norm)

    def free(self, i: Instruction) -> None:
        key = i[1:5]
        self.sent(key)
        if key in self.arriving:  # received, but never used
            self.arriving.pop(key).Wait()
        if i.kind == Kind.W:
            self.stages[i.stage].release()
        elif i.kind == Kind.DW:
            self.gradients.pop(i.stage, None)
            self.totals.pop(i.stage, None)
        else:
            del self.values[key]
