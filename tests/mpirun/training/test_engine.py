"""A script that drives Engines on four ranks: the bits of one process, evaluation, and resuming."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import further
from torch.nn.functional import mse_loss

import schedgen
from schedgen.checker import checked
from schedgen.cli.main import main as command
from schedgen.report.chrome_trace import read_trace, run_numbers
from schedgen.schemes import SCHEMES, load
from schedgen.util.errors import UsageError

PROGRAM = Path(__file__).parents[2] / "helpers" / "programs" / "drive_engine.py"
SCHEDULES = {
    "1f1b": ["1f1b"], "zb-h1": ["zb-h1"], "ddp": ["ddp"], "fsdp-shards": ["fsdp", "--shards", "4"],
    "recompute": ["1f1b", "--recompute", "all"],
}  # fmt: skip
TRAINED = ("1f1b", *further("zb-h1", "ddp"), "fsdp-shards")
BUCKETS = (*further(("1f1b", True), ("fsdp-shards", False), ("fsdp-shards", True)), ("zb-h1", True))  # canonical or not
SOME = ("fslpp", "zb-v", "chimera", "1f1b-rr", "pipedream")
PREDICTED = (*SOME, *further(*(scheme for scheme in SCHEMES if scheme not in SOME)))


MINE = """
mode = "strict"
def w(s, b, d):
    return s, s
def n(s, b, d):
    return 100 * d + b
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory, launch) -> dict[str, Any]:
    """The results of all checks of programs/drive_engine.py."""
    folder = tmp_path_factory.mktemp("engine")
    for name, scheme in SCHEDULES.items():
        sizes = ["--workers", "4", "--stages", "4", "--microbatches", "8"]
        assert command(["compile", *scheme, *sizes, "-o", str(folder / f"{name}.json")]) == 0
    (folder / "mine.py").write_text(MINE)
    (folder / "predict").mkdir()
    alike: dict[object, str] = {}
    predicts_as = {}
    for name in PREDICTED:
        program = of_scheme(name)
        forwards = [column.tobytes() for column in schedgen.forward_list(program).rows]
        key = *forwards, program.header.owners, program.header.weight_versions.updates
        predicts_as[name] = alike.setdefault(key, name)
        if predicts_as[name] == name:
            with (folder / "predict" / f"{name}.json").open("wb") as out:
                schedgen.write(program, out)
    (folder / "cases.json").write_text(json.dumps({"schemes": TRAINED, "buckets": BUCKETS}))
    done = launch(4, folder, program=(str(PROGRAM),), limit=600)
    assert done.code == 0, done.err
    return {**json.loads((folder / "found.json").read_text()), "folder": folder, "predicts as": predicts_as}


def of_scheme(name: str) -> schedgen.Program:
    """A program of 4 workers, with replicas or two stages per worker if the scheme allows these."""
    for stages, own in ((2, {"replicas": (3, 1)}), (8, {}), (4, {}), (4, {"groups": 2})):
        sizes = schedgen.Sizes(stages, 8, 4, **own)
        with contextlib.suppress(UsageError):
            return schedgen.compile(load(name, sizes), sizes)
    raise AssertionError(name)


def test_a_schedule_is_a_file_a_program_or_a_scheme(found):
    numbers = found["given_schedules"]
    assert numbers.keys() == {"file", "program", "scheme", "own"} and len({*map(str, numbers.values())}) == 1
    assert numbers["own"][1] == 2  # threads


@pytest.mark.parametrize("scheme", TRAINED)
def test_every_scheme_gives_the_bits_of_one_process(found, scheme):
    assert found["schemes"][scheme]["numbers"] == found["schemes"]["1f1b"]["numbers"]
    verified, lines = found["schemes"][scheme]["verified"]
    assert verified and len(re.findall("by at most 0$", lines, re.M)) == 4
    assert "verify: buffers differ from one process by at most 0\n" in lines


