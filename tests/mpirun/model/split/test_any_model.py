"""Plain modules, traced and cut, train on 4 ranks as one process does, to the bit: skips, towers, shared parameters."""

from __future__ import annotations

import importlib.util
import json
import os
import re

import pytest
from examples import further
from processes import environment
from standing_launch import StandingLaunch
from warm_servers import WarmServers

from schedgen.cli.main import main as schedgen

SCHEMES = {"gpipe": {}, "1f1b": {}, "zb-h1": {}, "lpp": {"groups": 2}, "fslpp": {"groups": 2}}
PLAIN = ("gpt2", "encoder_decoder", *further("resnet", "two_tower", "tied"))
OTHERS = (*further("tied_on_meta"), "tied_on_meta_replicated", *further("sequential"))
TRANSFORMERS = further(*("transformers_t5",) * bool(importlib.util.find_spec("transformers")))
# Every plain module under a scheme, and further ones each with another. Of the library
# only T5, which has a tie and values that all of the decoder reads; test_split.py splits others, and
# `make test-models` all architectures.
CASES = [("encoder_decoder", "zb-h1"), ("tied_on_meta_replicated", "fslpp")]
CASES += further(("gpt2", "gpipe"), ("resnet", "fslpp"), ("two_tower", "lpp"), ("tied", "1f1b"))
CASES += further(("gpt2", "zb-h1"), ("resnet", "1f1b"), ("encoder_decoder", "lpp"), ("two_tower", "gpipe"))
CASES += further(("tied", "fslpp"), ("sequential", "zb-h1"), ("tied_on_meta_replicated", "1f1b"))
CASES += [*zip(TRANSFORMERS, ("fslpp",), strict=False)]


MODELS = (*PLAIN, *OTHERS, *TRANSFORMERS)
# The edges of models in six stages; with skips, and one with two different outputs of a stage, one with a tie.
PLANNED = {**dict(further(("encoder_decoder", 6), ("tied", 8))), "tied_replicated": 7}
# Models that servers trace before they fork ranks, and into how many stages.
TRACED = [*((name, 4) for name in MODELS), ("gpt2", 2), *((name, 6) for name in PLANNED)]


@pytest.fixture(scope="module")
def several(warm_ranks, tmp_path_factory):
    """As elsewhere, but in ranks forked from two servers that have traced the models; else every rank would.

    These servers are forked from the servers of all other tests (helpers/warm_ranks.py).
    """
    folder = tmp_path_factory.mktemp("traced")
    calls = [f"split_models:{name}:{stages}" for name, stages in TRACED]
    environments = [environment("", {"PMI_RANK": name}) for name in ("0", "1")]
    servers = WarmServers(folder, environments, calls, python=warm_ranks)
    servers.wait()
    launches: dict[int, StandingLaunch] = {}

    def several(ranks, runs):
        if ranks not in launches:
            launches[ranks] = StandingLaunch(ranks, {}, tmp_path_factory.mktemp("launch"))
        ended = [launches[ranks].run(["mpirun", *map(str, run)], 300) for run in runs]
        return [(code, out) for code, out, _ in ended]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPIEXEC", os.environ["MPIEXEC"].replace(os.environ["WARM_RANKS"], str(folder)))
        yield several
    for launch in launches.values():
        launch.close()
    servers.close()


@pytest.fixture(scope="module")
def graphs(several, tmp_path_factory):
    """By model: the graph of its four stages; `gpt2 in two`: of two stages."""
    folder = tmp_path_factory.mktemp("graphs")
    cuts = {**{name: (name, 4) for name in MODELS}, "gpt2 in two": ("gpt2", 2)}
    runs = [
        ["graph", "--model", f"split_models:{model}", "--stages", stages, "-o", folder / name]
        for name, (model, stages) in cuts.items()
    ]
    assert [code for code, _ in several(4, runs)] == [0] * len(runs)
    return {name: folder / name for name in cuts}


@pytest.fixture(scope="module")
def runs(several, compiled, graphs, text):
    arguments = [
        [
            compiled(scheme, graph=graphs[model], microbatches=4, workers=4, **SCHEMES[scheme]),
            *("--model", f"split_models:{model}", "--text", text, "--steps", 2, "--clip", 1, "--verify", "--canonical"),
        ]
        for model, scheme in CASES
    ]
    return dict(zip(CASES, several(4, arguments), strict=True))


@pytest.mark.parametrize(("model", "scheme"), CASES)
def test_a_plain_module_in_stages_trains_as_in_one_process(runs, model, scheme):
    code, out = runs[model, scheme]
    assert code == 0 and "verify: passed" in out, out


