"""plan: PipeDream's dynamic programme against brute force, and against what PipeDream's optimizer says of VGG-16."""

from __future__ import annotations

import itertools
import json
import math
import random
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import schedgen.util.jit
from schedgen.planner.layer_downsets import MOST_DOWNSETS, all_downsets
from schedgen.planner.layer_profile import Layers, read_layers
from schedgen.planner.partition import Level, data_parallel_seconds, partition, unreplicated
from schedgen.simulator.machine import Machine
from schedgen.util.errors import UsageError

VGG16 = Path(__file__).parents[2] / "data" / "vgg16.txt"  # PipeDream's profile of it, minibatches of 128


def profile(seconds, weight, activation, edges):
    """Layers with a third of the seconds in the forward."""
    seconds = np.array(seconds, float)
    machine = Machine(activation=np.array(activation, float), weight=np.array(weight, float), saved=0)
    names = tuple(map(str, range(len(seconds))))
    return Layers(names, tuple(edges), {"F": seconds / 3, "B": seconds / 3 * 2}, machine)


def drawn(rng, chain):
    count = rng.randint(1, 5)
    edges = [(at, at + 1) for at in range(count - 1)] if chain else []
    edges += [
        pair
        for pair in itertools.combinations(range(count), 2)
        if pair not in edges and rng.random() < 0.4 - 0.2 * chain
    ]
    seconds, weight, activation = ([rng.choice((0, 1, 2, 3, 5, 8, 20)) for _ in range(count)] for _ in range(3))
    seconds[0] = seconds[0] or 1
    activation = [size or 1 for size in activation]  # layers that cost nothing at all are no stage of their own
    return profile(seconds, weight, activation, edges)


def brute_force(layers, levels, memory):
    """The least seconds of a minibatch over all partitions that the model allows, by its definition."""
    count = len(layers.names)
    before = [sum(1 << a for a, b in layers.edges if b == layer) for layer in range(count)]
    closed = [
        state
        for state in range(1 << count)
        if all(not state >> layer & 1 or before[layer] & ~state == 0 for layer in range(count))
    ]
    crossing = {
        state: sum(
            layers.activation[a]
            for a in range(count)
            if state >> a & 1 and any(layer == a and not state >> b & 1 for layer, b in layers.edges)
        )
        for state in closed
    }

    def total(amounts, i, j):
        return sum(amount for layer, amount in enumerate(amounts) if (j & ~i) >> layer & 1)

    @cache
    def component(k, i, j, tail):
        """Seconds on a component of level k with, for each of its copies, `tail` workers behind it."""
        if k == 0:
            held = math.ceil(1 + tail) * (total(layers.kept, i, j) + total(layers.weight, i, j))
            return total(layers.seconds, i, j) if held <= memory else math.inf
        return pipeline(k, i, j, levels[k - 1].components, tail, first=True)

    @cache
    def pipeline(k, i, j, m, tail, first):
        """Seconds on m components of level k: the first m if `first`, else the last m."""
        B = levels[k - 1].bandwidth
        size = math.prod(level.components for level in levels[: k - 1])
        best = math.inf
        for s in closed:
            if s == i or i & ~s or s & ~j:
                continue
            for q in [m] if s == j else range(1, m):
                behind = Fraction(tail + (m - q) * size, q)
                time = (component(k - 1, i, s, behind) + 4 * (q - 1) * total(layers.weight, i, s) / (q * B)) / q
                if not first:
                    time = max(time, 2 * crossing[i] / (B * q), 2 * crossing[s] / (B * q))
                if s != j:
                    time = max(time, pipeline(k, s, j, m - q, tail, first=False))
                best = min(best, time)
        return best

    return component(len(levels), 0, (1 << count) - 1, Fraction(0))


@pytest.mark.parametrize("chain", [True, False], ids=["chain", "DAG"])
@pytest.mark.parametrize("sizes", [(1,), (2,), (3,), (4,), (2, 2), (2, 3), (3, 2)], ids=str)
def test_it_is_as_good_as_trying_everything(sizes, chain):
    rng = random.Random(f"{sizes} {chain}")
    fitted = 0
    for _ in range(36):
        layers = drawn(rng, chain)
        levels = [Level(m, rng.choice((0.5, 2.0, 7.0))) for m in sizes]
        held = (layers.kept + layers.weight).sum()
        downsets = all_downsets(layers)
        for memory in (math.inf, rng.uniform(0.3, 1.5) * held):
            best = brute_force(layers, levels, memory)
            if math.isinf(best):
                with pytest.raises(UsageError, match="fits"):
                    partition(downsets, levels, memory)
                continue
            fitted += memory < held
            best_partition = partition(downsets, levels, memory)
            assert best_partition.seconds == pytest.approx(best, rel=1e-12), (layers, levels, memory)
            assert sum(stage.replicas for stage in best_partition.stages) == math.prod(sizes)
            assert (best_partition.stages[0].begin, best_partition.stages[-1].end) == (0, len(downsets.seconds) - 1)
            for a, b in itertools.pairwise(best_partition.stages):
                assert a.end == b.begin
            for stage in best_partition.stages:
                kept = downsets.kept[stage.end] - downsets.kept[stage.begin]
                assert stage.in_flight * (kept + downsets.weight[stage.end] - downsets.weight[stage.begin]) <= memory
    assert fitted > 1 or sizes == (1,)