@pytest.mark.parametrize(("name", "microbatches"), [("split", 8), ("shared out", 2)])
def test_buffers_that_forwards_change_are_changed_once_verified_saved_resumed_and_exported(found, name, microbatches):
    """4 steps of 8 microbatches, of which a data-parallel rank has 2; the other schedules recompute all forwards."""
    verified, lines, whole, *resumed = found["statistics"][name]
    assert verified and "verify: buffers differ from one process by at most 0\n" in lines
    counts = [value for key, value in whole.items() if key.endswith("num_batches_tracked")]
    assert counts == [4 * microbatches] * 4
    assert resumed == ([whole] if name == "split" else [])


def test_rates_tokens_and_metrics_are_those_worked_out_by_hand(found):
    """8 microbatches of 2 samples a step; 41 samples of 8 numbers."""
    numbers = found["schemes"]["1f1b"]["numbers"]
    assert [entry[4] for entry in numbers] == [128, 128, 72] * 2
    assert [entry[3] for entry in numbers] == [1e-2, 1e-2, 5e-3, 5e-3, 2.5e-3, 2.5e-3]
    assert numbers[0][2]["samples"] == 2.0
    # The last step has 9 samples: four microbatches of two, one of one.
    assert numbers[2][2]["samples"] == pytest.approx((4 * 2 * 2 + 1) / 9)


@pytest.mark.parametrize("scheme", TRAINED)
def test_evaluation_and_prediction_are_in_eval_mode_and_the_same_everywhere(found, scheme):
    of_scheme = found["schemes"][scheme]
    predictions, repeatable = of_scheme["predictions"]
    assert repeatable and len(predictions) == 41 and of_scheme["first"] == 16
    loss, metrics, samples = of_scheme["evaluation"]
    assert samples == 41
    # Running statistics are those of one worker, so a data-parallel scheme has others.
    if scheme not in ("ddp", "fsdp-shards"):
        assert of_scheme["evaluation"] == found["schemes"]["1f1b"]["evaluation"]
        assert predictions == found["schemes"]["1f1b"]["predictions"][0]
    values = torch.tensor(predictions)
    generator = torch.Generator().manual_seed(5)
    _, targets = (torch.randn(41, 8, generator=generator) for _ in range(2))
    assert loss == pytest.approx(mse_loss(values, targets).item(), rel=1e-5)
    assert metrics["largest"] == pytest.approx(values.abs().amax(1).mean().item(), rel=1e-5)


@pytest.mark.parametrize("scheme", PREDICTED)
def test_predictions_under_every_scheme_have_the_bits_of_one_process(found, scheme):
    """Schemes that have the same forwards and versions of weights predict alike: one of them does."""
    assert found["predictions"][found["predicts as"][scheme]]


def test_a_run_resumed_in_the_middle_of_an_epoch_gives_the_same_bits(found):
    whole, parts = found["resumed"]
    assert whole == parts and len(whole[0]) == 7


def test_lengths_in_turn_give_the_bits_of_one_process_under_every_scheme(found):
    first = found["buckets"]["zb-h1 True"]
    for name, of_scheme in found["buckets"].items():
        verified, lines = of_scheme["verified"]
        assert verified, lines
        if name.endswith("True"):
            assert len(re.findall("by at most 0$", lines, re.M)) == 3
            assert of_scheme["numbers"] == first["numbers"] and of_scheme["evaluations"] == first["evaluations"]
            assert of_scheme["weights"] in ("", first["weights"])
    lengths = (6, 9, 9, *(6, 9, 9, 6), 6)  # a loop that is left early is followed by the next epoch
    assert [entry[4] // 8 for entry in first["numbers"]] == [length * 16 for length in lengths]
    assert [samples for _, samples in first["evaluations"]] == [32, 32]


@pytest.mark.parametrize("scheme", dict(BUCKETS))
def test_steps_of_a_block_are_traced_whatever_their_shape_and_not_what_is_evaluated_between(found, scheme):
    """Another test of `found` shows that they have the bits of one process, too."""
    program, trace = (str(found["folder"] / f"{scheme}.{kind}") for kind in ("json", "trace"))
    checked_program = checked(program)
    numbers = run_numbers(checked_program, read_trace(Path(trace).read_text(), trace, checked_program))
    assert numbers["passes"] == 4 and all(worker["busy"] > 0 for worker in numbers["workers"])
