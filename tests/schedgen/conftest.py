"""What the tests share: the command in-process, golden files, random schemes, and an executor that trusts nobody."""

from __future__ import annotations

import contextlib
import io
import json
from collections import Counter, defaultdict, deque
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis.extra.numpy import arrays

from schedgen.checker import check
from schedgen.cli.main import main
from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.ir.instructions import DIRECTIONS, EXCHANGED, B, F, Kind, Op
from schedgen.schemes import SCHEMES
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.util.errors import RefusedFile

# The same examples every time; a slow machine fails nothing; every example writes its files anew.
settings.register_profile(
    "schedgen",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("schedgen")

# The six schemes at W=4, S=4, B=8, the sizes of the seed's pictures.
FOUR_STAGES = (
    "ddp", "fsdp", "gpipe", "1f1b", "lpp", "fslpp", "zb-h1", "zb-h2", "chimera", "pipedream-flush", "1f1b-rr",
    "pipedream",
)  # fmt: skip
GOLDEN = {
    "ddp": ("--workers", "4"),
    "fsdp": ("--workers", "4", "--fan-out", "3"),  # gradients go straight to the owner
    "gpipe": ("--workers", "4"),
    "1f1b": ("--workers", "4", "--prefetch", "0"),  # a RECV stands beside its SEND
    "lpp": ("--workers", "4", "--groups", "2"),
    "fslpp": ("--workers", "4", "--groups", "2"),
}
# The schemes with two stages a worker have 8 stages.
GOLDEN |= {name: ("--workers", "4") for name in SCHEMES if name not in GOLDEN}


class Result(NamedTuple):
    code: int
    out: str
    err: str


def _run(*arguments: object) -> Result:
    """`schedgen ARGUMENTS` in this process, with the streams a terminal would give it."""
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit:
            code = exit.code
    return Result(code, out.buffer.getvalue().decode(), err.buffer.getvalue().decode())


@pytest.fixture(scope="session")
def run():
    return _run


@pytest.fixture(scope="session")
def refused():
    """Assert that a command ends with `code`, nothing on stdout and one line on stderr; that line."""

    def refused(result: Result, code: int) -> str:
        assert (result.code, result.out) == (code, ""), result
        assert result.err.endswith("\n") and result.err[:-1].isprintable(), repr(result.err)
        return result.err[:-1]

    return refused


@pytest.fixture
def graph_file(tmp_path_factory):
    """Write a graph file with these keys and values; its path."""

    def graph_file(**values):
        path = tmp_path_factory.mktemp("graph") / "model.graph"
        path.write_text(json.dumps(values))
        return path

    return graph_file


@pytest.fixture
def judge(run, tmp_path):
    """Write edited JSON, seal it and check it, as a user would; the result and the sealed file."""

    def judge(file):
        path = tmp_path / "edited.json"
        path.write_text(json.dumps(file))
        assert run("seal", path) == (0, "", "")
        return run("check", path), path

    return judge


@pytest.fixture(scope="session")
def golden() -> dict[str, str]:
    """The text of every scheme's file at W=4, S=4, B=8."""
    texts = {}
    for scheme, options in GOLDEN.items():
        stages = 4 if scheme in FOUR_STAGES else 8
        sizes = ("--stages", str(stages), "--microbatches", "8", "-o", "-")
        texts[scheme] = _run("compile", scheme, *options, *sizes).out
    return texts


class Case(NamedTuple):
    """A random scheme and the options it is compiled with; arrays are (D, S, B)."""

    sizes: Sizes
    weights: np.ndarray
    compute: np.ndarray
    n: np.ndarray
    edges: tuple[tuple[int, int], ...]
    apart: tuple[int, ...]
    cost: dict[str, int]
    weight_slots: int
    fan_out: int
    prefetch: int
    recompute: list[int]
    tied: list[set[int]]

    def scheme(self):
        return Scheme(
            "random",
            self.sizes.workers,
            lambda s, b, d: (self.weights[d, s, b], self.compute[d, s, b]),
            lambda s, b, d: self.n[d, s, b],
            "random",
            "greedy",
            split=len(self.cost) == 3,
            edges=self.edges,
            per_consumer=self.apart,
        )

    def options(self, **more):
        named = ("cost", "weight_slots", "fan_out", "prefetch", "recompute")
        tied = [sorted(stages) for stages in self.tied]
        return Options(**({name: getattr(self, name) for name in named} | {"tied": tied} | more))

    def compile(self, **more):
        return compile(self.scheme(), self.sizes, self.options(**more))


@st.composite
def _cases(draw) -> Case:
    """Any placement (also another worker for the backward), any owners, any n, any DAG that ends in one loss."""
    S, batches, workers, directions = (draw(st.integers(*ends)) for ends in ((1, 4), (1, 4), (1, 4), (2, 3)))
    shape = (directions, S, batches)
    worker = st.integers(0, workers - 1)
    compute = draw(arrays(np.int32, shape, elements=worker))
    if draw(st.booleans()):
        compute[B] = compute[F]
    compute[directions - 1] = compute[B]  # W runs where I ran
    weights = draw(
        st.one_of(
            arrays(np.int32, (1, S, 1), elements=worker),  # one owner a stage
            arrays(np.int32, shape, elements=worker),  # several
            st.just(compute),  # weights never travel
        )
    )
    edges = [(p, c) for p in range(S - 1) for c in sorted(draw(st.sets(st.integers(p + 1, S - 1), min_size=1)))]
    forks = [p for p in range(S - 1) if sum(producer == p for producer, _ in edges) > 1]
    return Case(
        Sizes(S, batches, workers),
        np.broadcast_to(weights, shape),
        compute,
        draw(arrays(np.int32, shape, elements=st.integers(0, 9))),
        tuple(edges),
        tuple(p for p in forks if draw(st.booleans())),
        {name: draw(st.integers(1, 3)) for name in DIRECTIONS[directions]},
        weight_slots=draw(st.integers(1, 3)),
        fan_out=draw(st.integers(1, 3)),
        prefetch=draw(st.integers(0, 2)),
        recompute=sorted(draw(st.sets(st.integers(0, S - 1), max_size=1))),
        tied=draw(st.lists(st.sets(st.integers(0, S - 1), min_size=2), max_size=3)) if S > 1 else [],
    )


@pytest.fixture(scope="session")
def cases():
    return _cases()


STEPPED = object()  # a weight gradient that its STEP has used


class Executor:
    """Runs a program as the instruction set says, every SEND a rendezvous, and asserts what must hold.

    Buffers are tuples (kind, stage, microbatch, via), of weights (kind, stage, part,
    version), of their gradients (kind, stage, part, -1); what is owned is (stage, part).
    None stands for a message not here yet, a Counter of microbatches for a weight gradient,
    the shard that gave it for a part of a sum.
    """

    FIELDS = ("activation", "gradient", "weight", "weight_gradient", "partial", "saved", "half")

    def __init__(self, program) -> None:
        self.header = header = program.header
        ranks = range(header.workers)
        self.lists = [program.instructions(rank) for rank in ranks]
        self.at = [0 for _ in ranks]
        self.own = [
            {unit for unit in header.weight_shards.units if rank in header.weight_shards.holders(*unit)}
            for rank in ranks
        ]
        self.first = 0 if header.weight_versions.count else -1
        self.held = [{(Kind.W, s, k, self.first): True for s, k in own} for own in self.own]
        self.freed = [{(i.stage, i.peer) for i in part if i.op == Op.FREE and i.kind == Kind.W} for part in self.lists]
        self.newest = [{s: self.first for s, _ in own} for own in self.own]
        self.used, self.there = {}, {}  # by job: the version of its forward, and the newest where that ran
        self.stepped = [set() for _ in ranks]
        self.tied = [[] for _ in ranks]
        self.posted = defaultdict(deque)  # (from, to, kind) -> buffers whose RECV has no SEND yet
        self.redone = {(i.stage, i.mb) for part in self.lists for i in part if i.op == Op.RECOMPUTE}
        self.forwards = Counter()
        self.peaks = [Counter() for _ in ranks]

    def run(self) -> list[dict[str, int]]:
        """Every rank to its end; the most buffers of each kind alive at once, by rank."""
        moved = True
        while moved:
            moved = False
            for rank, part in enumerate(self.lists):
                while self.at[rank] < len(part) and self.step(rank, part[self.at[rank]]):
                    self.at[rank] += 1
                    moved = True
        assert self.at == [len(part) for part in self.lists], f"stuck at {self.at}"
        assert self.stepped == self.own, "an owner did not step"
        last = [{(Kind.W, s, k, newest[s]) for s, k in own} for own, newest in zip(self.own, self.newest, strict=True)]
        assert [set(held) for held in self.held] == last, "left"
        if self.header.weight_versions.count:
            self.versions()
        jobs = {(s, b) for s in range(self.header.stages) for b in range(self.header.microbatches)}
        assert self.forwards == Counter(jobs), "not every forward once"
        kinds = (Kind.X, Kind.G, Kind.W, Kind.DW, "partial", "saved", "half")
        return [{field: peak[kind] for field, kind in zip(self.FIELDS, kinds, strict=True)} for peak in self.peaks]

    def versions(self) -> None:
        """Every forward has used the version that the schedule's updates say."""
        header, m = self.header, [len(owners) for owners in self.header.owners]
        entries = [s for s in range(header.stages) if not header.graph.producers[s]]
        for (s, b), version in self.used.items():
            entered = min(self.there[e, b] * m[e] for e in entries) // m[s]
            right = entered if header.weight_versions.updates == "vertical" else self.there[s, b]
            assert version == right, f"stage {s} uses version {version} for microbatch {b}, not {right}"

    def operands(self, i):
        s, b, header = i.stage, i.mb, self.header
        if i.op in (Op.FWD, Op.RECOMPUTE, Op.BWD, Op.BWD_I, Op.BWD_W):
            yield from ((Kind.W, s, k, i.peer) for k in header.weight_shards.parts(s))
            yield from ((Kind.X, p, b, header.graph.output_consumer(p, s)) for p in header.graph.producers[s])
        if i.op in (Op.BWD, Op.BWD_I, Op.BWD_W):
            yield ("saved", s, b, -1)
            yield from ((Kind.G, s, b, header.graph.gradient_consumer(s, c)) for c in header.graph.consumers[s])
        if i.op in (Op.SEND, Op.FREE):
            yield self.named(i)
        if i.op == Op.STEP:
            yield from ((Kind.W, s, i.via, max(i.peer - 1, self.first)), (Kind.DW, s, i.via, -1))
        if i.op == Op.ADD:
            yield ("partial", s, i.peer, i.via)

    def of_model(self, i):
        """What members of one collective enter: of a sum over shards each has its own names."""
        T = self.header.tensor_parallel.degree
        return i._replace(stage=i.stage // T, via=i.via // T) if i.kind in EXCHANGED else i

    def part(self, stage):
        """What a job of a stage gives: the number of a shard, or a whole."""
        T = self.header.tensor_parallel.degree
        return stage % T if T > 1 and stage // T not in self.header.tensor_parallel.replicated else True

    def named(self, i):
        if i.kind in (Kind.W, Kind.DW):
            return (i.kind, i.stage, i.via, i.peer if i.op == Op.FREE and i.kind == Kind.W else -1)
        return (i.kind, i.stage, i.mb, i.via)

    def define(self, rank, name, value) -> None:
        held = self.held[rank]
        assert name not in held, f"rank {rank}: {name} is defined twice"
        held[name] = value
        alive = sum(other[0] == name[0] for other in held) - len(self.own[rank]) * (name[0] == Kind.W)
        self.peaks[rank][name[0]] = max(self.peaks[rank][name[0]], alive)

    def add(self, rank, stage, part, more: Counter) -> None:
        name = (Kind.DW, stage, part, -1)
        assert self.held[rank].get(name) is not STEPPED, f"rank {rank}: dw.{stage} is that of the step before"
        if name not in self.held[rank]:
            self.define(rank, name, Counter())
        self.held[rank][name] = self.held[rank][name] + more

    def step(self, rank, i) -> bool:
        """Execute one instruction; False where it has to wait."""
        s, held, header = i.stage, self.held[rank], self.header
        for name in self.operands(i):
            assert name in held, f"rank {rank}: {name} is not there for {i}"
            late = name[0] == Kind.W and not header.weight_versions.count and name[1:3] in self.stepped[rank]
            assert not late, f"rank {rank}: {i} after STEP"
            if held[name] is None:
                return False
            assert type(held[name]) is not int or i.op == Op.FREE, f"rank {rank}: {i} uses a part"
        if i.op in (Op.RECV, Op.FETCH_W):
            name = ("partial", s, i.peer, i.via) if i.kind == Kind.DW else self.named(i)
            self.define(rank, name, None)
            self.posted[i.peer, rank, i.kind].append((name, self.named(i)))
        elif i.op == Op.SEND:
            if not self.posted[rank, i.peer, i.kind]:
                return False
            name, expected = self.posted[rank, i.peer, i.kind].popleft()
            assert expected == self.named(i), f"rank {rank}: {i} meets the RECV of {expected}"
            self.held[i.peer][name] = held[expected]
        elif i.op in (Op.ALLREDUCE, Op.NORM):
            members = header.groups[i.peer]
            if not all(self.at[m] < len(self.lists[m]) for m in members):
                return False
            entered = {m: self.lists[m][self.at[m]] for m in members}
            if {self.of_model(one) for one in entered.values()} != {self.of_model(i)}:
                return False
            if i.kind in EXCHANGED:
                parts = {m: self.held[m][self.named(one)] for m, one in entered.items()}
                assert sorted(parts.values()) == list(range(header.tensor_parallel.degree)), (
                    f"rank {rank}: {i} sums {parts}"
                )
                for m, one in entered.items():
                    assert parts[m] == one.stage % header.tensor_parallel.degree
                    self.held[m][self.named(one)] = True
            elif i.kind == Kind.T:
                for m in members:
                    self.tie(m, i)
            elif i.op == Op.ALLREDUCE:
                total = sum((self.held[m].get((Kind.DW, s, -1, -1), Counter()) for m in members), Counter())
                for m in members:
                    self.add(m, s, -1, total - self.held[m].get((Kind.DW, s, -1, -1), Counter()))
            for m in members:
                self.at[m] += m != rank
        elif i.op == Op.FREE:
            assert i.kind != Kind.W or (s, i.via) not in self.own[rank] or i.peer < self.newest[rank][s]
            assert i.kind != Kind.DW or not header.weight_versions.count or held[self.named(i)] is STEPPED, (
                f"rank {rank}: {i}"
            )
            del held[self.named(i)]
        elif i.op == Op.STEP and header.weight_versions.count:
            self.make(rank, i)
        elif i.op == Op.STEP:
            assert held[Kind.DW, s, i.via, -1] == Counter(range(header.microbatches)), (
                f"rank {rank}: {i} on a wrong sum"
            )
            ties = [k for k, stages in enumerate(header.tied) if self.newest[rank].keys() & set(stages)]
            assert sorted(self.tied[rank]) == ties, f"rank {rank}: {i} before its ties are summed"
            self.stepped[rank].add((s, i.via))
        elif i.op == Op.ADD:
            self.add(rank, s, i.via, held["partial", s, i.peer, i.via])
            del held["partial", s, i.peer, i.via]
        else:
            self.compute(rank, i)
        return True

    def make(self, rank, i) -> None:
        """The next version of a stage, from the gradients of its microbatches."""
        s, m, held = i.stage, len(self.header.owners[i.stage]), self.held[rank]
        assert (s, -1) in self.own[rank] and i.peer == self.newest[rank][s] + 1, (
            f"rank {rank}: {i} is not the next version"
        )
        right = Counter(range(m * (i.peer - 1), min(m * i.peer, self.header.microbatches)))
        assert held[Kind.DW, s, -1, -1] == right, f"rank {rank}: {i} on a wrong sum"
        held[Kind.DW, s, -1, -1] = STEPPED
        if (s, i.peer - 1) not in self.freed[rank]:
            del held[Kind.W, s, -1, i.peer - 1]
        self.define(rank, (Kind.W, s, -1, i.peer), True)
        self.newest[rank][s] = i.peer
        if m * i.peer >= self.header.microbatches:
            self.stepped[rank].add((s, -1))

    def tie(self, rank, i) -> None:
        self.tied[rank].append(i.stage)
        stages = self.newest[rank].keys() & set(self.header.tied[i.stage])
        assert stages, f"rank {rank}: {i} is not of its stages"
        for s in stages:
            whole = self.held[rank][Kind.DW, s, -1, -1] == Counter(range(self.header.microbatches))
            assert whole, f"rank {rank}: {i} before the sum of stage {s}"

    def compute(self, rank, i) -> None:
        s, b = i.stage, i.mb
        assert self.used.setdefault((s, b), i.peer) == i.peer, f"rank {rank}: {i} has not its other jobs' weights"
        if i.op == Op.FWD:
            self.forwards[s, b] += 1
            self.there[s, b] = self.newest[rank].get(s, self.first)
            for via in self.header.graph.output_consumers(s):
                self.define(rank, (Kind.X, s, b, via), self.part(s))
        if i.op == Op.RECOMPUTE or (i.op == Op.FWD and (s, b) not in self.redone):
            self.define(rank, ("saved", s, b, -1), True)
        if i.op in (Op.BWD, Op.BWD_I):
            for p in self.header.graph.producers[s]:
                self.define(rank, (Kind.G, p, b, self.header.graph.gradient_consumer(p, s)), self.part(s))
        if i.op == Op.BWD_I:
            self.define(rank, ("half", s, b, -1), True)
        if i.op in (Op.BWD, Op.BWD_W):
            for k in self.header.weight_shards.parts(s):
                self.add(rank, s, k, Counter({b: 1}))
            del self.held[rank]["saved", s, b, -1]
        if i.op == Op.BWD_W:
            del self.held[rank]["half", s, b, -1]


@pytest.fixture(scope="session")
def execute():
    return lambda program: Executor(program).run()


@pytest.fixture(scope="session")
def runs_as_proved(execute):
    """Assert that a program is proved, and runs with the peaks that the checker says."""

    def runs_as_proved(program):
        memory = check(program)
        assert execute(program) == [
            {field: int(peak[rank]) for field, peak in memory._asdict().items()}
            for rank in range(program.header.workers)
        ]

    return runs_as_proved


@pytest.fixture(scope="session")
def runs_if_accepted(runs_as_proved):
    """Assert the same of a damaged program, unless it is refused."""

    def runs_if_accepted(program):
        try:
            check(program)
        except RefusedFile:
            event("refused")
            return
        event("accepted")
        runs_as_proved(program)

    return runs_if_accepted
