"""`import schedgen` gives its public names, and imports no more than it is asked for."""

import subprocess
import sys

import numpy as np
import pytest
from edited_programs import written

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


def test_the_example_of_the_docstring_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = schedgen.__doc__.splitlines()
    exec("\n".join(line[4:] for line in lines if line.startswith("    ")))
    with (tmp_path / "1f1b.json").open("rb") as file:
        assert schedgen.read(file, "1f1b.json")[0].header.stages == 4


@pytest.mark.parametrize(("word", "named"), [("all", [0, 1]), ("except-last", [(0, 0), (1, 0)])])
def test_all_forwards_may_be_redone_by_a_word(word, named):
    programs = [
        schedgen.compile(schedgen.load("gpipe", SIZES), SIZES, schedgen.Options(recompute=value))
        for value in (word, named)
    ]
    assert programs[0].header.lowering == programs[1].header.lowering
    assert [column.tolist() for column in programs[0].rows] == [column.tolist() for column in programs[1].rows]


def test_other_names_are_not_there():
    with pytest.raises(AttributeError, match="no attribute lower"):
        schedgen.lower  # noqa: B018


def test_importing_it_alone_imports_no_numpy():
    subprocess.run([sys.executable, "-c", "import sys, schedgen; sys.exit('numpy' in sys.modules)"], check=True)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "Greedy"}, {"mode": "greedy", "memory_limit": 2.5}, {"mode": "greedy", "memory_limit": 0},
        {"tensor": 0}, {"substages": 0}, {"prefetch": -1}, {"weight_slots": 0}, {"fan_out": 0}, {"recompute": "al"},
        {"recompute": ""},
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


def test_numpys_whole_numbers_are_whole_numbers():
    sizes, options = {"stages": 4, "microbatches": 8, "replicas": (2, 1, 1, 1)}, {"weight_slots": 3, "fan_out": 1}
    files = []
    for whole in (int, np.int64, np.uint8):
        given = schedgen.Sizes(**{k: tuple(map(whole, v)) if k == "replicas" else whole(v) for k, v in sizes.items()})
        chosen = schedgen.Options(**{name: whole(value) for name, value in options.items()})
        files.append(written(schedgen.compile(schedgen.load("1f1b-rr", given), given, chosen)))
    assert files[0] == files[1] == files[2]


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


def test_a_file_may_be_a_path(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def w(s, b, d):\n    return s, s\n\n\ndef n(s, b, d):\n    return b\n")
    assert schedgen.load(path, SIZES).name == "mine"


def test_a_scheme_is_two_functions():
    scheme = schedgen.Scheme("mine", None, lambda s, b, d: (s, s), lambda s, b, d: b, "b", "greedy")
    program = schedgen.compile(scheme, SIZES, schedgen.Options(prefetch=0))
    assert schedgen.check(program).saved.tolist() == [2, 1]  # the older microbatch goes first
    assert schedgen.stats(program)["latency"] == max(schedgen.simulate(program, {"F": 1, "B": 2}).end)


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
