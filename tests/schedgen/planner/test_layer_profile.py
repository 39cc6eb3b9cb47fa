"""The profiles that plan reads: PipeDream's format, mpirun's JSON, and files that are neither."""

from __future__ import annotations

import json

import pytest

from schedgen.planner.layer_profile import MOST_PROFILED, read_layers
from schedgen.planner.partition import prefixes

OPTIONS = ("--workers", "2", "--bandwidth", "1e9", "--partition-only")


def layer(name, forward=1, backward=2, activation=3, parameters=4, description="L(a -- b, c=1)"):
    return (
        f"{name} -- {description} -- forward_compute_time={forward}, backward_compute_time={backward}, "
        f"activation_size={activation}, parameter_size={parameters}"
    )


@pytest.fixture
def read(tmp_path):
    def read(*lines):
        path = tmp_path / "profile.txt"
        path.write_text("\n".join(lines))
        return read_layers(str(path))

    return read


def test_times_are_milliseconds_and_sizes_bytes(read):
    layers = read(
        layer("node10", 1.5, 3.0, "[6.0; 1; 0.5]", 6.5),
        layer("node2", 2, 1, 5) + " -- stage_id=3\r",
        "",
        layer("node9"),
        "\tnode2 -- node10\r",
        "\tnode9 -- node10",
    )
    assert layers.names == ("node2", "node9", "node10") and layers.edges == ((0, 2), (1, 2))
    assert layers.times["F"].tolist() == [0.002, 0.001, 0.0015] and layers.times["B"].tolist() == [0.001, 0.002, 0.003]
    assert layers.activation.tolist() == [5, 3, 0] and layers.weight.tolist() == [4, 4, 7]
    assert layers.machine.saved.tolist() == [0, 0, 8] and layers.kept.tolist() == [5, 3, 8]  # the last goes to the loss


def test_inputs_and_parts_nobody_reads_cost_nothing_and_are_not_stages(read):
    layers = read(
        layer("a", 100, 0, 100, 0, "Input0"),
        layer("b"),
        layer("c", 0, 0, 9, 0, "__getitem__(1)"),
        layer("d", 0, 0, 5, 0, "__getitem__(0)"),
        layer("e"),
        "\ta -- b", "\tb -- c", "\tb -- d", "\td -- e",
    )  # fmt: skip
    assert layers.seconds.tolist() == [0, 0.003, 0, 0, 0.003] and layers.kept.tolist() == [0, 3, 0, 5, 3]
    cuts = prefixes(layers)
    assert cuts.end.tolist() == [0, 3, 4, 5] and cuts.crossing.tolist() == [0, 3, 5, 0]


def test_what_crosses_a_cut_is_what_is_read_behind_it(read):
    """A residual connection: a's output crosses every cut before d, which reads it."""
    layers = read(*(layer(name, 1, 1, size) for name, size in zip("abcd", (1, 10, 100, 1000), strict=True)),
                 "\ta -- b", "\tb -- c", "\tc -- d", "\ta -- d")  # fmt: skip
    assert prefixes(layers).crossing.tolist() == [0, 1, 11, 101, 0]


def test_a_profile_of_mpirun_is_a_chain_of_its_stages(tmp_path, run):
    values = {
        "F": [1, 1, 2], "I": [1, 1, 1], "W": [0.5, 0.5, 0.5], "alpha": 0.1, "beta": 0.25, "activation": [8, 4, 4],
        "weight": [1, 2, 3], "saved": 5, "workspace": {"F": [1, 2, 3]},
    }  # fmt: skip
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(values))
    layers = read_layers(str(path))
    assert layers.names == ("0", "1", "2") and layers.edges == ((0, 1), (1, 2))
    assert layers.seconds.tolist() == [2.5, 2.5, 3.5] and layers.kept.tolist() == [13, 9, 9]
    numbers = json.loads(run("plan", path, "--workers", "2", "--partition-only", "--json").out)
    assert numbers["bandwidth"] == 4.0  # 1 / beta
    assert [stage["layers"] for stage in numbers["stages"]] == [["0", "1"], ["2"]]
    assert numbers["stage_time"] == 5.0  # 2 * 4 / 4 to send is less
    assert numbers["stages"][0]["memory"] == 2 * (13 + 9 + 1 + 2)


@pytest.mark.parametrize(
    ("lines", "line", "words"),
    [
        (["hello"], 1, "not a layer"),
        ([layer("a"), layer("a")], 2, "a is listed twice"),
        ([layer("a", forward="fast")], 1, "forward_compute_time should be a number from 0 to 1e18, not 'fast'"),
        *(([layer("a", backward=bad)], 1, "backward_compute_time") for bad in ("nan", "-1", "1e18")),
        ([layer("a", activation="[1; 2")], 1, "activation_size"),
        ([layer("a"), "\ta -- b"], 2, "no layer above is called 'b'"),
        ([layer("a"), "\ta - a"], 2, "not an edge"),
        ([layer("n2"), layer("n10"), "\tn10 -- n2"], None, "the edge n10 -- n2 leads to an earlier layer"),
        ([layer("a", 0, 0)], None, "takes any time"),
        ([layer(f"n{at}") for at in range(MOST_PROFILED + 1)], MOST_PROFILED + 1, f"more than {MOST_PROFILED} layers"),
        (["{", ' "F": [1, 2],', ' "B": [1, 2]]', "}"], 3, "not JSON"),
        (["[1, 2]"], None, "should be an object with F and B"),
        (['{"F": [], "B": 1}'], None, "0 layers"),
        (['{"F": [1, 2], "B": [1]}'], None, "B has 1 number, but its first list is of 2 stages"),
        (['{"F": [1, "x"], "B": 1}'], None, "F should be a number"),
        (['{"F": [1, 2], "B": 1, "overhead": {"R": 1}}'], None, "overhead should have some of F, B, I and W, not 'R'"),
        (['{"F": [1, 2], "B": 1, "per_consumer": 5}'], None, "it has per_consumer, sizes of outputs per consumer"),
        (['{"F": ' + str([1] * (MOST_PROFILED + 1)) + ', "B": 1}'], None, f"{MOST_PROFILED + 1} layers"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_bad_profile_is_refused_in_one_sentence(run, refused, tmp_path, lines, line, words):
    path = tmp_path / "bad"
    path.write_text("\n".join(lines))
    message = refused(run("plan", path, *OPTIONS), 1)
    assert words in message and f"{path}:{line}: " in message if line else words in message
