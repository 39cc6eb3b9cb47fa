"""search --graph: orders for the stages of a model, whatever they read and share."""

import json
import math

import pytest
from examples import further

from schedgen.ir.file import parse
from schedgen.planner.order_search.problem import least_time
from schedgen.planner.order_search.question import Question
from schedgen.schemes import load
from schedgen.schemes.scheme import Sizes
from schedgen.simulator.machine import Machine

GRAPH = {
    "stages": 4,
    "edges": [[0, 1], [0, 3], [1, 2], [2, 3]],
    "per_consumer": [0],
    "tied": [[0, 3]],
    "layers": [1, 2, 2, 1],
}
LIMITS = [(), ("--memory-limit", 3), ("--memory-limit", 2, "--recompute"), ("--memory", 60)]


@pytest.fixture
def graph(tmp_path):
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(GRAPH))
    return file


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        *(("zb-h2", limits) for limits in LIMITS),
        *(("1f1b", limits) for limits in LIMITS if "--recompute" not in limits),
        *further(*(("1f1b", limits) for limits in LIMITS if "--recompute" in limits)),
    ],
)
def test_the_schedule_has_what_the_graph_says(name, limits, graph, run, tmp_path):
    """Also where a built-in scheme is as good as any order."""
    out = tmp_path / "found.json"
    done = run("search", name, "--graph", graph, "--microbatches", 4, "--budget", 1, *limits, "--json", "-o", out)
    assert done.code == 0, done.err
    header = parse(out.read_text(), "-").header
    assert (header.graph.edges, header.graph.per_consumer) == (((0, 1), (0, 3), (1, 2), (2, 3)), (0,))
    assert (header.tied, header.scheme["layers"]) == (((0, 3),), [1, 2, 2, 1])
    assert '"buf": "t.0"' in out.read_text() and run("check", out).code == 0
    numbers = json.loads(done.out)
    assert 0 < numbers["bound"] <= numbers["value"]


def test_two_towers_wait_for_each_other_at_the_end_alone(run, tmp_path):
    """Stages 0 to 2 and 3 to 6 meet in stage 7, on a V; one microbatch takes 5 F, 5 I, W of 3 and 4."""
    edges = [[0, 1], [1, 2], [2, 7], [3, 4], [4, 5], [5, 6], [6, 7]]
    (tmp_path / "graph.json").write_text(json.dumps({"stages": 8, "edges": edges}))
    command = ("search", "zb-v", "--graph", tmp_path / "graph.json", "--budget", 1, "--json", "-o", tmp_path / "out")
    for microbatches, limits in ((1, ()), (8, ()), (8, ("--memory-limit", 4))):
        numbers = json.loads(run(*command, "--microbatches", microbatches, *limits).out)
        assert run("check", tmp_path / "out").code == 0
        assert numbers["bound"] <= numbers["value"] and (numbers["bound"] == 12 or microbatches > 1)


def test_a_message_of_an_output_apart_has_its_own_size(graph, run, tmp_path):
    """Way of one microbatch: 4 F, 4 B of 2 and messages of 1, 10 and 10 there and back; not of 10 from stage 0 to 1."""
    costs = {"F": 1, "B": 2, "alpha": 0, "beta": 1, "activation": 10, "per_consumer": [1, 0, 5, 5]}
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    sizes = ("--microbatches", 1, "--profile", tmp_path / "costs.json")
    numbers = json.loads(run("search", "1f1b", "--graph", graph, *sizes, "--budget", 1, "--json").out)
    assert numbers["value"] == numbers["bound"] == 4 * 1 + 4 * 2 + 2 * (1 + 10 + 10)


@pytest.mark.parametrize(
    ("stages", "costs", "limit"),
    [
        (2, {"F": [6, 2], "B": [4, 3], "alpha": 5, "activation": 0.5}, ()),
        (3, {"F": [4, 3, 4], "B": [2, 4, 1], "saved": 1.9, "activation": 0, "weight": 0}, ("--memory", 3)),
    ],
    ids=["messages", "memory"],
)
def test_a_fraction_of_a_byte_counts_as_a_byte(stages, costs, limit, run, tmp_path):
    """The search and `simulate` see the same whole numbers: those of a profile whose bytes are rounded up by hand."""
    profile, found = tmp_path / "costs.json", tmp_path / "found.json"
    seen = []
    for values in (costs, {name: math.ceil(v) if isinstance(v, float) else v for name, v in costs.items()}):
        profile.write_text(json.dumps(values))
        sizes = ("--stages", stages, "--microbatches", 3, "--profile", profile)
        best = json.loads(run("search", "1f1b", *sizes, *limit, "--budget", 1, "--json", "-o", found).out)
        simulated = json.loads(run("simulate", found, "--profile", profile, "--json").out)
        assert simulated["latency"] == best["value"] and simulated["peak_bytes"] <= (3 if limit else math.inf)
        seen.append((best["value"], best["bound"], simulated))
    assert seen[0] == seen[1]


@pytest.mark.parametrize(("per_consumer", "first"), [((0,), 1), ((), 10)])
def test_the_bound_knows_which_outputs_are_apart(per_consumer, first):
    """Only separate outputs have sizes by edge; `first` is the size of the message from stage 0 to stage 1."""
    edges = ((0, 1), (0, 3), (1, 2), (2, 3))
    scheme = load("1f1b", Sizes(4, 1))._replace(edges=edges, per_consumer=per_consumer)
    machine = Machine(beta=1, activation=10, edge_activation=[1, 0, 5, 5])
    assert least_time(Question(scheme, Sizes(4, 1), {"F": 1, "B": 2}, machine)) == 12 + 2 * (first + 20)
