"""plan --graph: stages that join layers which read several others, or share parameters."""

from __future__ import annotations

import json
import random

import numpy as np
from examples import ASKED

from schedgen.ir.graph_file import ModelGraph
from schedgen.ir.stage_graph import chain
from schedgen.planner.layer_profile import Layers
from schedgen.planner.plan import plan
from schedgen.planner.stage_costs import joined_graph, stage_costs
from schedgen.simulator.machine import Machine

COSTS = {"F": [1, 2, 1, 3, 2, 2], "B": [2, 4, 2, 6, 4, 4], "activation": 1, "weight": 1000, "beta": 0.001}
SKIPS = ((0, 1), (0, 3), (1, 2), (2, 3), (2, 5), (3, 4), (4, 5))


def layers_of(graph: ModelGraph, **sizes: object) -> Layers:
    names, edges = tuple(map(str, range(graph.stages))), graph.edges or chain(graph.stages)
    amounts = {"activation": np.arange(1.0, graph.stages + 1), "weight": np.full(graph.stages, 10.0)}
    times = {"F": np.ones(graph.stages), "B": np.full(graph.stages, 2.0)}
    return Layers(names, edges, times, Machine(**{**amounts, **sizes}), graph)


def test_stages_read_what_their_layers_read():
    graph = ModelGraph(6, SKIPS, tied=((0, 5), (1, 2), (0, 1, 2)))
    joined, sizes, leaving = joined_graph(layers_of(graph), graph, (1, 3, 5, 6))
    assert joined.edges == ((0, 1), (0, 2), (1, 2), (1, 3), (2, 3))
    assert joined.tied == ((0, 1), (0, 3))  # layers 1 and 2 are one stage
    assert joined.per_consumer == ()  # all read layer 0, and all of stage 1's consumers read layer 2
    assert sizes == {(0, 1): 1, (0, 2): 1, (1, 2): 3, (1, 3): 3, (2, 3): 5} and leaving == [1, 3, 5, 0]
    joined, sizes, leaving = joined_graph(layers_of(graph), graph, (3, 5, 6))
    assert (joined.edges, joined.per_consumer) == (((0, 1), (0, 2), (1, 2)), (0,))  # only stage 1 reads layer 0
    assert sizes == {(0, 1): 1 + 3, (0, 2): 3, (1, 2): 5} and leaving == [1 + 3, 5, 0]
    assert joined_graph(layers_of(graph), graph, (6,)) == (ModelGraph(1, ()), {}, [0])


def test_stages_share_what_their_layers_share():
    layers = layers_of(ModelGraph(6, SKIPS, tied=((0, 1, 2), (0, 5), (1, 2), (2, 5))), tied=[7, 10, 20, 40])
    for ends, shared in (((1, 3, 5, 6), [7, 10, 40]), ((3, 6), [10 + 40]), ((6,), [])):
        costs = stage_costs(layers, ends)
        assert costs.machine.tied.tolist() == shared and len(costs.tied) == len(shared)


def test_outputs_of_their_own_stay_apart():
    graph = ModelGraph(6, SKIPS, per_consumer=(0, 2))
    layers = layers_of(graph, edge_activation=[100, 200, 0, 300, 400, 0, 0])
    joined, sizes, leaving = joined_graph(layers, graph, (1, 3, 5, 6))
    assert (joined.per_consumer, sizes[0, 1], sizes[0, 2]) == ((0, 1), 100, 200)
    assert (sizes[1, 2], sizes[1, 3], sizes[2, 3]) == (300, 400, 5)
    joined, sizes, leaving = joined_graph(layers, graph, (1, 5, 6))
    assert (joined.per_consumer, sizes) == ((), {(0, 1): 100 + 200, (1, 2): 400 + 5})
    assert leaving == [100 + 200, 400 + 5, 0]


def test_a_message_has_the_bytes_that_go_along_its_edge():
    """A separate output for a consumer inside the stage is not sent, but kept for that consumer's backward."""
    graph = ModelGraph(4, ((0, 1), (0, 2), (1, 2), (2, 3)), per_consumer=(0,))
    layers = layers_of(graph, activation=np.array([100.0 + 7, 20, 30, 1]), edge_activation=[100, 7, 0, 0])
    costs = stage_costs(layers, (2, 3, 4))
    assert (costs.graph.per_consumer, costs.machine.edge_activation) == ((), None)
    assert costs.machine.activation.tolist() == [7 + 20, 30, 1] and costs.passed_on.tolist() == [7 + 20, 30]
    assert costs.machine.saved.tolist() == [2 + 100, 1, 1]  # each layer saves 1


