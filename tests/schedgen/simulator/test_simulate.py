"""simulate: the list is executed, links carry one message at a time, and idle time has a cause."""

import json
import math

import numpy as np
from compiled import compiled

from schedgen.ir.instructions import Kind, Op
from schedgen.schemes.scheme import Sizes
from schedgen.simulator.machine import Machine
from schedgen.simulator.simulate import simulate

COST = {"F": 1, "B": 2}


def test_relays_spare_the_owner_and_beat_the_star():
    """FSDP, 64 workers: the owner sends a stage twice a use; a use is a fetch for F or for B."""
    sizes = Sizes(64, 64, 64)
    relay, star = (compiled("fsdp", sizes, fan_out=fan_out) for fan_out in (2, 64))
    table = relay.rows
    direct = (table.op == Op.SEND) & (table.kind == Kind.W) & (table.stage == table.rank)
    assert np.bincount(table.rank[direct]).max() <= 2 * 2
    for machine in (Machine(beta=0.1), Machine(alpha=0.05, beta=0.2)):
        ends = [simulate(program, COST, machine).end.max() for program in (relay, star)]
        assert ends[0] < ends[1]
    assert simulate(relay, COST).end.max() == 192  # messages without time: as if all weights were at home


def test_the_command_writes_numbers_and_a_trace_perfetto_reads(run, tmp_path):
    path, trace = tmp_path / "a.json", tmp_path / "trace.json"
    assert run("compile", "1f1b", "--stages", 4, "--microbatches", 8, "-o", path).code == 0
    result = run("simulate", path, "--alpha", "0.1", "--json", "--trace", trace)
    numbers = json.loads(result.out)
    assert numbers["latency"] > 33 and numbers["bytes"]["activation"] == 3 * 8
    assert sum(link["bytes"] for link in numbers["links"]) == 2 * 3 * 8
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" and event["dur"] > 0 for event in events) == 2 * 4 * 8
    assert {event["ph"] for event in events} == {"M", "X", "s", "f"}


def test_a_profile_gives_times_and_bytes_by_stage(run, refused, tmp_path):
    # One microbatch through three stages: forwards 1 + 2 + 3, backwards 6 + 4 + 2, messages of x.0 and x.1 and back.
    path, profile = tmp_path / "a.json", tmp_path / "profile.json"
    assert run("compile", "gpipe", "--stages", 3, "--microbatches", 1, "-o", path).code == 0
    costs = {"F": [1, 2, 3], "B": [2, 4, 6], "alpha": 0.5, "beta": 0.25, "activation": [2, 4, 1], "weight": [5, 6, 7]}
    profile.write_text(json.dumps(costs))
    numbers = json.loads(run("simulate", path, "--profile", profile, "--json").out)
    assert numbers["latency"] == 6 + 12 + 2 * (0.5 + 0.25 * 2) + 2 * (0.5 + 0.25 * 4)
    assert numbers["bytes"]["activation"] == 2 + 4 and numbers["peak_memory"]["weight_gradient"] == [5, 6, 7]
    profile.write_text(json.dumps({**costs, "step": [7, 1, 2]}))
    steps = json.loads(run("simulate", path, "--profile", profile, "--json").out)
    assert steps == {**numbers, "makespan": numbers["makespan"] + 7, "workers": steps["workers"]}
    for wrong, words in (
        ({"F": [1, 2], "B": 1}, "2 numbers"),
        ({"F": [1, -1, 1], "B": 1}, "F should be a number of at least 0"),
        ({"F": 1, "B": math.nan}, "B should be a number of at least 0"),
        ({"F": 1, "B": 2, "weight": [1, 1e18, 1]}, "a number of at least 0 and below 1e+18, or a list"),
        ({"F": 1, "B": 2, "alpha": 1e300}, "alpha should be a number of at least 0 and below 1e+18"),
        ({"F": 1, "B": 0}, "a time"),
        ({"F": 1, "B": 2, "alpha": [1, 1, 1]}, "alpha"),
        ({"F": 1, "B": 2, "gamma": 3}, "gamma"),
    ):
        profile.write_text(json.dumps(wrong))
        assert words in refused(run("simulate", path, "--profile", profile), 1)
    profile.write_text('{"F": 1}')  # of forwards alone
    assert f"{profile} must give F and B" in refused(run("simulate", path, "--profile", profile), 2)
    searched = run("search", "gpipe", "--stages", 3, "--microbatches", 3, "--profile", profile, "-o", "-")
    assert f"{profile} must give F and B" in refused(searched, 2)
    profile.write_text('{"F": 1, "B": 2}')
    assert run("compile", "zb-h1", "--stages", 3, "--microbatches", 3, "-o", path).code == 0
    assert f"{profile} must give F, I and W" in refused(run("simulate", path, "--profile", profile), 2)
