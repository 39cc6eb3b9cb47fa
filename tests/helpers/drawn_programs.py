"""Random schemes, and random programs that combine the compiler's features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np
from hypothesis import assume, event
from hypothesis.extra.numpy import arrays

from schedgen.checker import check_compiled
from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.compiler.sum_trees import ALLREDUCE, SUMS
from schedgen.ir.instructions import DIRECTIONS, B, F
from schedgen.ir.program import Program
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.util.errors import UsageError

# Every feature, and those that it does not go with. Any program may have a split backward, several owners of a stage,
# any stage graph, and outputs per consumer.
FEATURES = {
    "tied": {"shards", "versions", "sums"},
    "recompute": {"forward"},
    "offload": {"forward", "evict"},
    "evict": {"forward", "offload"},
    "offload optimizer": {"forward", "versions"},
    "memory limit": {"forward"},
    "forward": {"recompute", "offload", "evict", "offload optimizer", "memory limit", "versions", "sums"},
    "shards": {"tied", "slices", "versions", "sums"},
    "slices": {"shards", "versions", "sums"},
    "versions": {"tied", "offload optimizer", "forward", "shards", "slices", "sums"},
    "sums": {"tied", "forward", "shards", "slices", "versions"},
}


class Case(NamedTuple):
    """A random scheme and the options it is compiled with; arrays are (D, S, B)."""

    sizes: Sizes
    weights: np.ndarray
    compute: np.ndarray
    n: np.ndarray
    edges: tuple[tuple[int, int], ...]
    per_consumer: tuple[int, ...]
    cost: dict[str, int]
    weight_slots: int
    fan_out: int
    prefetch: int
    recompute: list[int | tuple[int, int]]
    offload: list[int | tuple[int, int]] | str
    tied: list[set[int]]
    w: Callable[..., Any] | None = None  # in place of weights and compute
    updates: str = "flush"
    sums: str = ALLREDUCE
    hosts: Callable[[int], Any] | None = None

    def scheme(self):
        return Scheme(
            "random",
            self.sizes.workers,
            self.w or (lambda s, b, d: (self.weights[d, s, b], self.compute[d, s, b])),
            lambda s, b, d: self.n[d, s, b],
            "random",
            "greedy",
            split=len(self.cost) == 3,
            edges=self.edges,
            per_consumer=self.per_consumer,
            updates=self.updates,
        )

    def options(self, **more):
        named = ("cost", "weight_slots", "fan_out", "prefetch", "recompute", "sums", "hosts", "offload")
        tied = [sorted(stages) for stages in self.tied]
        return Options(**({name: getattr(self, name) for name in named} | {"tied": tied} | more))

    def compile(self, **more):
        return compile(self.scheme(), self.sizes, self.options(**more))


def forwards(stages: int, microbatches: int) -> st.SearchStrategy[int | tuple[int, int]]:
    """A stage, or a stage and a microbatch."""
    stage = st.integers(0, stages - 1)
    return st.one_of(stage, st.tuples(stage, st.integers(0, microbatches - 1)))


@st.composite
def cases(draw) -> Case:
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
        recompute=draw(st.lists(forwards(S, batches), max_size=2)),
        offload=[],
        tied=draw(st.lists(st.sets(st.integers(0, S - 1), min_size=2), max_size=3)) if S > 1 else [],
    )


def with_shards(draw, case: Case) -> Case:
    """Divides the weights of stages; every shard has any owner."""
    S, workers = case.sizes.stages, case.sizes.workers
    counts = tuple(draw(st.lists(st.integers(1, 4), min_size=S, max_size=S).filter(lambda counts: max(counts) > 1)))
    owners = draw(arrays(np.int32, (S, 4), elements=st.integers(0, workers - 1)))

    def by_shard(s, b, d, k):
        return owners[s, k], case.compute[d, s, b]

    weights = np.broadcast_to(owners[:, :1], case.weights.shape)
    return case._replace(
        sizes=case.sizes._replace(shards=counts), weights=weights, w=draw(st.sampled_from([None, by_shard]))
    )


def with_loans(case: Case) -> Case:
    """One worker has all stages but the last, and does all forwards first, so that another has room."""
    compute, sizes = np.zeros_like(case.compute), case.sizes
    compute[:, 1:][:, -1:] = 1
    n = case.n.copy()
    n[F] -= 20
    return case._replace(compute=compute, n=n, sizes=sizes._replace(workers=max(sizes.workers, 2)), prefetch=0)


def with_versions(draw, case: Case) -> Case:
    """Any replicas on any workers, one microbatch after the other on each, with backwards about in their order."""
    S, batches, workers = case.sizes.stages, case.sizes.microbatches, case.sizes.workers
    compute = np.empty(case.compute.shape, np.int32)
    for s in range(S):
        ranks = draw(st.permutations(range(workers)))[: draw(st.integers(1, workers))]
        compute[:, s] = np.array(ranks)[np.arange(batches) % len(ranks)]
    n = case.n % 4 + 2 * np.arange(batches)
    n[1:] -= draw(st.integers(0, 1)) * 20
    return case._replace(
        compute=compute, weights=compute, n=n, updates=draw(st.sampled_from(("stash", "vertical", "2bw")))
    )


def with_slices(draw, case: Case) -> tuple[Scheme, Sizes, Options]:
    """Slices and substages; w(s, b, d) or w(s, b, d, t) places slices."""
    T, P, S = draw(st.integers(2, 3)), draw(st.integers(1, 2)), case.sizes.stages
    replicated = sorted(draw(st.sets(st.integers(0, S * P - 1))))
    # What a sliced stage gives is one sum.
    case = case._replace(per_consumer=tuple(s for s in case.per_consumer if s * P + P - 1 in replicated))
    options = case.options(tensor=T, substages=P, replicated_stages=replicated)
    if draw(st.booleans()):
        return case.scheme(), case.sizes, options
    shuffled = np.random.default_rng(draw(st.integers(0, 2**16)))
    jobs = case.compute.shape[1:]
    forward = np.array([shuffled.permutation(T + 1)[:T] for _ in range(np.prod(jobs))]).reshape(*jobs, T)
    alike = sorted({S - 1, *(stage // P for stage in replicated)})
    forward[alike] = forward[alike, :1]  # others add up alike only by chance
    backward = forward if draw(st.booleans()) else forward[..., ::-1]

    def by_slice(s, b, d, t):
        on = np.where(d == F, forward[s, b, t], backward[s, b, t])
        return on, on

    return case.scheme()._replace(w=by_slice, workers=T + 1, by_slice=True), case.sizes._replace(workers=T + 1), options


def with_sums(draw, case: Case) -> Case:
    """Any owners, on any hosts of neighbours, that sum by messages."""
    weights = draw(arrays(np.int32, case.weights.shape, elements=st.integers(0, case.sizes.workers - 1)))
    hosts = np.sort(draw(arrays(np.int32, case.sizes.workers, elements=st.integers(0, 3))))
    return case._replace(
        weights=draw(st.sampled_from((weights, case.compute))), sums=draw(st.sampled_from(SUMS[1:])),
        hosts=lambda workers: hosts[:workers],
    )  # fmt: skip


@st.composite
def programs(draw, *required: str, without: tuple[str, ...] = ()) -> Program:
    """A compiled program with the features that are required, and others that go with them."""
    features = set(required)
    for feature in draw(st.permutations(list(FEATURES))):
        if feature not in without and not features & FEATURES[feature] and draw(st.booleans()):
            features.add(feature)
    case = draw(cases().filter(lambda case: case.tied or "tied" not in required))
    named = forwards(case.sizes.stages, case.sizes.microbatches)
    case = case._replace(
        tied=case.tied if "tied" in features else [],
        recompute=case.recompute if "recompute" in features else [],
        offload=draw(st.just("all") | st.lists(named, min_size=1, max_size=3)) if "offload" in features else [],
    )
    if "evict" in required or ("evict" in features and draw(st.booleans())):
        case = with_loans(case)
    if "shards" in features:
        case = with_shards(draw, case)
    if "versions" in features:
        case = with_versions(draw, case)
    if "sums" in features:
        case = with_sums(draw, case)
    scheme, sizes, options = case.scheme(), case.sizes, case.options()
    if "slices" in features:
        scheme, sizes, options = with_slices(draw, case)
    limit = draw(st.integers(1, 6)) if "memory limit" in features else None
    options = replace(
        options, memory_limit=limit, forward="forward" in features, offload_optimizer="offload optimizer" in features,
        evict="evict" in features,
    )  # fmt: skip
    program = None
    has_to = {"offload", "evict"} & set(required)
    for tried in (options, *[replace(options, offload=(), evict=False)] * (not has_to)):  # often there is no room
        try:
            program = program or compile(scheme, sizes, tried)
            check_compiled(program)
        except UsageError as error:
            event(f"not compiled: {str(error)[:40]}")
            program = None
    assume(program)
    for feature in sorted(features):
        event(feature)
    return program