def test_straight_partitions_are_as_good_as_trying_every_place_for_the_cuts():
    rng = random.Random("straight")
    for _ in range(40):
        layers = drawn(rng, chain=True)
        downsets = all_downsets(layers)
        last = len(downsets.seconds) - 1
        partitions = unreplicated(downsets, 2.0, 4)
        assert len(partitions) == min(4, last)
        for stages, candidate in enumerate(partitions, start=1):
            assert len(candidate.stages) == stages
            best = math.inf
            for inner in itertools.combinations(range(1, last), stages - 1):
                seconds = np.diff(downsets.seconds[[0, *inner, last]])
                best = min(best, max(*seconds, *downsets.crossing[list(inner)], 0))
            assert candidate.seconds == pytest.approx(best, rel=1e-12)


# What optimizer_graph_hierarchical.py prints for this file with --activation_compression_ratio 1, without which it
# leaves transfers out: replicas, seconds, and how many times data parallelism.
PIPEDREAM = [
    (4, 1e9, [3, 1], 0.205520896, 2.837698712640879),
    (16, 1.25e9, [13, 2, 1], 0.05479489083076921, 2.660861136676038),
]


@pytest.mark.parametrize(("workers", "bandwidth", "replicas", "seconds", "times"), PIPEDREAM)
def test_vgg16_is_cut_as_pipedream_cuts_it(run, workers, bandwidth, replicas, seconds, times):
    options = ("--workers", workers, "--bandwidth", bandwidth, "--partition-only")
    result = run("plan", VGG16, *options, "--json")
    assert (result.code, result.err) == (0, "")
    numbers = json.loads(result.out)
    assert [stage["replicas"] for stage in numbers["stages"]] == replicas
    assert numbers["stage_time"] == pytest.approx(seconds, rel=1e-12)
    assert numbers["speedup_over_data_parallel"] == pytest.approx(times, rel=1e-12)
    assert numbers["noam"] == -(-workers // replicas[0])
    listed = [layer for stage in numbers["stages"] for layer in stage["layers"]]
    assert listed == [f"node{number}" for number in range(1, 42)]
    words = run("plan", VGG16, *options).out
    assert f"{seconds:.6g} s a minibatch" in words and f"{times:.3g} times" in words


@pytest.mark.parametrize(
    ("bandwidth", "what", "words"), [("2", "transfer", "receives and sends"), ("100", "time", "its own time")]
)
def test_a_plan_says_what_its_slowest_stage_waits_for(run, tmp_path, bandwidth, what, words):
    """Layers of 1 and 2 seconds, and 3 bytes from one to the other."""
    rest = "activation_size=3, parameter_size=900"
    path = tmp_path / "two.txt"
    path.write_text(
        f"a -- L -- forward_compute_time=500, backward_compute_time=500, {rest}\n"
        f"b -- L -- forward_compute_time=900, backward_compute_time=1100, {rest}\n\ta -- b\n"
    )
    options = ("--workers", "2", "--bandwidth", bandwidth, "--partition-only")
    numbers = json.loads(run("plan", path, *options, "--json").out)
    assert numbers["bottleneck"] == {"stage": 1, "what": what}
    assert numbers["stage_time"] == max(2 * 3 / float(bandwidth), 2)
    last = run("plan", path, *options).out.splitlines()
    assert any(line.endswith(f"the bottleneck is stage 1: {words}" if what == "time" else words) for line in last)


def test_levels_are_charged_as_the_formula_says():
    """Two layers of 4 s, 2 x 2 workers: copies of both on each pair, or a pair each."""
    layers = profile([4, 4], [10, 10], [6, 0], [(0, 1)])
    fast, slow = Level(2, 100.0), Level(2, 10.0)
    both = data_parallel_seconds(all_downsets(layers), [fast, slow])
    assert both == ((8 + 4 * 20 / (2 * 100)) / 2 + 4 * 20 / (2 * 10)) / 2
    pairs = partition(all_downsets(layers), [fast, slow])
    assert [stage.replicas for stage in pairs.stages] == [2, 2]
    assert pairs.seconds == pytest.approx((4 + 4 * 10 / (2 * 100)) / 2)  # 2 * 6 / 10 s to hand over is less


def test_kernels_plan_alike_as_python_and_compiled(monkeypatch):
    layers = read_layers(str(VGG16))
    results = []
    for small in (10**12, 0):
        monkeypatch.setattr(schedgen.util.jit, "SMALL", small)
        results.append(partition(all_downsets(layers), [Level(4, 1e10), Level(2, 1e9)], 3e10))
    assert results[0] == results[1]


def test_a_graph_with_too_many_cuts_is_cut_along_one_order(run, tmp_path):
    """13 layers that do not read each other have 2**13 closed sets."""
    wide = 13
    assert 2**wide > MOST_DOWNSETS
    lines = [f"node{at} -- L -- forward_compute_time=1, backward_compute_time=1, activation_size=1, parameter_size=1"
             for at in range(wide + 2)]  # fmt: skip
    lines += [f"\tnode0 -- node{at + 1}\n\tnode{at + 1} -- node{wide + 1}" for at in range(wide)]
    path = tmp_path / "wide.txt"
    path.write_text("\n".join(lines))
    result = run("plan", path, "--workers", "3", "--bandwidth", "1e6", "--partition-only", "--json")
    numbers = json.loads(result.out)
    assert result.code == 0 and "too many ways to cut" in result.err and not numbers["all_cuts"]
    assert numbers["stage_time"] == pytest.approx(0.010, rel=1e-3)  # 5 layers of 15, of 2 ms each
