"""No rank holds more bytes of tensors than `schedgen stats --profile` says, for any kind of buffer, and none far less.

Schemes that hold the same kinds of buffers in another order are left to schedgen's tests of the plan. The profile is
measured on one rank, the memory on four.
"""

from __future__ import annotations

import contextlib
import io
import json
import re

import pytest
from examples import further
from golden_cases import TRAINED, schedule

from schedgen.cli.main import main as schedgen

MLP = "mpirun.examples.mlp:tiny"
NAMES = ("ddp", "fslpp", *further("fsdp", "1f1b", "chimera", "interleaved-1f1b", "zb-v"))  # the last two: 8 stages
# Schemes, and the number of weight shards of their stages.
PARTS = {"zb-h1": 4, **dict(further(("fsdp", 4), ("gpipe", 3)))}
PROFILED = ("pipedream", "1f1b-tensor")  # by their schedules: a profile by the number of stages has no slices
# Of schedules that are not for the MLP.
MODELS = {"1f1b, tied": "models_for_tests:tied_of_four"} | {name: TRAINED[name] for name in PROFILED}
OTHERS = (
    "1f1b, recompute",
    "fsdp, one slot",
    *further("gpipe, the last redone", "gpipe, prefetch 3"),
    "1f1b, tied",
    "gpipe, offload",
    "zb-h1, offload",
    *further("zb-v, offload"),  # rank 0 has the first stage and the last, of 8
    "1f1b, evict",
    "ddp, optimizers on the host",
    "fsdp, optimizers on the host",
    *PROFILED,
    *(f"{scheme}, parts" for scheme in PARTS),
)


@pytest.fixture(scope="module")
def schedules(compiled):
    """Golden schedules or smaller ones, and others that recompute, hold one weight copy, or have weight shards."""
    paths = {name: schedule(name, compiled) for name in NAMES}
    sizes = {"workers": 4, "stages": 4, "microbatches": 4}
    paths["1f1b, recompute"] = compiled("1f1b", **sizes, recompute="all")
    paths["gpipe, the last redone"] = compiled("gpipe", **sizes, recompute="0.3,1.3,2.3,3.3")
    paths["fsdp, one slot"] = compiled("fsdp", **sizes, weight_slots=1)
    paths["gpipe, prefetch 3"] = compiled("gpipe", **sizes, prefetch=3)
    paths["1f1b, tied"] = compiled("1f1b", graph={"stages": 4, "tied": [[0, 3]]}, microbatches=4)
    paths["gpipe, offload"] = compiled("gpipe", **sizes, offload="0,1.0,1.3,2", prefetch=0)
    paths["zb-h1, offload"] = compiled("zb-h1", **{**sizes, "microbatches": 8}, offload="all")
    paths["1f1b, evict"] = compiled("1f1b", **{**sizes, "microbatches": 8}, evict=True)
    paths["zb-v, offload"] = compiled("zb-v", workers=4, stages=8, microbatches=8, offload="all", prefetch=0)
    paths["ddp, optimizers on the host"] = compiled("ddp", **sizes, offload_optimizer=True)
    paths["fsdp, optimizers on the host"] = compiled("fsdp", **sizes, shards=4, offload_optimizer=True)
    paths |= {name: schedule(name, compiled) for name in PROFILED}
    for scheme, shards in PARTS.items():
        paths[f"{scheme}, parts"] = compiled(scheme, **sizes, shards=shards)
    return {name: paths[name] for name in (*NAMES, *OTHERS)}


@pytest.fixture(scope="module")
def measured(several, schedules, text):
    """By schedule: the peak bytes of every rank."""
    runs = [
        [path, "--model", MODELS.get(name, MLP), "--text", text, "--steps", 2, "--memory"]
        for name, path in schedules.items()
    ]
    by_name = {}
    for name, (code, out) in zip(schedules, several(4, runs), strict=True):
        assert code == 0, out
        peaks = re.search(r"^memory: most bytes of tensors at once, by rank: ([\d ]+)$", out, re.M)
        by_name[name] = [int(peak) for peak in peaks[1].split()]
    return by_name


@pytest.fixture(scope="module")
def predicted(several, schedules, text, tmp_path_factory):
    """By schedule: the peak bytes of every rank, as stats predicts them."""
    folder = tmp_path_factory.mktemp("profiles")
    profiled = {key: ("--stages", key[1]) for key in ((MLP, 4), *further((MLP, 8)), (MODELS["1f1b, tied"], 4))}
    profiled |= {(MODELS[name], name): ("--schedule", schedules[name]) for name in PROFILED}
    files = {key: folder / f"{number}.json" for number, key in enumerate(profiled)}
    runs = [
        ["profile", "--model", model, "--text", text, option, value, "--steps", 1, "-o", files[model, of]]
        for (model, of), (option, value) in profiled.items()
    ]
    assert [code for code, _ in several(1, runs)] == [0] * len(runs)
    sliced, by_name = files[MODELS["1f1b-tensor"], "1f1b-tensor"], {}
    assert schedgen(["plan", str(sliced), "--workers", "2", "--microbatches", "4"]) == 1  # it has slices, no layers
    for name, path in schedules.items():
        header = path.read_text().split('"programs"')[0]
        stages = name if name in PROFILED else int(re.search(r'"stages": (\d+)', header)[1])
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert schedgen(["stats", str(path), "--profile", str(files[MODELS.get(name, MLP), stages]), "--json"]) == 0
        by_name[name] = [worker["peak_bytes"] for worker in json.loads(out.getvalue())["workers"]]
    return by_name


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_no_rank_holds_more_than_predicted(measured, predicted, name):
    assert len(measured[name]) == len(predicted[name]) == 4
    for rank, (most, limit) in enumerate(zip(measured[name], predicted[name], strict=True)):
        assert most <= limit, f"rank {rank}: {most} bytes, {limit} predicted"
        assert most >= 0.9 * limit, f"rank {rank}: {limit} predicted for {most} bytes"
