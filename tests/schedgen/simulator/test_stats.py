"""`schedgen stats` gives the numbers that the seed's simulator gives; test_literature.py has those of papers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

SEED = json.loads((Path(__file__).parents[2] / "data" / "seed-notebook.json").read_text())["rows"]


@pytest.fixture
def measure(run, tmp_path):
    """`schedgen compile ... && schedgen stats --json`: the numbers and the file they come from."""

    def measure(*arguments: object, cost: str = "F=1,B=2") -> tuple[dict, dict]:
        path = tmp_path / "schedule.json"
        assert run("compile", *arguments, "--cost", cost, "-o", path) == (0, "", "")
        result = run("stats", path, "--json")
        assert (result.code, result.err) == (0, "")
        return json.loads(result.out), json.loads(path.read_text())

    return measure


def arguments(row: dict) -> list[object]:
    """The command line of one of the seed's rows: greedy, the named order or the scheme's own."""
    options = [row["scheme"], "--mode", "greedy"]
    options += ["--stages", row["stages"], "--microbatches", row["microbatches"], "--workers", row["workers"]]
    if "workers_per_group" in row:
        options += ["--groups", row["workers"] // row["workers_per_group"]]
    if "order" in row:
        options += ["--n", row["order"].split()[0]]
    return options


@pytest.mark.parametrize("row", SEED, ids=lambda row: "-".join(map(str, arguments(row)[::2])))
def test_every_number_of_the_seed(row, measure):
    numbers, file = measure(*arguments(row))
    workers = {key: [worker[key] for worker in numbers["workers"]] for key in numbers["workers"][0]}
    # The paper counts the raw input too: one receive for every microbatch on the worker of its stage 0.
    inputs = [0] * row["workers"]
    for worker in _per_microbatch(file["compute"]["F"][0], row["microbatches"]):
        inputs[worker] += 1
    paper = [count + more for count, more in zip(workers["activation_receives"], inputs, strict=True)]
    got = {
        **{key: numbers[key] for key in ("latency", "throughput", "peak_activations", "mean_peak_activations")},
        **{key: workers[key] for key in ("busy", "weight_storage", "weight_uses_away_from_home")},
        "activation_receives": workers["activation_receives"],
        "activation_receives_paper": paper,
        "peak_activations_per_worker": workers["peak_activations"],
    }
    given = set(row) - {"scheme", "order", "workers", "workers_per_group", "stages", "microbatches"}
    assert {key: got[key] for key in given} == {key: row[key] for key in given}


def _per_microbatch(stage: int | list[int], microbatches: int) -> list[int]:
    return stage if isinstance(stage, list) else [stage] * microbatches


@pytest.mark.parametrize("scheme", ["ddp", "fsdp", "gpipe", "1f1b"])
def test_the_numbers_agree_with_one_another(scheme, measure):
    S, batches = 4, 8
    numbers, file = measure(scheme, "--stages", S, "--microbatches", batches)
    busy = sum(worker["busy"] for worker in numbers["workers"])
    assert busy == S * batches * (1 + 2)  # every job once, F=1 and B=2
    W = len(numbers["workers"])
    assert numbers["bubble"] == pytest.approx(1 - busy / (W * numbers["latency"]))
    assert numbers["throughput"] == pytest.approx(2 * S * batches / (W * numbers["latency"]))
    assert numbers["messages"] == sum(i["op"] == "SEND" for part in file["programs"] for i in part)
    assert numbers["messages"] == sum(sum(worker["receives"].values()) for worker in numbers["workers"])


@pytest.mark.parametrize(("scheme", "stages", "least"), [("zb-h2", 4, 7), ("zb-v", 8, 8), ("zb-v", 4, 4)])
def test_zero_bubble_schemes_have_none_from_as_many_microbatches_as_their_text_says(
    scheme, stages, least, measure, run
):
    text = run("schemes").out.split(f"\n{scheme} ")[1].split("\n\n")[0]
    assert f"and B >= {'2W - 1' if scheme == 'zb-h2' else '2W'}, no bubble" in text
    for more in range(4):
        sizes = ("--stages", stages, "--microbatches", least + more)
        assert measure(scheme, *sizes, cost="F=1,I=1,W=1")[0]["own_window_bubble"] == 0


def test_cost_given_to_stats_replaces_the_one_in_the_file(run, golden, tmp_path):
    (tmp_path / "a.json").write_text(golden["gpipe"])
    result = run("stats", tmp_path / "a.json", "--json", "--cost", "F=10,B=20")
    # GPipe takes (B + S - 1)(F + B) [GPipe, section 2.3].
    assert json.loads(result.out)["latency"] == (8 + 4 - 1) * (10 + 20)


def test_the_table_has_what_json_says_is_received_by_kind(run, golden, tmp_path):
    (tmp_path / "a.json").write_text(golden["fslpp"])
    lines = run("stats", tmp_path / "a.json").out.splitlines()
    assert all(len(line) < 100 for line in lines)
    heading, *rows = lines[-5:]
    assert re.split(r"  +", heading)[-4:] == ["received x", "g", "w", "dw"]
    workers = json.loads(run("stats", tmp_path / "a.json", "--json").out)["workers"]
    for row, worker in zip(rows, workers, strict=True):
        owned, away, *received = map(int, row.split()[3:])
        assert received == list(worker["receives"].values()) and sum(received)
        assert (owned, away) == (worker["weight_storage"], worker["weight_uses_away_from_home"])
