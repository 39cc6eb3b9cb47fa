"""The reference machine: what a schedule means. This file is the definition of the format.

In: a projected program. Out: how many buffers of each kind every rank held at the most, or `CannotExecute` at the
first instruction that makes no sense. It executes every rank's list on symbols, one instruction after another and every
SEND a rendezvous, and shares nothing with `effects.py`, so that the checker can be held against it: what the checker
accepts this machine executes, and what this machine cannot execute the checker refuses.

A rank holds buffers by their names in the file: "x.0.3", "g.0.3.2", "w.1", "w.1@4", "w.1/2", "dw.1"; besides them
"partial", a received dw that is not added yet, "saved", what a forward keeps for its backward, and "half", what BWD_I
keeps for BWD_W. Their values are symbols:

    x, g                WHOLE, or t where it is the term of shard t in a sum of a split stage
    dw, partial         the microbatches whose gradients it is the sum of, each with the number of times that it is in
    w, saved, half      WHOLE
    any                 UNDER_WAY, from RECV or FETCH_W until the message is there
    dw                  STEPPED, where weights have versions, from STEP to FREE
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable

from schedgen.ir.instructions import EXCHANGED, FORWARD_KINDS, FORWARD_OPS, Instruction, Kind, Op, buffer_name
from schedgen.ir.program import Program
from schedgen.ir.weight_versions import VERTICAL

WHOLE, UNDER_WAY, STEPPED = "whole", "under way", "stepped"
HELD = ("x", "g", "w", "dw", "partial", "saved", "half")  # kinds of buffers, as names begin

Value = str | int | Counter[int]


class CannotExecute(Exception):
    """An instruction that makes no sense where it stands."""


class _MustWait(Exception):
    """Another rank has to go on first; raised before anything has changed."""


class Rank:
    """What one rank has."""

    def __init__(self, rank: int, program: Program) -> None:
        """At the begin of its list: the weights it owns, and nothing else."""
        shards, self.rank = program.header.weight_shards, rank
        self.versions = bool(program.header.weight_versions)
        self.list = program.instructions(rank)
        self.freed = {i.buffer for i in self.list if i.op == Op.FREE and i.kind == Kind.W}
        self.at = 0  # the place of its next instruction
        self.owned = {unit for unit in shards.units if rank in shards.holders(*unit)}  # (stage, part)
        self.newest = {stage: 0 if self.versions else -1 for stage, _ in self.owned}  # version, by stage
        self.held: dict[str, Value] = {self.weights(*unit): WHOLE for unit in self.owned}
        self.stepped: set[str] = set()  # the names of the weights that are done
        self.ties: list[int] = []  # those that it has summed up
        self.alive: Counter[str] = Counter()  # buffers at once, by kind: the weights that it owns do not count
        self.most: Counter[str] = Counter()

    def weights(self, stage: int, part: int, version: int | None = None) -> str:
        """The name of weights; `version`: default the newest, where they have versions."""
        if not self.versions:
            return buffer_name(Kind.W, stage, via=part)
        return buffer_name(Kind.W, stage, version=self.newest.get(stage, 0) if version is None else version)

    def refuse(self, reason: str) -> CannotExecute:
        """The error to raise at the instruction that the rank stands at."""
        return CannotExecute(f"rank {self.rank}: instruction {self.at}: {self.list[self.at]}: {reason}")

    def need(self, condition: bool, reason: str) -> None:
        """Raise CannotExecute unless the condition holds."""
        if not condition:
            raise self.refuse(reason)

    def read(self, name: str, term: bool = False) -> Value:
        """The value of a buffer, which is there; unless `term`, it is no mere term of a sum."""
        self.need(name in self.held, f"{name} is not there")
        value = self.held[name]
        if value is UNDER_WAY:
            raise _MustWait
        self.need(term or not isinstance(value, int), f"{name} is only a shard's term")
        self.need(self.versions or name not in self.stepped, f"{name} has stepped: it is the next step's")
        return value

    def define(self, name: str, value: Value) -> None:
        """A new buffer, which is not there yet."""
        self.need(name not in self.held, f"{name} is there already")
        self.held[name] = value
        kind = name.split(".")[0]
        self.alive[kind] += 1
        self.most[kind] = max(self.most[kind], self.alive[kind])

    def end(self, name: str) -> None:
        """A buffer is gone."""
        del self.held[name]
        self.alive[name.split(".")[0]] -= 1

    def add(self, name: str, more: Counter[int]) -> None:
        """name += more, where a dw that is not there is zero."""
        value = self.held.get(name, Counter())
        self.need(isinstance(value, Counter), f"{name} still holds the gradient of the step before")
        assert isinstance(value, Counter)
        if name not in self.held:
            self.define(name, Counter())
        self.held[name] = value + more


class ReferenceMachine:
    """Every rank, and the messages whose receives have been posted."""

    def __init__(self, program: Program) -> None:
        """All ranks stand at the begin of their lists. `program` may be damaged."""
        self.header = program.header
        self.ranks = [Rank(rank, program) for rank in range(self.header.workers)]
        # By (from, to, kind): what receives wait for, the name as it is sent and as it is received.
        self.posted: defaultdict[tuple[int, int, int], deque[tuple[str, str]]] = defaultdict(deque)
        self.jobs = {(s, b) for s in range(self.header.stages) for b in range(self.header.microbatches)}
        redone = {(i.stage, i.mb) for rank in self.ranks for i in rank.list if i.op == Op.RECOMPUTE}
        self.keep_nothing = self.jobs if self.header.is_forward else redone  # forwards without a backward, or redone
        self.forwards: Counter[tuple[int, int]] = Counter()
        # By job: the version of the weights that it uses, and the newest that was there when its forward ran.
        self.uses: dict[tuple[int, int], int] = {}
        self.newest: dict[tuple[int, int], int] = {}

    def run(self) -> list[dict[str, int]]:
        """Execute all lists to their ends; by rank, the most buffers of each of HELD at once.

        In which order ranks go on does not matter: what can be executed stays so.
        """
        while any(self.advance(rank) for rank in self.ranks):
            pass
        for rank in self.ranks:
            if rank.at < len(rank.list):
                raise rank.refuse("waits for ever")
        self.end()
        return [{kind: rank.most[kind] for kind in HELD} for rank in self.ranks]

    def advance(self, rank: Rank) -> bool:
        """Take a rank as far as it gets; whether it got anywhere."""
        begin = rank.at
        try:
            while rank.at < len(rank.list):
                i = rank.list[rank.at]
                trains = i.op not in FORWARD_OPS or i.kind not in FORWARD_KINDS
                rank.need(not (self.header.is_forward and trains), "a list of forwards trains nothing")
                EXECUTE[Op(i.op)](self, rank, i)
                rank.at += 1
        except _MustWait:
            pass
        return rank.at > begin

    def end(self) -> None:
        """At the end every job is done, every owner has stepped, and it has the newest of its weights and no more.

        No owner steps where there are forwards alone.
        """
        if self.forwards != Counter(self.jobs):
            raise CannotExecute("not every forward is there once")
        for rank in self.ranks:
            own = {rank.weights(*unit) for unit in rank.owned}
            waiting = set() if self.header.is_forward else own - rank.stepped
            for names, words in ((waiting, "has not stepped"), (set(rank.held) - own, "is left")):
                if names:
                    raise CannotExecute(f"rank {rank.rank}: {min(names)} {words}")
        if self.header.weight_versions:
            self.check_versions()

    def check_versions(self) -> None:
        """Every job has used the version that `updates` says: the newest, or the microbatch's at its entry."""
        rounds = self.header.weight_versions.rounds
        entries = [s for s in range(self.header.stages) if not self.header.graph.producers[s]]
        for (s, b), version in self.uses.items():
            right = self.newest[s, b]
            if self.header.weight_versions.updates == VERTICAL:
                right = min(self.newest[e, b] * rounds[e] for e in entries) // rounds[s]
            if version != right:
                raise CannotExecute(f"stage {s} uses version {version} for microbatch {b}, not {right}")

    # What jobs read and give.

    def read_weights(self, rank: Rank, i: Instruction) -> None:
        """w.s, all its parts, in the version that all jobs of this stage and microbatch use."""
        for part in self.header.weight_shards.parts(i.stage):
            rank.read(rank.weights(i.stage, part, i.version))
        rank.need(self.uses.setdefault((i.stage, i.mb), i.version) == i.version, "its other jobs use another version")

    def inputs(self, i: Instruction) -> list[str]:
        """x.p.b, of every producer p what stage s reads of it."""
        graph = self.header.graph
        return [buffer_name(Kind.X, p, i.mb, graph.output_consumer(p, i.stage)) for p in graph.producers[i.stage]]

    def gradients(self, i: Instruction) -> list[str]:
        """g.s.b, of every consumer what it gives."""
        graph = self.header.graph
        return [
            buffer_name(Kind.G, i.stage, i.mb, graph.gradient_consumer(i.stage, c)) for c in graph.consumers[i.stage]
        ]

    def result(self, stage: int) -> Value:
        """What a job gives: a shard's term of a sum, or a whole."""
        tensor = self.header.tensor_parallel
        return stage % tensor.degree if tensor.split[stage] else WHOLE

    # One method for every opcode: rank r, stage s, microbatch b.

    def receive(self, rank: Rank, i: Instruction) -> None:
        """FETCH_W, RECV: buf = what rank `from` sends next of its kind, once that is there. A dw lies apart."""
        name = i.buffer if i.kind != Kind.DW else f"partial.{i.buffer} from {i.peer}"
        rank.define(name, UNDER_WAY)
        self.posted[i.peer, rank.rank, i.kind].append((i.buffer, name))

    def send(self, rank: Rank, i: Instruction) -> None:
        """SEND: once rank `to` has posted its receive, that has what buf is."""
        value = rank.read(i.buffer)
        if not self.posted[rank.rank, i.peer, i.kind]:
            raise _MustWait
        expected, name = self.posted[rank.rank, i.peer, i.kind].popleft()
        rank.need(expected == i.buffer, f"rank {i.peer} receives {expected}")
        self.ranks[i.peer].held[name] = value

    def forward(self, rank: Rank, i: Instruction) -> None:
        """FWD: x.s.b, and what its backward needs if there is one and no RECOMPUTE, from every x.p.b and w.s."""
        self.recompute(rank, i, (i.stage, i.mb) not in self.keep_nothing)
        self.forwards[i.stage, i.mb] += 1
        self.newest[i.stage, i.mb] = rank.newest.get(i.stage, -1)
        for consumer in self.header.graph.output_consumers(i.stage):
            rank.define(buffer_name(Kind.X, i.stage, i.mb, consumer), self.result(i.stage))

    def recompute(self, rank: Rank, i: Instruction, save: bool = True) -> None:
        """RECOMPUTE: what the backward needs, from every x.p.b and w.s."""
        self.read_weights(rank, i)
        for name in self.inputs(i):
            rank.read(name)
        if save:
            rank.define(f"saved.{i.stage}.{i.mb}", WHOLE)

    def backward(self, rank: Rank, i: Instruction) -> None:
        """BWD, BWD_I, BWD_W, from what is saved, every x.p.b, every share of g.s.b and w.s.

        BWD_I gives g.p.b for every producer p, BWD_W adds b to dw.s and ends what is saved; BWD does both.
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
        for part in self.header.weight_shards.parts(i.stage):
            rank.add(buffer_name(Kind.DW, i.stage, via=part), Counter([i.mb]))
        rank.end(saved)
        if i.op == Op.BWD_W:
            rank.end(half)

    def add(self, rank: Rank, i: Instruction) -> None:
        """ADD: buf += the partial of buf that came from rank `from`, which ends."""
        name = f"partial.{i.buffer} from {i.peer}"
        more = rank.read(name)
        assert isinstance(more, Counter)
        rank.add(i.buffer, more)
        rank.end(name)

    def collective(self, rank: Rank, i: Instruction) -> None:
        """ALLREDUCE, NORM: once all ranks of `group` stand at it, they execute it together."""
        members = [self.ranks[member] for member in self.header.groups[i.group]]
        rank.need(rank in members, "the rank is not in the group")
        if any(member.at == len(member.list) for member in members):
            raise _MustWait
        entered = [(member, member.list[member.at]) for member in members]
        if any(self.of_model(other) != self.of_model(i) for _, other in entered):
            raise _MustWait
        if i.kind in EXCHANGED:
            self.sum_terms(rank, entered)
        elif i.kind == Kind.T:
            for member in members:
                self.tie(member, i)
        elif i.kind == Kind.DW:  # a rank without buf gives zero
            terms = [member.held.get(i.buffer, Counter()) for member in members]
            rank.need(all(isinstance(term, Counter) for term in terms), "a sum is that of the step before")
            total = sum((term for term in terms if isinstance(term, Counter)), Counter[int]())
            for member, term in zip(members, terms, strict=True):
                assert isinstance(term, Counter)
                member.add(i.buffer, total - term)
        for member in members:
            member.at += member is not rank

    def of_model(self, i: Instruction) -> Instruction:
        """What members of one collective have in common: of a sum over shards each has its own stage."""
        degree = self.header.tensor_parallel.degree
        return i._replace(stage=i.stage // degree, via=i.via // degree) if i.kind in EXCHANGED else i

    def sum_terms(self, rank: Rank, entered: list[tuple[Rank, Instruction]]) -> None:
        """ALLREDUCE of x or g: each shard's term is replaced by the sum of all."""
        degree = self.header.tensor_parallel.degree
        terms = [member.read(i.buffer, term=True) for member, i in entered]
        rank.need(terms == [i.stage % degree for _, i in entered] and len(set(terms)) == degree, "not all terms once")
        for member, i in entered:
            member.held[i.buffer] = WHOLE

    def tie(self, rank: Rank, i: Instruction) -> None:
        """ALLREDUCE of t.k: in dw.s of each tied stage s that the rank owns, what they share, from a complete sum."""
        stages = rank.newest.keys() & set(self.header.tied[i.tie])
        rank.need(bool(stages), f"rank {rank.rank} owns no stage of the tie")
        for stage in stages:
            complete = rank.held.get(buffer_name(Kind.DW, stage)) == Counter(range(self.header.microbatches))
            rank.need(complete, f"dw.{stage} is not complete")
        rank.ties.append(i.tie)

    def step(self, rank: Rank, i: Instruction) -> None:
        """STEP: w.s = optimizer(w.s, dw.s), dw.s being the sum over all microbatches and the stage's ties summed."""
        gradient = buffer_name(Kind.DW, i.stage, via=i.part)
        if rank.versions:
            self.step_version(rank, i, gradient)
            return
        weights = rank.weights(i.stage, i.part)
        rank.need((i.stage, i.part) in rank.owned, "the rank does not own these weights")
        rank.read(weights)
        rank.need(rank.read(gradient) == Counter(range(self.header.microbatches)), f"{gradient} is not complete")
        ties = [k for k, stages in enumerate(self.header.tied) if rank.newest.keys() & set(stages)]
        rank.need(sorted(rank.ties) == ties, "not all ties are summed up")
        rank.stepped.add(weights)

    def step_version(self, rank: Rank, i: Instruction, gradient: str) -> None:
        """STEP, where weights have versions: w.s@v from w.s@v-1 and the sum over the microbatches of its round.

        It takes the place of w.s@v-1 unless there is a FREE of that. No more is added to dw.s until its FREE.
        """
        s, m, batches = i.stage, self.header.weight_versions.round(i.stage), self.header.microbatches
        rank.need((s, -1) in rank.owned and i.version == rank.newest[s] + 1, "this is not the next version")
        before = rank.weights(s, -1, i.version - 1)
        rank.read(before)
        complete = rank.read(gradient) == Counter(range(m * (i.version - 1), min(m * i.version, batches)))
        rank.need(complete, f"{gradient} is not the round's sum")
        rank.held[gradient] = STEPPED
        if before not in rank.freed:
            rank.end(before)
        rank.define(rank.weights(s, -1, i.version), WHOLE)
        rank.newest[s] = i.version
        if m * i.version >= batches:
            rank.stepped.add(rank.weights(s, -1))

    def free(self, rank: Rank, i: Instruction) -> None:
        """FREE: buf ends. An owner keeps the newest of its weights."""
        value = rank.read(i.buffer, term=True)
        own = i.kind == Kind.W and (i.stage, i.part) in rank.owned
        rank.need(not own or i.version < rank.newest[i.stage], "the rank keeps these weights")
        if i.kind == Kind.DW and rank.versions:
            rank.need(value is STEPPED, "no STEP has used it")
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
}


def execute(program: Program) -> list[dict[str, int]]:
    """Run a projected program on the reference machine; see `ReferenceMachine.run`. Raises CannotExecute."""
    return ReferenceMachine(program).run()
