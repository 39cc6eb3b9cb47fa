"""FWD, BWD and their parts: each prepared once, as a function without arguments that knows its operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpirun.backward import WeightHalf
from mpirun.buffers import Buffers
from mpirun.gradient import Gradient
from mpirun.memory import Memory
from mpirun.model import microbatch
from mpirun.stage import Saved, Stage
from mpirun.training import Training
from mpirun.versions import Versions
from schedgen.program import Header, Instruction, Kind, Op

Act = Callable[[], None]


class Job:
    """What a forward, or the first half of a backward, leaves for later."""

    __slots__ = ("half", "saved")
    saved: Saved
    half: WeightHalf | None


class Compute:
    def __init__(
        self,
        header: Header,
        instructions: Sequence[Instruction],
        stages: dict[int, Stage],
        versions: Versions,
        buffers: Buffers,
        gradient: Callable[[int], Gradient],
        memory: Memory,
        training: Training,
    ) -> None:
        self.header, self.stages, self.buffers, self.gradient, self.memory = header, stages, buffers, gradient, memory
        self.of, self.versions = training, versions
        self.now, self.walk = 0, 0  # the step being executed, and how often it has been through the list
        self.jobs: dict[tuple[int, int], Job] = {}
        self.batches: dict[int, tuple[Tensor, Tensor]] = {}
        self.readers: dict[int, object] = {}  # of each microbatch: the last to read it
        self.one: Tensor | None = None
        self.losses: dict[int, Tensor] = {}  # by microbatch
        self.saves = {(i.stage, i.mb) for i in instructions if i.op in (Op.BWD, Op.BWD_I)}
        self.saves -= {(i.stage, i.mb) for i in instructions if i.op == Op.RECOMPUTE}

    def fwd(self, i: Instruction) -> Act:
        output, forward = self.buffers(Kind.X, i.stage, i.mb), self._forward(i, (i.stage, i.mb) in self.saves)

        def act() -> None:
            output.value = forward()

        return act

    def recompute(self, i: Instruction) -> Act:
        forward = self._forward(i, save=True)

        def act() -> None:
            forward()

        return act

    def _forward(self, i: Instruction, save: bool) -> Callable[[], Tensor]:
        stage, weights, job, mb = self._stage(i), self.buffers(Kind.W, i.stage), self._job(i), i.mb
        inputs = [self.buffers(Kind.X, producer, mb) for producer in self.header.producers[i.stage]]
        read = None if inputs else self._reader(mb, save)
        finish = None if self.header.consumers[i.stage] else self._scaled_loss(i, save)
        ready = self.buffers.ready

        def forward() -> Tensor:
            ready(weights)
            given = [ready(x) for x in inputs] if read is None else [read()[0]]
            stage.draws.at = (self.of.seed, self.now, self.walk * self.header.microbatches + mb)
            output, saved = stage.forward(given, finish, save)
            if saved is not None:
                job.saved = saved
            return output

        return forward

    def _scaled_loss(self, i: Instruction, save: bool) -> Callable[[Tensor], Tensor]:
        """The microbatch's share of the loss: its gradients then add up to the mean's, but to updates of their own."""
        read, mb = self._reader(i.mb, save), i.mb
        parts = 1 if self.header.versions else self.header.microbatches * self.of.walks

        def finish(output: Tensor) -> Tensor:
            loss = self.of.model.loss(output, read()[1]).reshape(())
            if i.op == Op.FWD and i.stage == self.header.shards(i.stage)[0]:  # the others have the same
                self.losses[mb] = loss.detach()
            return loss / parts

        return finish

    def _reader(self, mb: int, save: bool) -> Callable[[], tuple[Tensor, Tensor]]:
        """What reads (input, target) of a microbatch: made for the first reader, forgotten after the last.

        A forward that saves nothing for its backward does not save them either.
        """
        me = self.readers[mb] = object()

        def read() -> tuple[Tensor, Tensor]:
            if mb not in self.batches:
                number = self.walk * self.header.microbatches + mb
                device = self.of.device.torch
                x, y = microbatch(self.of.model, self.of.text, self.of.seed, self.now, number)
                self.batches[mb] = (x.to(device, non_blocking=True), y.to(device, non_blocking=True))
            last = not save or self.readers[mb] is me
            return self.batches.pop(mb) if last else self.batches[mb]

        return read

    def _stage(self, i: Instruction) -> Stage:
        """With the version of its weights that the instruction names."""
        return self.versions.at(i.stage, i.peer) if i.peer >= 0 else self.stages[i.stage]

    def _job(self, i: Instruction) -> Job:
        return self.jobs.setdefault((i.stage, i.mb), Job())

    def bwd(self, i: Instruction) -> Act:
        stage, job, weights = self._stage(i), self._job(i), self.buffers(Kind.W, i.stage)
        incoming, outgoing, ready = self._incoming(i), self._outgoing(i), self.buffers.ready
        gradient, key = self.gradient(i.stage), self.memory.row(i.mb)

        def act() -> None:
            given, saved = incoming(), job.saved
            ready(weights)
            gradient.use(key, stage)
            stage.backward(saved, given)
            del job.saved
            outgoing(saved)

        return act

    def bwd_i(self, i: Instruction) -> Act:
        stage, job, weights = self._stage(i), self._job(i), self.buffers(Kind.W, i.stage)
        incoming, outgoing, ready = self._incoming(i), self._outgoing(i), self.buffers.ready

        def act() -> None:
            given, saved = incoming(), job.saved
            ready(weights)
            job.half = stage.backward_input(saved, given)
            del job.saved
            outgoing(saved)

        return act

    def bwd_w(self, i: Instruction) -> Act:
        stage, job, weights = self._stage(i), self._job(i), self.buffers(Kind.W, i.stage)
        gradient, key, ready = self.gradient(i.stage), self.memory.row(i.mb), self.buffers.ready

        def act() -> None:
            ready(weights)
            gradient.add(key, stage.backward_weight(job.half))
            del job.half

        return act

    def _incoming(self, i: Instruction) -> Callable[[], Tensor]:
        """The gradient of the stage's output: its consumers' shares added in their order."""
        consumers = self.header.consumers[i.stage]
        if not consumers:  # of the loss with respect to itself
            one = self.one = torch.ones((), device=self.of.device.torch) if self.one is None else self.one
            return lambda: one
        shares = [self.buffers(Kind.G, i.stage, i.mb, self.header.share(i.stage, c)) for c in consumers]
        ready = self.buffers.ready
        if len(shares) == 1:
            return lambda: ready(shares[0])
        return lambda: sum((ready(share) for share in shares[1:]), ready(shares[0]))

    def _outgoing(self, i: Instruction) -> Callable[[Saved], None]:
        """What hands on the gradients of a job's inputs."""
        producers = self.header.producers[i.stage]
        shares = [self.buffers(Kind.G, p, i.mb, self.header.share(p, i.stage)) for p in producers]

        def hand_on(saved: Saved) -> None:
            for share, value in zip(shares, saved.gradients() if shares else (), strict=True):
                share.value = value

        return hand_on
