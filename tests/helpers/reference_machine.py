"""The reference machine: what a schedule means. This file is the definition of the format.

In: a projected program. Out: the peak number of buffers of each kind on every rank, or `CannotExecute` at the first
instruction that makes no sense. The machine executes every rank's list on symbols, one instruction after another, with
every SEND a rendezvous. It shares nothing with `effects.py`, so that the checker can be tested against it: the machine
must execute every program that the checker accepts.

A rank holds buffers by their names in the file: "x.0.3", "g.0.3.2", "w.1", "w.1@4", "w.1/2", "dw.1"; besides them
"partial", a received dw that is not added yet, "half", what BWD_I keeps for BWD_W, and "host", the copy of a "saved"
in the memory of the host. Their values are symbols. `reference_rank.py` defines these and the state of a rank.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable

from reference_rank import GONE, STEPPED, UNDER_WAY, WHOLE, CannotExecute, MustWait, Rank, Sum, Value

from schedgen.ir.instructions import EXCHANGED, FORWARD_KINDS, FORWARD_OPS, B, F, Instruction, Kind, Op, W, buffer_name
from schedgen.ir.program import Program
from schedgen.ir.weights import TWO_BUFFERS, VERTICAL

__all__ = ["HELD", "CannotExecute", "ReferenceMachine", "execute"]

# Kinds of buffers: the beginnings of their names.
HELD = ("x", "g", "w", "dw", "partial", "saved", "half", "host", "opt")


class ReferenceMachine:
    """All ranks, and the posted receives that no SEND has matched yet."""

    def __init__(self, program: Program) -> None:
        self.header = program.header
        self.ranks = [Rank(rank, program) for rank in range(self.header.workers)]
        # By (from, to, kind): the posted receives, each with the buffer's name at the sender and at the receiver.
        self.posted: defaultdict[tuple[int, int, int], deque[tuple[str, str]]] = defaultdict(deque)
        self.jobs = {(s, b) for s in range(self.header.stages) for b in range(self.header.microbatches)}
        redone = {(i.stage, i.mb) for rank in self.ranks for i in rank.list if i.op == Op.RECOMPUTE}
        self.keep_nothing = self.jobs if self.header.is_forward else redone  # forwards that save nothing
        self.forwards: Counter[tuple[int, int]] = Counter()
        # By (stage, microbatch): the version of weights that its jobs use, and the newest on its rank at the forward.
        self.uses: dict[tuple[int, int], int] = {}
        self.newest: dict[tuple[int, int], int] = {}

    def run(self) -> list[dict[str, int]]:
        """Execute all lists to their ends; return, by rank, the peak number of buffers of each kind in HELD.

        The order in which ranks advance does not matter: an instruction that can be executed stays executable.
        """
        while any(self.advance(rank) for rank in self.ranks):
            pass
        for rank in self.ranks:
            if rank.at < len(rank.list):
                raise rank.refuse("waits for ever")
        self.end()
        return [{kind: rank.most[kind] for kind in HELD} for rank in self.ranks]

    def advance(self, rank: Rank) -> bool:
        """Execute a rank's list until it has to wait; return whether the rank advanced."""
        begin = rank.at
        try:
            while rank.at < len(rank.list):
                i = rank.list[rank.at]
                trains = i.op not in FORWARD_OPS or i.kind not in FORWARD_KINDS
                rank.need(not (self.header.is_forward and trains), "a list of forwards trains nothing")
                EXECUTE[Op(i.op)](self, rank, i)
                rank.at += 1
        except MustWait:
            pass
        return rank.at > begin

    def end(self) -> None:
        """Check the final state: every forward ran once, every owner has stepped and holds only its newest weights.

        In a list of forwards alone no owner steps. Copies are equal, and no rank has exceeded the memory limit.
        """
        if self.forwards != Counter(self.jobs):
            raise CannotExecute("not every forward is there once")
        for rank in self.ranks:
            own = {rank.weights(*unit) for unit in rank.owned}
            waiting = set() if self.header.is_forward else own - rank.stepped
            if self.header.offloads_optimizer and rank.moved < rank.owned:
                raise CannotExecute(f"rank {rank.rank}: the state of an optimizer has not gone to the host")
            for names, words in ((waiting, "has not stepped"), (set(rank.held) - own, "is left")):
                if names:
                    raise CannotExecute(f"rank {rank.rank}: {min(names)} {words}")
            if not (rank.normed or self.header.is_forward):
                raise CannotExecute(f"rank {rank.rank} has not entered NORM")
            if self.header.memory_limit is not None and rank.most["saved"] > self.header.memory_limit:
                raise CannotExecute(f"rank {rank.rank} has held {rank.most['saved']} saved forwards")
        if not self.header.has_flush:
            self.check_versions()
        self.check_copies()

    def check_versions(self) -> None:
        """Check that every job used the version that `updates` asks for: the newest, the entry's or one update late."""
        versions, rounds = self.header.weight_versions, self.header.weight_versions.rounds
        entries = [s for s in range(self.header.stages) if not self.header.graph.producers[s]]
        for (s, b), version in self.uses.items():
            right = self.newest[s, b]
            if versions.updates == VERTICAL:
                right = min(self.newest[e, b] * rounds[e] for e in entries) // rounds[s]
            elif versions.updates == TWO_BUFFERS:
                right = max(b // versions.accumulated - 1, 0)
            if version != right:
                raise CannotExecute(f"stage {s} uses version {version} for microbatch {b}, not {right}")

    def check_copies(self) -> None:
        """Check that all owners of all slices of a stage that is not sliced stepped with the same bits."""
        for first in self.header.first_slices:
            if len(self.header.tensor_parallel.summed_stages(first)) > 1:
                continue
            for part in self.header.gradient_units.of(first):
                copies = {
                    buffer_name(Kind.DW, stage, piece=part) for stage in self.header.tensor_parallel.slices_of(first)
                }
                given = {rank.gradients[name].shape() for rank in self.ranks for name in copies & rank.gradients.keys()}
                if len(given) > 1:
                    raise CannotExecute(f"the gradients of {', '.join(sorted(copies))} are not added up alike")

    # What jobs read and compute.

    def read_weights(self, rank: Rank, i: Instruction) -> None:
        """Read all shards of w.s, on the rank that `compute` names, in the one version that all jobs of (s, b) use."""
        d = {Op.FWD: F, Op.BWD_W: W}.get(Op(i.op), B)
        here = d < len(self.header.compute) and self.header.compute[d, i.stage, i.mb] == rank.rank
        rank.need(bool(here), "this job is none of this rank")
        for shard in self.header.weight_shards.of(i.stage):
            rank.read(rank.weights(i.stage, shard, i.version))
        rank.need(self.uses.setdefault((i.stage, i.mb), i.version) == i.version, "its other jobs use another version")

    def inputs(self, i: Instruction) -> list[str]:
        """The names of the x.p.b that stage s reads, one for every producer p."""
        graph = self.header.graph
        return [buffer_name(Kind.X, p, i.mb, graph.output_consumer(p, i.stage)) for p in graph.producers[i.stage]]

    def gradients(self, i: Instruction) -> list[str]:
        """The names of the g.s.b that stage s reads, one for every consumer."""
        graph = self.header.graph
        return [
            buffer_name(Kind.G, i.stage, i.mb, graph.gradient_consumer(i.stage, c)) for c in graph.consumers[i.stage]
        ]

    def result(self, stage: int) -> Value:
        """The value that a job of this stage computes: the index of its slice's term in a sum, or WHOLE."""
        summed = self.header.tensor_parallel.summed_stages(stage)
        return summed.index(stage) if len(summed) > 1 else WHOLE

    # One method for every opcode; s and b are the stage and the microbatch of the instruction.

    def receive(self, rank: Rank, i: Instruction) -> None:
        """FETCH_W, RECV: post a receive of buf, the next message of this kind from `from`. A dw becomes a partial."""
        name = i.buffer if i.kind != Kind.DW else f"partial.{i.buffer} from {i.source}"
        rank.define(name, UNDER_WAY)
        self.posted[i.source, rank.rank, i.kind].append((i.buffer, name))

    def send(self, rank: Rank, i: Instruction) -> None:
        """SEND: once rank `to` has posted its receive, the buffer there gets the value of buf."""
        value = rank.read(i.buffer)
        if not self.posted[rank.rank, i.to, i.kind]:
            raise MustWait
        expected, name = self.posted[rank.rank, i.to, i.kind].popleft()
        rank.need(expected == i.buffer, f"rank {i.to} receives {expected}")
        self.ranks[i.to].held[name] = value

    def forward(self, rank: Rank, i: Instruction) -> None:
        """FWD: x.s.b, and what the backward needs if there is one and no RECOMPUTE, from every x.p.b and w.s."""
        rank.need((i.stage, i.mb) not in rank.redone, "it has been redone before")
        self.use_inputs(rank, i, (i.stage, i.mb) not in self.keep_nothing)
        self.forwards[i.stage, i.mb] += 1
        self.newest[i.stage, i.mb] = rank.newest.get(i.stage, -1)
        for consumer in self.header.graph.output_consumers(i.stage):
            rank.define(buffer_name(Kind.X, i.stage, i.mb, consumer), self.result(i.stage))

    def recompute(self, rank: Rank, i: Instruction) -> None:
        """RECOMPUTE: what the backward needs, from every x.p.b and w.s. A FWD of the job on this rank must precede."""
        self.use_inputs(rank, i, save=True)
        rank.redone.add((i.stage, i.mb))

    def use_inputs(self, rank: Rank, i: Instruction, save: bool) -> None:
        """Read the inputs and weights of a FWD or RECOMPUTE; if `save`, keep what the backward needs."""
        self.read_weights(rank, i)
        for name in self.inputs(i):
            rank.read(name)
        if save:
            rank.define(f"saved.{i.stage}.{i.mb}", WHOLE)

    def backward(self, rank: Rank, i: Instruction) -> None:
        """BWD, BWD_I, BWD_W: read what the forward saved, every x.p.b, every share of g.s.b, and w.s.

        BWD_I defines g.p.b for every producer p; BWD_W adds microbatch b to dw.s and ends what is saved; BWD does both.
        """
        self.read_weights(rank, i)
        saved, half = f"saved.{i.stage}.{i.mb}", f"half.{i.stage}.{i.mb}"
        for name in [*self.inputs(i), *self.gradients(i), saved, *[half] * (i.op == Op.BWD_W)]:
            rank.read(name)
        graph = self.header.graph
        if i.op != Op.BWD_W:
            for p in graph.producers[i.stage]:
                name = buffer_name(Kind.G, p, i.mb, graph.gradient_consumer(p, i.stage))
                rank.define(name, self.result(i.stage))
        if i.op == Op.BWD_I:
            rank.define(half, WHOLE)
            return
        for shard in self.header.gradient_units.of(i.stage):
            rank.add(buffer_name(Kind.DW, i.stage, piece=shard), i.mb)
        rank.end(saved)
        if i.op == Op.BWD_W:
            rank.end(half)

    def add(self, rank: Rank, i: Instruction) -> None:
        """ADD: buf += the partial of buf from rank `from`; the partial ends."""
        name = f"partial.{i.buffer} from {i.source}"
        more = rank.read(name)
        assert isinstance(more, Sum)
        rank.add(i.buffer, more)
        rank.end(name)

    def collective(self, rank: Rank, i: Instruction) -> None:
        """ALLREDUCE, NORM: once all ranks of `group` have reached it, they execute it together."""
        members = [self.ranks[member] for member in self.header.groups[i.group]]
        rank.need(rank in members, "the rank is not in the group")
        if any(member.at == len(member.list) for member in members):
            raise MustWait
        entered = [(member, member.list[member.at]) for member in members]
        if any(self.of_model(other) != self.of_model(i) for _, other in entered):
            raise MustWait
        if i.kind in EXCHANGED:
            self.sum_terms(rank, entered)
        elif i.kind == Kind.T:
            for member in members:
                self.tie(member, i)
        elif i.kind == Kind.DW:  # a rank without buf gives zero
            total = Sum(tuple(member.sum(i.buffer) for member in members))  # in the order of the ranks
            for member in members:
                member.change(i.buffer, total)
        else:
            self.norm(rank, members)
        for member in members:
            member.at += member is not rank

    def of_model(self, i: Instruction) -> Instruction:
        """The instruction, in a sum over slices with the model's stage in place of the slice that the member names."""
        model_stage = self.header.model_stage
        return i._replace(stage=model_stage(i.stage), piece=model_stage(i.consumer)) if i.kind in EXCHANGED else i

    def sum_terms(self, rank: Rank, entered: list[tuple[Rank, Instruction]]) -> None:
        """ALLREDUCE of x or g: each slice's term is replaced by the sum of all terms."""
        slices = self.header.tensor_parallel.slices_of(entered[0][1].stage)
        terms = [member.read(i.buffer, term=True) for member, i in entered]
        numbers = [slices.index(i.stage) for _, i in entered]
        rank.need(terms == numbers and len(set(terms)) == len(slices), "not all terms once")
        for member, i in entered:
            member.held[i.buffer] = WHOLE

    def tie(self, rank: Rank, i: Instruction) -> None:
        """ALLREDUCE of t.k: sum what tied stages share, in dw.s of each that the rank owns; dw.s must be complete."""
        stages = rank.newest.keys() & set(self.header.tied[i.tie])
        rank.need(bool(stages) and not rank.normed, f"rank {rank.rank} owns no stage of the tie, or NORM is past")
        for stage in stages:
            complete = rank.sum(buffer_name(Kind.DW, stage)).is_of(range(self.header.microbatches))
            rank.need(complete, f"dw.{stage} is not complete")
        rank.ties.append(i.tie)

    def norm(self, rank: Rank, members: list[Rank]) -> None:
        """NORM: needs all losses and the whole gradient or, without a flush, every STEP."""
        rank.need(len(members) == len(self.ranks), "it is not of all ranks")
        last = self.header.first_slices[-1]
        losses = sum(count for (stage, _), count in self.forwards.items() if stage >= last)
        rank.need(losses == (self.header.stages - last) * self.header.microbatches, "not all losses are there")
        for member in members:
            rank.need(not member.normed, "it was there before")
            member.normed = True
            if member.versions:
                rank.need(member.stepped >= {member.weights(*unit) for unit in member.owned}, "a STEP is to come")
                continue
            for name in [name for unit in member.owned for name in self.gradient_names(*unit)]:
                rank.need(member.sum(name).is_of(range(self.header.microbatches)), f"{name} is not complete")
            ties = [k for k, stages in enumerate(self.header.tied) if member.newest.keys() & set(stages)]
            rank.need(sorted(member.ties) == ties, "not all ties are summed up")

    def step(self, rank: Rank, i: Instruction) -> None:
        """STEP: w.s = optimizer(w.s, dw.s), where dw.s is the sum over all microbatches, after NORM."""
        if rank.versions:
            self.step_version(rank, i, buffer_name(Kind.DW, i.stage))
            return
        weights = rank.weights(i.stage, i.shard)
        rank.need((i.stage, i.shard) in rank.owned, "the rank does not own these weights")
        rank.read(weights)
        rank.need(rank.normed, "NORM is still to come")
        for gradient in self.gradient_names(i.stage, i.shard):
            rank.read(gradient)
            rank.gradients[gradient] = rank.sum(gradient)
            rank.need(rank.gradients[gradient].is_of(range(self.header.microbatches)), f"{gradient} is not complete")
        rank.stepped.add(weights)
        if self.header.offloads_optimizer:
            state = buffer_name(Kind.OPT, i.stage, piece=i.shard)
            rank.need(rank.held.get(state) == WHOLE, f"{state} is not on the device")
            rank.held[state] = STEPPED

    def gradient_names(self, stage: int, shard: int) -> list[str]:
        """The names of the gradient of these weights: dw.s/k for every part, if it is cut where they are not."""
        parts = (shard,) if shard >= 0 else self.header.gradient_units.of(stage)
        return [buffer_name(Kind.DW, stage, piece=part) for part in parts]

    def step_version(self, rank: Rank, i: Instruction, gradient: str) -> None:
        """STEP, where weights have versions: w.s@v from w.s@v-1 and the sum over the microbatches of its round.

        It replaces w.s@v-1 unless that has a FREE. Nothing more is added to dw.s until its FREE.
        """
        s, m, batches = i.stage, self.header.weight_versions.round(i.stage), self.header.microbatches
        rank.need((s, -1) in rank.owned and i.version == rank.newest[s] + 1, "this is not the next version")
        before = rank.weights(s, -1, i.version - 1)
        rank.read(before)
        rank.read(gradient)
        complete = rank.sum(gradient).is_of(range(m * (i.version - 1), min(m * i.version, batches)))
        rank.need(complete, f"{gradient} is not the round's sum")
        rank.held[gradient] = STEPPED
        if before not in rank.freed:
            rank.end(before)
        rank.define(rank.weights(s, -1, i.version), WHOLE)
        rank.newest[s] = i.version
        if m * i.version >= batches:
            rank.stepped.add(rank.weights(s, -1))

    def offload(self, rank: Rank, i: Instruction) -> None:
        """OFFLOAD: the host gets a copy of what a forward saved, or the state of an optimizer after its STEP."""
        if i.kind == Kind.OPT:
            rank.need(rank.held.get(i.buffer) == STEPPED, f"{i.buffer} has not had its STEP")
            rank.held[i.buffer] = GONE
            return
        rank.read(i.buffer)
        rank.define(f"host.{i.stage}.{i.mb}", WHOLE)

    def reload(self, rank: Rank, i: Instruction) -> None:
        """RELOAD: the rank gets the host's copy, which ends; of the state of an optimizer it owns, the host's stays."""
        if i.kind == Kind.OPT:
            rank.need(self.header.offloads_optimizer and (i.stage, i.shard) in rank.owned, "no such state is its own")
            rank.need((i.stage, i.shard) not in rank.moved, "this state has had its STEP")
            rank.define(i.buffer, WHOLE)
            return
        rank.read(f"host.{i.stage}.{i.mb}")
        rank.define(i.buffer, WHOLE)
        rank.end(f"host.{i.stage}.{i.mb}")

    def free(self, rank: Rank, i: Instruction) -> None:
        """FREE: buf ends. An owner keeps the newest of its weights."""
        value = rank.read(i.buffer, term=True)
        own = i.kind == Kind.W and (i.stage, i.shard) in rank.owned
        rank.need(not own or i.version < rank.newest[i.stage], "the rank keeps these weights")
        if i.kind == Kind.DW and rank.versions:
            rank.need(value is STEPPED, "no STEP has used it")
        if i.kind == Kind.OPT:
            rank.need(value is GONE, "the host has not got it")
            rank.moved.add((i.stage, i.shard))
        rank.end(i.buffer)


EXECUTE: dict[Op, Callable[[ReferenceMachine, Rank, Instruction], None]] = {
    Op.FETCH_W: ReferenceMachine.receive,
    Op.RECV: ReferenceMachine.receive,
    Op.SEND: ReferenceMachine.send,
    Op.FWD: ReferenceMachine.forward,
    Op.RECOMPUTE: ReferenceMachine.recompute,
    Op.BWD: ReferenceMachine.backward,
    Op.BWD_I: ReferenceMachine.backward,
    Op.BWD_W: ReferenceMachine.backward,
    Op.ADD: ReferenceMachine.add,
    Op.ALLREDUCE: ReferenceMachine.collective,
    Op.NORM: ReferenceMachine.collective,
    Op.STEP: ReferenceMachine.step,
    Op.FREE: ReferenceMachine.free,
    Op.OFFLOAD: ReferenceMachine.offload,
    Op.RELOAD: ReferenceMachine.reload,
}


def execute(program: Program) -> list[dict[str, int]]:
    """Run a projected program on the reference machine; see `ReferenceMachine.run`. Raises CannotExecute."""
    return ReferenceMachine(program).run()