def test_bounds_rule_out_no_schedule_of_a_graph(without_bounds):
    """Pruned candidates are no better than those found, also with skip connections and ties."""
    left_out = 0
    for seed in range(4 if ASKED else 2):
        chance = random.Random(seed)
        edges = {*chain(7)} | {tuple(sorted(chance.sample(range(7), 2))) for _ in range(4)}
        apart = tuple(s for s in range(6) if sum(p == s for p, _ in edges) > 1 and chance.random() < 0.5)
        graph = ModelGraph(7, tuple(sorted(edges)), apart, (tuple(sorted(chance.sample(range(7), 2))),))
        sizes = {
            "alpha": 0.05, "beta": 0.01, "activation": np.array([chance.uniform(1, 50) for _ in range(7)]),
            "edge_activation": np.array([chance.uniform(1, 50) for _ in edges]) if apart and seed % 2 else None,
        }  # fmt: skip
        arguments = layers_of(graph, **sizes), 4, 4, 1500
        schemes = ("1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "fsdp", "1f1b-rr")
        kept = plan(*arguments, bandwidth=100, schemes=schemes)
        with without_bounds():
            all_tried = plan(*arguments, bandwidth=100, schemes=schemes)
        assert kept.front == all_tried.front
        left_out += all_tried.simulated - kept.simulated
    assert left_out


def test_a_plan_is_cut_where_it_fits(run, tmp_path):
    """Stages of equal time do not fit here; stages of equal memory do."""
    (tmp_path / "profile.json").write_text(json.dumps(COSTS))
    options = ("--workers", 4, "--microbatches", 4, "--memory", 5000, "--schemes", "1f1b")
    done = run("plan", tmp_path / "profile.json", *options, "--json")
    assert done.code == 0, done.err
    assert sorted(json.loads(done.out)["schedules"][0]["layers"]) == [1, 1, 2, 2]


def test_a_plan_of_a_graph_takes_what_plan_says_with_that_graph(run, refused, tmp_path):
    profile, graph, path = (tmp_path / name for name in ("profile.json", "graph.json", "plan.json"))
    profile.write_text(
        json.dumps(COSTS | {"activation": [6, 5, 4, 3, 2, 1], "per_consumer": [*range(1, 8)], "tied": 8})
    )
    graph.write_text(json.dumps({"stages": 6, "edges": SKIPS, "per_consumer": [0, 2], "tied": [[0, 5]]}))
    options = ("--workers", 2, "--microbatches", 4, "--schemes", "gpipe", "--graph", graph)
    best = json.loads(run("plan", profile, *options, "--json", "-o", path).out)["schedules"][0]
    for command, name in (("simulate", "makespan"), ("stats", "peak_bytes")):
        numbers = json.loads(run(command, path, "--profile", profile, "--graph", graph, "--json").out)
        assert numbers[name] == best.get(name, best["step_time"])
        assert "give the stages' --graph, too" in refused(run(command, path, "--profile", profile), 1)
        assert "--graph needs --profile" in refused(run(command, path, "--graph", graph), 2)
    graph.write_text(json.dumps({"stages": 6}))
    profile.write_text(json.dumps(COSTS))
    for given in ((), ("--graph", graph)):
        said = refused(run("simulate", path, "--profile", profile, *given), 2)
        assert "the schedule's stages have other edges or ties than those of" in said
    assert run("compile", "1f1b", "--stages", 6, "--microbatches", 2, "-o", path).code == 0
    assert "leave it out" in refused(run("simulate", path, "--profile", profile, "--graph", graph), 2)


def test_a_graph_that_does_not_fit_is_refused(run, refused, tmp_path):
    profile, graph, other = (tmp_path / name for name in ("profile.json", "graph.json", "pipedream.txt"))
    profile.write_text(json.dumps(COSTS))
    other.write_text("a -- b -- forward_compute_time=1, backward_compute_time=1, activation_size=1, parameter_size=1\n")
    options = ("--workers", 2, "--microbatches", 4, "--graph", graph)
    for values, sentence in (
        ({"stages": 5}, "the graph has 5 stages, but "),
        ({"stages": 6, "tied": [[1]]}, "the graph has a tie of one stage"),
        ({"stages": 6, "layers": [1] * 6}, "the graph has layers, which a plan chooses"),
        ({"stages": 6, "edges": [[0, 1], [0, 2], [1, 3], [2, 3], [3, 4], [4, 5]]}, "stage 2 does not read stage 1"),
    ):
        graph.write_text(json.dumps(values))
        assert sentence in refused(run("plan", profile, *options), 2)
    graph.write_text(json.dumps({"stages": 1}))
    assert "has a graph of its own: leave --graph out" in refused(run("plan", other, *options), 2)
    profile.write_text(json.dumps(COSTS | {"per_consumer": [1, 1, 1, 1, 1]}))
    assert "give the stages' --graph, too" in refused(run("plan", profile, *options[:-2]), 1)
