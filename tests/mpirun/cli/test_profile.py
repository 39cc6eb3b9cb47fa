"""A profile has the costs of stages: its bytes are those worked out by hand here, and simulate accepts its times.

mlp.tiny in 4 stages: an embedding of 256 x 8 and 2 layers; 3 layers; 3 layers; 2 layers and the scores, 128 -> 256.
A microbatch is 64 samples of 17 bytes, cut from the text as int64.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from schedgen.cli.main import main as schedgen
from schedgen.simulator.machine_file import network_of

MLP = "mpirun.examples.mlp:tiny"
X = 64 * 128 * 4  # bytes of an activation
INPUT, TARGET = 64 * 16 * 8, 64 * 8
LAYER = (2 * 128 + 128 * 128 + 128) * 4  # weights: the norm's, the matrix, its bias
SCORES = (128 * 256 + 256) * 4
KEPT = 2 * X + 2 * 64 * 4  # by a layer besides its input: the norm's output, gelu's input, a mean and a deviation
LOSS = 64 * 256 * 4 + TARGET + 2 * 4  # kept by the loss: log softmax, the target, its own weight; the loss, for NORM
WEIGHT = [256 * 8 * 4 + 2 * LAYER, 3 * LAYER, 3 * LAYER, 2 * LAYER + SCORES]
TENSORS = [1 + 2 * 4, 3 * 4, 3 * 4, 2 * 4 + 2]

BYTES = {
    "activation": [X, X, X, 4],
    "weight": WEIGHT,
    "saved": [INPUT + TARGET + 2 * (X + KEPT), 3 * KEPT + 2 * X, 3 * KEPT + 2 * X, 2 * KEPT + 2 * X + LOSS],
    # The gradients that arrive at each norm and matrix, less what follows the last matrix (gelu's input, the loss) and
    # is no longer needed. The first stage has no gradient to send and keeps the one it received.
    "half": [X, 3 * 2 * X - X, 3 * 2 * X - X, 2 * 2 * X + 64 * 256 * 4 - (LOSS - 4)],
    "freed": [0, X, X, LOSS - 4],  # what is no longer needed
    # Moments, and a count of steps; a float for weight versions.
    "owned": [3 * weight + 8 * tensors for weight, tensors in zip(WEIGHT, TENSORS, strict=True)],
}


@pytest.fixture(scope="module")
def profiles(inside, compiled, text, tmp_path_factory):
    """Profiles by name, on 2 ranks or one."""
    folder = tmp_path_factory.mktemp("profiles")
    joined = compiled(
        """
        import numpy as np
        edges = [(0, 2), (1, 2), (0, 3), (2, 3)]
        split = True
        def w(s, b, d, *, stages):
            return s % 2, s % 2
        def n(s, b, d, *, stages):
            return b * 100 + np.where(d == 0, s, 10 - s + 50 * (d == 2))
        """,
        stages=4,
        microbatches=2,
    )
    options = {
        "whole": ("--model", MLP, "--stages", 4),
        "sgd": ("--model", MLP, "--stages", 4, "--optimizer", "sgd", "--seed", 1),
        "joined": ("--model", "models_for_tests:joined", "--schedule", joined),
        "seq2seq": ("--model", "models_for_tests:small_seq2seq", "--stages", 5),
    }
    runs = {name: ["profile", *some, "--text", text, "--threads", 1] for name, some in options.items()}
    runs = {name: [*run, "--steps", 2 if name == "whole" else 1, "-o", folder / name] for name, run in runs.items()}
    for ranks, names in ((2, ("whole", "sgd", "joined")), (1, ("seq2seq",))):
        for code, out, _ in inside(ranks, [{"arguments": runs[name]} for name in names]):
            assert (code, out) == (0, "")
    return {name: json.loads((folder / name).read_text()) for name in options} | {"files": folder, "schedule": joined}


def test_bytes_are_those_worked_out_by_hand(profiles):
    assert {key: profiles["whole"][key] for key in BYTES} == BYTES


def test_the_workspace_of_a_forward_is_what_gelu_returns(profiles):
    assert profiles["whole"]["workspace"]["F"][1:3] == [X, X]


def test_a_profile_is_complete(profiles):
    profile, times = profiles["whole"], ["F", "B", "I", "W", "step"]
    assert {*profile} == {*times, "machine", "overhead", "workspace", *BYTES}
    for direction, overhead in profile["overhead"].items():
        assert all(0 < a < b for a, b in zip(overhead, profile[direction], strict=True))
    for key in times:
        assert len(profile[key]) == 4 and min(profile[key]) > 0
    (level,) = network_of(profile["machine"], "P").levels
    assert level.name == "host" and level.latency(np.array(8)) + 8 * level.beta > 0
    assert {*profile["workspace"]} == {"F", "B", "I", "W"}


def test_bytes_depend_on_neither_time_nor_seed(profiles):
    for key in (*BYTES, "workspace"):
        own = [weight + 4 * tensors for weight, tensors in zip(WEIGHT, TENSORS, strict=True)]  # sgd has no state
        assert profiles["sgd"][key] == (own if key == "owned" else profiles["whole"][key])


@pytest.mark.parametrize("scheme", ["1f1b", "zb-v", "gpipe"])
def test_simulate_takes_it(profiles, compiled, capsys, scheme):
    schedule = compiled(scheme, stages=4, microbatches=4, workers=2)
    assert schedgen(["simulate", str(schedule), "--profile", str(profiles["files"] / "whole"), "--json"]) == 0
    profile, numbers = profiles["whole"], json.loads(capsys.readouterr().out)
    assert numbers["makespan"] >= numbers["latency"] + min(profile["step"])


def test_a_schedule_gives_stages_and_edges(profiles, capsys):
    profile = profiles["joined"]
    assert profile["activation"] == [64 * 64 * 4] * 3 + [4]
    assert schedgen(["simulate", str(profiles["schedule"]), "--profile", str(profiles["files"] / "joined")]) == 0


def test_without_a_schedule_stages_read_what_the_model_says(several, profiles, capsys):
    """Skip connections, separate outputs, ties: `plan` reads them from the graph, which it takes with the profile."""
    graph, plan = profiles["files"] / "seq2seq.graph", profiles["files"] / "seq2seq.json"
    ((code, _),) = several(1, [["graph", "--model", "models_for_tests:small_seq2seq", "--stages", 5, "-o", graph]])
    assert code == 0 and len(profiles["seq2seq"]["per_consumer"]) == len(json.loads(graph.read_text())["edges"]) > 3
    options = ["--graph", graph, "--workers", 2, "--microbatches", 4, "--schemes", "1f1b", "--bandwidth", 1e9]
    assert schedgen(["plan", str(profiles["files"] / "seq2seq"), *map(str, options), "-o", str(plan)]) == 0
    assert "tied" in json.loads(plan.read_text())


def test_one_rank_with_one_stage_has_no_links(mistakes, text, tmp_path):
    file = tmp_path / "p.json"
    (ended,) = mistakes(
        1, [["profile", "--model", MLP, "--stages", 1, "--text", text, "--steps", 1, "--threads", 1, "-o", file]]
    )
    assert (ended.code, ended.err) == (0, "")
    profile = json.loads(file.read_text())
    assert "machine" not in profile and len(profile["F"]) == 1
    assert list(tmp_path.iterdir()) == [file]


def test_a_model_that_fails_leaves_no_file(launch, text, tmp_path):
    options = ("--stages", 4, "--text", text, "-o", tmp_path / "p.json")
    result = launch(2, "profile", "--model", "models_for_tests:raises_in_stage", *options)
    assert result.code == 1 and '"op": "FWD", "stage": 2, "mb": 4}: RuntimeError: thirteen is' in result.ours[0]
    assert not list(tmp_path.iterdir())
