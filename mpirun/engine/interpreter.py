"""The interpreter: one rank walks its list of instructions.

`Interpreter.table` maps every opcode to the method that prepares it: before
the first step each instruction becomes a function without arguments that knows
its tensors, its requests and its peers. A step calls them in the order of the
list. Nothing here decides anything: transfers start where the list says so,
and whatever needs an operand that is still under way waits for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from mpirun.comm.ordered_allreduce import AllreduceQueue, OrderedAllreduce
from mpirun.comm.progress_thread import LONG, MessageProgress, layers
from mpirun.comm.transport import Transport
from mpirun.engine.buffers import Buffer, Buffers
from mpirun.engine.forward_backward import Act, Compute
from mpirun.engine.grad_buffers import Gradients
from mpirun.engine.grad_norm import Norms, whole_norm
from mpirun.engine.memory_slots import Memory
from mpirun.engine.optimizer import Optimizer, share
from mpirun.engine.setup import Training
from mpirun.engine.shard_allreduce import Exchanges
from mpirun.engine.stage import Stage
from mpirun.engine.tied_stages import Tie, shared
from mpirun.engine.weight_shards import Unit, first_fetches
from mpirun.engine.weight_versions import Versions
from mpirun.model.dataflow import TensorSpec
from mpirun.watchdog import NOTHING, PHASE, ROW, STEP, TRAINING
from schedgen.ir.header import Header
from schedgen.ir.instructions import COMPUTE, EXCHANGED, Instruction, Kind, Op


class Result(NamedTuple):
    """What a step leaves behind: the same on all ranks."""

    losses: list[float]  # by microbatch
    grad_norm: float
    norms: list[float]  # of every parameter's gradient, in the order of the model
    leave: bool  # some rank wants to


class Interpreter:
    def __init__(
        self,
        header: Header,
        instructions: Sequence[Instruction],
        stages: dict[int, Stage],
        memory: Memory,
        transport: Transport,
        state: memoryview,
        training: Training,
        optimizer: Optimizer,
    ) -> None:
        self.header, self.stages, self.memory, self.transport = header, stages, memory, transport
        self.rank, self.optimizer, self.walks = transport.comm.rank, optimizer, training.walks
        self.buffers, self.sums = Buffers(transport), AllreduceQueue(transport)
        self.progress = MessageProgress(transport.comm, transport.poll)
        self.partials: dict[tuple[int, int, int], Buffer] = {}  # received dw by (stage, part, sender)
        self.gradients = Gradients(header, stages, memory, self.rank)
        self.norms = Norms(header, memory.shapes, self.rank, training.canonical)
        self.copies = first_fetches(instructions)
        self.model, self.dataflows = training.model, training.dataflows
        self.versions = Versions(instructions, stages, memory, training)
        compute = Compute(header, instructions, stages, self.versions, self.buffers, self.gradients, memory, training)
        self.compute = compute
        self.reductions: dict[int, OrderedAllreduce] = {}  # by stage
        self.exchanges = Exchanges(transport, header)
        self.table: dict[int, Callable[[Instruction], Act]] = {
            Op.FETCH_W: self.fetch_w,
            Op.RECV: self.recv,
            Op.SEND: self.send,
            Op.FWD: compute.fwd,
            Op.BWD: compute.bwd,
            Op.BWD_I: compute.bwd_i,
            Op.BWD_W: compute.bwd_w,
            Op.RECOMPUTE: compute.recompute,
            Op.ADD: self.add,
            Op.ALLREDUCE: self.allreduce,
            Op.NORM: self.norm,
            Op.STEP: self.step,
            Op.FREE: self.free,
        }
        self.code: list[Act] = []
        for self.row, i in enumerate(instructions):
            self.code.append(self.table[i.op](i))
        self.computes = [(i.stage, i.op) if i.op in COMPUTE else None for i in instructions]
        for row, begin in self.gradients.begins(instructions):
            self.code[row] = _both(begin, self.code[row])
        for row, end in self.gradients.ends(instructions):
            self.code[row] = _both(self.code[row], end)
        self.state = state  # shows the step and the row being executed
        self.leave = False  # this rank wants to: all will, after the step
        self.sound = True  # all numbers of the step so far are finite
        self.result = Result([], 0.0, [], False)
        self.observe: Callable[[dict[Unit, Tensor]], None] = lambda totals: None  # --verify looks on
        self.walk_list: Callable[[], None] = self.walk  # --trace puts its own here

    def run(self, step: int) -> Result:
        """Execute the list, as often as a step goes through it."""
        self.compute.now = self.state[STEP] = step
        self.state[PHASE] = TRAINING
        losses: list[float] = []
        for self.compute.walk in range(self.walks):  # noqa: B020
            self.walk_list()
            losses += self.result.losses
        self.state[ROW] = NOTHING
        return self.result._replace(losses=losses)

    def walk(self) -> None:
        state = self.state
        for state[ROW], act in enumerate(self.code):
            act()

    def learn(self, step: int) -> Result:
        """The first step: as `run`, and runs the pump during what computes for long from then on."""
        acts = self.code
        seconds: dict[tuple[int, int], float] = {}  # by stage and opcode: the least

        def timed(act: Act, job: tuple[int, int]) -> Act:
            def run() -> None:
                waited, begin = self.transport.waited, time.perf_counter()
                act()
                spent = time.perf_counter() - begin - (self.transport.waited - waited)
                seconds[job] = min(spent, seconds.get(job, spent))

            return run

        self.code = [act if job is None else timed(act, job) for act, job in zip(acts, self.computes, strict=True)]
        result = self.run(step)
        count = {stage: len(layers(one.module)) for stage, one in self.stages.items()}
        coarse = {job for job, spent in seconds.items() if spent / count[job[0]] > LONG}
        jobs = zip(acts, self.computes, strict=True)
        self.code = [self.progress.with_thread(act) if job in coarse else act for act, job in jobs]
        for stage in {job[0] for job, spent in seconds.items() if spent > LONG and job not in coarse}:
            for one in self.versions.every(stage):
                self.progress.add_hooks(one.module)
        return result

    # Messages

    def fetch_w(self, i: Instruction) -> Act:
        stage = self.stages[i.stage]
        act = self._receive(self.buffers(Kind.W, i.stage, via=i.via), stage.weights[stage.spans[i.via]], i)
        return _both(stage.complete(), act) if self.row in self.copies and stage.own else act

    def recv(self, i: Instruction) -> Act:
        if i.kind == Kind.DW:
            buffer = self.partials[i.stage, i.via, i.peer] = Buffer()
            stage = self.stages[i.stage]
            span = stage.spans[i.via]
            shape = (len(self.memory.keys(i.peer, i.stage, i.via)), span.stop - span.start)
            value = self.memory.place(i, shape, stage.dtype)
        else:
            buffer = self.buffers(*i[1:5])
            value = self.memory.place(i, *self._like(i))
        return self._receive(buffer, value, i)

    def _like(self, i: Instruction) -> TensorSpec:
        """Of the x or g that an instruction names."""
        return self.dataflows[i.mb].bundle(i.kind, i.stage, i.via).spec

    def _receive(self, buffer: Buffer, value: Tensor, i: Instruction) -> Act:
        row = self.row
        start, done = self.transport.receive(value, i.peer, Kind.W if i.op == Op.FETCH_W else i.kind)

        def act() -> None:
            start()
            buffer.value, buffer.arriving, buffer.row = value, done, row

        return act

    def send(self, i: Instruction) -> Act:
        buffer, peer, kind, row = self.buffers(*i[1:5]), i.peer, i.kind, self.row
        prepare = None
        if kind == Kind.W:
            stage = self.stages[i.stage]
            buffer.value = stage.own[i.via] if i.via in stage.own else stage.weights[stage.spans[i.via]]
        elif kind == Kind.DW:
            buffer.value, prepare = self.gradients.part((i.stage, i.via)).message()

        def act() -> None:
            buffer.leaving.append((self.transport.send(self.buffers.ready(buffer), peer, kind), row))

        return act if prepare is None else _both(prepare, act)

    def free(self, i: Instruction) -> Act:
        buffer, keep = self.buffers(*i[1:5]), i.kind in (Kind.W, Kind.DW)

        def act() -> None:
            self.buffers.left(buffer)
            self.buffers.ready(buffer)  # received, but perhaps never used
            if not keep:
                buffer.value = None

        return act

    # Sums and the end of the step

    def add(self, i: Instruction) -> Act:
        gradient, received = self.gradients.part((i.stage, i.via)), self.partials[i.stage, i.via, i.peer]
        keys = self.memory.keys(i.peer, i.stage, i.via)

        def act() -> None:
            gradient.add_rows(keys, self.buffers.ready(received))

        return act

    def allreduce(self, i: Instruction) -> Act:
        if i.kind == Kind.T:
            return self.tie(i)
        if i.kind in EXCHANGED:
            return self.exchanges.act(i, self.buffers(*i[1:5]), self._like(i), self.memory.device)
        if i.stage not in self.reductions:
            keys = [self.memory.keys(rank, i.stage) for rank in self.header.groups[i.peer]]
            data = self.gradients(i.stage).data
            self.reductions[i.stage] = OrderedAllreduce(self.transport, self.transport.group(i.peer), data, keys)
        one = self.reductions[i.stage]

        def act() -> None:
            self.sums.start(one)

        return act

    def tie(self, i: Instruction) -> Act:
        stages = self.header.tied[i.stage]
        owned = {s: self.gradients(s) for s in stages if self.rank in self.header.owners[s]}
        names, single = shared(self.model, stages), self.gradients.single({(s, -1): one for s, one in owned.items()})
        one = Tie(self.transport, self.transport.group(i.peer), self.sums, self.header, stages, names, owned)

        def act() -> None:
            for gradient in single:
                gradient.add_up()
            if names:
                one.run()

        return act

    def norm(self, i: Instruction) -> Act:
        owned = self.gradients.owned()
        single = self.gradients.single(owned)
        totals = {unit: gradient.total for unit, gradient in owned.items()}
        group = self.transport.group(i.peer)

        def act() -> None:
            self.sums.finish()
            self.versions.go_home()
            for gradient in single:
                gradient.add_up()
            if self.walks > 1:
                self.optimizer.gather(totals, first=self.compute.walk == 0, last=self.compute.walk == self.walks - 1)
            # Places: those of norms, then the loss of every microbatch, then how many ranks want to leave.
            mine: dict[int, float] = {}
            for unit, total in totals.items():
                mine |= self.norms.told(unit, self.stages[unit[0]], total)
            place = self.norms.length
            mine |= {place + mb: float(loss) for mb, loss in self.compute.losses.items()}
            self.compute.losses.clear()
            leave = place + self.header.microbatches
            mine[leave] = float(self.leave)
            known = share(self.transport, group, leave + 1, mine)
            norms = self.norms.known(known[:place])
            self.result = Result(known[place:leave], whole_norm(norms), norms, known[leave] > 0)
            self.sound = (self.sound or self.compute.walk == 0) and all(map(math.isfinite, known))
            if self.compute.walk == self.walks - 1 and self.sound:
                self.observe(totals)

        return act

    def step(self, i: Instruction) -> Act:
        if i.peer >= 0:
            return self.step_to_version(i)
        unit = i.stage, i.via
        weights, gradient = self.buffers(Kind.W, i.stage, via=i.via), self.gradients.part(unit)

        def act() -> None:
            self.buffers.left(weights)
            if self.compute.walk == self.walks - 1 and self.sound:
                self.optimizer.step(unit, gradient, self.compute.now, self.result.grad_norm)

        return act

    def step_to_version(self, i: Instruction) -> Act:
        """The mean gradient of the microbatches since the last STEP makes a new version."""
        gradient, make, stage = self.gradients(i.stage), self.versions.make(i.stage, i.peer), i.stage
        size = self.header.weight_versions.round(stage)
        count = min(size, self.header.microbatches - size * (i.peer - 1))

        def act() -> None:
            self.sums.finish()
            if count > 1:
                gradient.total.div_(count)
            self.optimizer.step((stage, -1), gradient, self.compute.now, 0.0, make())

        return act


def _both(one: Act, other: Act) -> Act:
    def act() -> None:
        one()
        other()

    return act
