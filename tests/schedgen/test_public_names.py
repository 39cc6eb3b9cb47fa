"""`import schedgen` gives its public names, and imports no more than it is asked for."""

import subprocess
import sys

import pytest

import schedgen
from schedgen import UsageError
from schedgen.simulator.machine import Machine

SIZES = schedgen.Sizes(stages=2, microbatches=2)


@pytest.mark.parametrize("name", schedgen.__all__)
def test_every_public_name_is_there_and_told(name):
    assert getattr(schedgen, name) is not None
    assert name == "__version__" or any(
        name in line.split("  ")[0].split(", ") for line in schedgen.__doc__.splitlines()
    )


def test_importing_it_alone_imports_no_numpy():
    subprocess.run([sys.executable, "-c", "import sys, schedgen; sys.exit('numpy' in sys.modules)"], check=True)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "Greedy"}, {"mode": "greedy", "memory_limit": 2.5}, {"mode": "greedy", "memory_limit": 0},
        {"tensor": 0}, {"substages": 0}, {"prefetch": -1}, {"weight_slots": 0}, {"fan_out": 0}, {"recompute": "al"},
        {"recompute": ""}, {"offload": "except-last"}, {"sums": "star"},
    ],
    ids=str,
)  # fmt: skip
def test_options_out_of_range_are_refused(options):
    with pytest.raises(UsageError, match=list(options)[-1]):
        schedgen.compile(schedgen.load("gpipe", SIZES), SIZES, schedgen.Options(**options))


@pytest.mark.parametrize("sizes", [(0, 8), (4, 0), (4, 8, 0), (2.0, 8), (None, 8)])
def test_sizes_out_of_range_are_refused(sizes):
    sizes = schedgen.Sizes(*sizes)
    with pytest.raises(UsageError, match="is not a whole number of at least 1"):
        schedgen.load("1f1b", sizes)
    with pytest.raises(UsageError, match="is not a whole number of at least 1"):
        schedgen.compile(schedgen.load("1f1b", SIZES), sizes)


@pytest.mark.parametrize("cost", [0, -1, float("nan"), float("inf"), [1, 0]], ids=str)
def test_a_cost_that_is_no_time_is_refused_as_such(cost):
    program = schedgen.compile(schedgen.load("gpipe", SIZES), SIZES)
    wrong = cost[1] if isinstance(cost, list) else float(cost)
    for call in (
        lambda: schedgen.simulate(program, {"F": 1, "B": cost}),
        lambda: schedgen.stats(program, {"F": 1, "B": cost}),
        lambda: schedgen.compile(schedgen.load("gpipe", SIZES), SIZES, schedgen.Options(cost={"F": 1, "B": cost})),
    ):
        with pytest.raises(UsageError, match=rf"^costs: B should be a time above 0, not {wrong:g}(\.0)?$"):
            call()
    with pytest.raises(UsageError, match=r"^costs: R should be a time of at least 0, not -1$"):
        schedgen.simulate(program, {"F": 1, "B": 2, "R": -1})


def test_sizes_below_0_are_refused():
    program = schedgen.compile(schedgen.load("gpipe", SIZES), SIZES)
    with pytest.raises(UsageError, match="sizes of -1 bytes are below 0"):
        schedgen.simulate(program, {"F": 1, "B": 2}, Machine(weight=-1))


def test_a_study_reads_files_by_their_paths(tmp_path):
    """The readers give what `plan`, `simulate` and `stats` take; `plan` reads a profile itself, too."""
    profile, file = tmp_path / "profile.json", tmp_path / "machine.json"
    profile.write_text('{"F": [1, 2, 1, 2], "B": [2, 4, 2, 4], "activation": 10, "beta": 0.01}')
    file.write_text('{"levels": [{"name": "host", "alpha": 0, "beta": 0.1}]}')
    network = schedgen.read_network(file)
    assert network == schedgen.Network((schedgen.Level("host", 0, 0.0, 0.1),))
    slow, fast = (
        schedgen.plan(given, 2, 4, schemes=["1f1b"], network=network_of)
        for given, network_of in ((profile, network), (schedgen.read_layers(profile), None))
    )
    assert slow.front[0].step_time > fast.front[0].step_time
    cost, machine = schedgen.read_profile(profile, fast.program)
    assert schedgen.simulate(fast.program, cost, machine).end.max() == fast.front[0].step_time
    for wrong in ({"bandwidth": 0}, {"bandwidth": 1e9, "network": network}):
        with pytest.raises(UsageError, match=r"^bandwidth should be above 0"):
            schedgen.plan(profile, 2, 4, **wrong)


def test_a_search_takes_what_the_command_does():
    scheme = schedgen.load("zb-h1", SIZES)
    found = schedgen.search(scheme, SIZES, memory_limit=2, budget=1)
    assert found.value == schedgen.simulate(found.program).latency >= found.bound
    for wrong, words in (
        ({"cost": {"F": 1}}, "must give F and B"),
        ({"objective": "time"}, "objective 'time' is none of window, latency"),
        ({"memory_limit": 2, "memory": 9}, "give one of them"),
    ):
        with pytest.raises(UsageError, match=words):
            schedgen.search(scheme, SIZES, **wrong)
