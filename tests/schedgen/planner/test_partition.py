"""plan: PipeDream's dynamic programme against brute force, and against what PipeDream's optimizer says of VGG-16."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest

import schedgen.util.jit
from schedgen.planner.layer_profile import Layers, read_layers
from schedgen.planner.partition import partition, prefixes, unreplicated
from schedgen.simulator.machine import Machine
from schedgen.util.errors import UsageError

VGG16 = Path(__file__).parents[2] / "data" / "vgg16.txt"  # PipeDream's profile of it, minibatches of 128


def drawn(rng):
    """Up to 6 layers, with some skip connections; a third of the seconds are in the forward."""
    count = rng.randint(1, 6)
    pairs = itertools.combinations(range(count), 2)
    edges = tuple((a, b) for a, b in pairs if b == a + 1 or rng.random() < 0.2)
    seconds, weight, activation = (
        np.array([rng.choice((0, 1, 2, 3, 5, 8, 20)) for _ in range(count)], float) for _ in range(3)
    )
    seconds[0] = seconds[0] or 1
    activation = np.maximum(activation, 1)  # layers that cost nothing at all are no stage of their own
    names, times = tuple(map(str, range(count))), {"F": seconds / 3, "B": seconds / 3 * 2}
    return Layers(names, edges, times, Machine(activation=activation, weight=weight, saved=0))


def brute_force(layers, workers, bandwidth, memory):
    """The least seconds of a minibatch over all cuts and replicas, by the definition."""
    count, best = len(layers.names), math.inf
    crossing = [0.0] * (count + 1)
    for cut in range(1, count):
        producers = {a for a, b in layers.edges if a < cut <= b}
        crossing[cut] = sum(layers.activation[a] for a in producers)
    for stages in range(1, min(count, workers) + 1):
        for inner in itertools.combinations(range(1, count), stages - 1):
            for ends in itertools.combinations(range(1, workers), stages - 1):
                time, cuts, replicas = 0.0, [0, *inner, count], np.diff([0, *ends, workers])
                for k, (i, j, m) in enumerate(zip(cuts[:-1], cuts[1:], replicas, strict=True)):
                    weight, in_flight = layers.weight[i:j].sum(), math.ceil(sum(replicas[k:]) / m)
                    if in_flight * (layers.kept[i:j].sum() + weight) > memory:
                        time = math.inf
                    time = max(time, (layers.seconds[i:j].sum() + 4 * (m - 1) * weight / (m * bandwidth)) / m)
                    if k:
                        time = max(time, *(2 * crossing[cut] / (bandwidth * m) for cut in (i, j)))
                best = min(best, time)
    return best


@pytest.mark.parametrize("workers", range(1, 7))
def test_it_is_as_good_as_trying_everything(workers):
    rng = random.Random(workers)
    fitted = 0
    for _ in range(60):
        layers, bandwidth = drawn(rng), rng.choice((0.5, 2.0, 7.0))
        held = (layers.kept + layers.weight).sum()
        for memory in (math.inf, rng.uniform(0.3, 1.5) * held):
            best = brute_force(layers, workers, bandwidth, memory)
            if math.isinf(best):
                with pytest.raises(UsageError, match="fits"):
                    partition(prefixes(layers), workers, bandwidth, memory)
                continue
            fitted += memory < held
            best_partition = partition(prefixes(layers), workers, bandwidth, memory)
            assert best_partition.seconds == pytest.approx(best, rel=1e-12), (layers, workers, memory)
            assert sum(best_partition.replicas) == workers
            assert (best_partition.stages[0].begin, best_partition.ends[-1]) == (0, len(layers.names))
            assert all(a.end == b.begin for a, b in itertools.pairwise(best_partition.stages))
            for stage in best_partition.stages:
                held_once = (layers.kept + layers.weight)[stage.begin : stage.end].sum()
                assert stage.in_flight * held_once == stage.memory <= memory
    assert fitted > 1 or workers == 1


def test_straight_partitions_are_as_good_as_trying_every_place_for_the_cuts():
    rng = random.Random("straight")
    for _ in range(40):
        layers = drawn(rng)
        cuts = prefixes(layers)
        last = len(layers.names)
        partitions = unreplicated(cuts, 2.0, 4)
        assert len(partitions) == min(4, last)
        for stages, candidate in enumerate(partitions, start=1):
            assert len(candidate.stages) == stages
            best = math.inf
            for inner in itertools.combinations(range(1, last), stages - 1):
                seconds = np.diff(cuts.seconds[[0, *inner, last]])
                best = min(best, max(*seconds, *cuts.crossing[list(inner)], 0))
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


def test_kernels_plan_alike_as_python_and_compiled(monkeypatch):
    layers = read_layers(str(VGG16))
    results = []
    for small in (10**12, 0):
        monkeypatch.setattr(schedgen.util.jit, "SMALL", small)
        results.append(partition(prefixes(layers), 8, 1e9, 3e10))
    assert results[0] == results[1]