def test_gradients_that_are_rounding_alone_fail_no_verification(several, compiled, graphs, text):
    """Such as those of biases before a normalisation, or of keys: AdamW makes full steps of them."""
    models = ("gpt2", *further("resnet"))
    schedules = [compiled("lpp", graph=graphs[model], microbatches=4, workers=4, groups=2) for model in models]
    runs = [
        [schedule, "--model", f"split_models:{model}", "--text", text, "--steps", 2, "--verify"]
        for model, schedule in zip(models, schedules, strict=True)
    ]
    for code, out in several(4, runs):
        assert code == 0 and "verify: passed: the limit is 1e-05" in out, out
        left_out, total = re.search(r"^verify: (\d+) of (\d+) parameter elements are left out", out, re.M).groups()
        assert 0 < int(left_out) < int(total) / 50


def test_a_run_goes_on_with_another_cut(several, compiled, graphs, text, tmp_path):
    """Names in checkpoints are the module's own."""
    arguments = ["--model", "split_models:gpt2", "--text", text, "--canonical"]
    first = compiled("1f1b", graph=graphs["gpt2"], microbatches=4, workers=4)
    second = compiled("fsdp", graph=graphs["gpt2 in two"], microbatches=4, workers=4)
    saved, resumed = ["--steps", 1, "--save", tmp_path / "saved"], ["--steps", 2, "--resume", tmp_path / "saved"]
    (code, _), (again, out) = several(4, [[first, *arguments, *saved], [second, *arguments, *resumed]])
    assert (code, again) == (0, 0) and "resumed after step 1" in out


@pytest.fixture(scope="module")
def planned(several, tmp_path_factory):
    """By model: the graph of its stages, of which a worker can hold two, and a schedule of stages that join them."""
    folder = tmp_path_factory.mktemp("planned")
    of = {name: (folder / f"{name}-graph.json", folder / f"{name}.json") for name in PLANNED}
    runs = [["graph", "--model", f"split_models:{name}", "--stages", 6, "-o", graph] for name, (graph, _) in of.items()]
    assert [code for code, _ in several(4, runs)] == [0] * len(runs)
    costs = {"F": [1, 2, 1, 3, 2, 2], "B": [2, 4, 2, 6, 4, 4], "activation": 1, "weight": 1000, "beta": 0.001}
    for name, (graph, file) in of.items():
        edges = json.loads(graph.read_text())["edges"]
        profile = folder / f"{name}-profile.json"
        apart = {"per_consumer": [9 if edge == [0, 5] else 1 for edge in edges]}
        profile.write_text(json.dumps(costs | (apart if name == "tied" else {})))
        options = ["--graph", graph, "--workers", 4, "--microbatches", 4, "--memory", 5000, "--schemes", "1f1b,zb-h1"]
        assert schedgen(["plan", str(profile), *map(str, options), "-o", str(file)]) == 0
    return of


@pytest.mark.parametrize("name", PLANNED)
def test_stages_that_a_plan_joins_train_as_in_one_process(name, planned, several, text):
    graph, file = planned[name]
    header = json.loads(file.read_text())
    joined = sorted(header["scheme"]["layers"])
    assert joined == [1, 1, 2, 2] and len(json.loads(graph.read_text())["edges"]) == PLANNED[name]
    run = [file, "--model", f"split_models:{name}", "--text", text, "--steps", 2, "--verify", "--canonical"]
    ((code, out),) = several(4, [run])
    assert code == 0 and "verify: passed" in out, out


def test_a_schedule_may_send_the_same_to_each_of_those_that_read_it(several, compiled, graphs, text):
    """Such as a plan's schedule: plan cannot know whether two layers read the same output of a third."""
    graph = json.loads(graphs["encoder_decoder"].read_text())
    assert graph.keys() == {"stages", "edges"} and [1, 2] in graph["edges"] and [1, 3] in graph["edges"]
    schedule = compiled("1f1b", graph=graph | {"per_consumer": [1]}, microbatches=4, workers=4)
    run = [schedule, "--model", "split_models:encoder_decoder", "--text", text, "--steps", 2, "--verify", "--canonical"]
    ((code, out),) = several(4, [run])
    assert code == 0 and "verify: passed" in out, out


def test_dropout_of_a_traced_module_does_not_depend_on_the_cut(several, compiled, graphs, text, tmp_path):
    """Nor do losses and norms, to the bit, whatever the scheme."""
    model = ["--model", "split_models:gpt2"]
    schedules = {
        "four": compiled("1f1b", graph=graphs["gpt2"], microbatches=4, workers=4),
        "two": compiled("fsdp", graph=graphs["gpt2 in two"], microbatches=4, workers=4),
    }
    common = ["--text", text, "--steps", 3, "--canonical", "--threads", 1, "--clip", 1, "--metrics"]
    runs = [[schedule, *model, *common, tmp_path / f"{name}.jsonl"] for name, schedule in schedules.items()]
    assert [code for code, _ in several(4, runs)] == [0, 0]
    rows = [[json.loads(row) for row in (tmp_path / f"{name}.jsonl").read_text().splitlines()] for name in schedules]
    four_stages, two_stages = ([(row["loss"], row["grad_norm"]) for row in case] for case in rows)
    assert four_stages == two_stages and len(set(four_stages)) == 3
