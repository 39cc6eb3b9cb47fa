"""A run that is saved and resumed ends as the run that was never stopped, under any schedule."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from examples import further
from models_for_tests import dropping_layers
from run_results import same, weights

from mpirun.checkpoint.writer import lock_folder

STEPS = 4
COMMON = ["--steps", STEPS, "--canonical", "--clip", 1, "--lr-schedule", "cosine", "--threads", 1]
DROPPING = "models_for_tests:dropping"  # ten layers, some of which draw random numbers


def last(folder: Path) -> dict[str, torch.Tensor]:
    return weights(folder / f"step-{STEPS:08d}")


# One model, many schedules. Each: stages, workers, and the options of schedgen compile.
SCHEDULES = {
    "1f1b on 4": ("1f1b", {"stages": 4, "workers": 4}),
    "1f1b on 2": ("1f1b", {"stages": 2, "workers": 2}),
    "ddp on 2": ("ddp", {"stages": 2, "workers": 2}),
    "one process": ("ddp", {"stages": 1, "workers": 1}),
    "fslpp on 4": ("fslpp", {"stages": 8, "workers": 4, "groups": 2}),
    "zb-v on 4": ("zb-v", {"stages": 8, "workers": 4}),
}
OPTIONS = {"adamw": [], **dict(further(("sgd", ["--optimizer", "sgd", "--momentum", 0.9, "--lr", 0.1])))}
RESUMED = (
    *(("adamw", "ddp on 2"), ("adamw", "one process"), ("adamw", "zb-v on 4"), ("adamw", "fslpp on 4")),
    *further(("adamw", "1f1b on 4"), ("sgd", "fslpp on 4"), ("sgd", "1f1b on 4")),
)


@pytest.fixture(scope="module")
def schedules(compiled) -> dict[str, Path]:
    return {name: compiled(scheme, microbatches=4, **sizes) for name, (scheme, sizes) in SCHEDULES.items()}


@pytest.fixture(scope="module")
def saved(several, schedules, text, tmp_path_factory) -> Path:
    """A folder with a run that was never stopped, `whole`, and one that stopped half-way, `half`, by optimizer."""
    folder = tmp_path_factory.mktemp("saved")
    command = [schedules["1f1b on 4"], "--model", DROPPING, "--text", text, *COMMON]
    runs = []
    for name, options in OPTIONS.items():
        runs.append([*command, *options, "--save", folder / name / "whole", "--every", STEPS // 2])
    for code, out in several(4, runs):
        assert code == 0 and f"checkpoint of step {STEPS}: " in out
    for name in OPTIONS:
        shutil.copytree(folder / name / "whole", folder / name / "half")
        shutil.rmtree(folder / name / "half" / f"step-{STEPS:08d}")
    return folder


@pytest.fixture(scope="module")
def resumed(several, schedules, saved, text) -> dict[tuple[str, str], Path]:
    """By optimizer and schedule: where the second half of the run, under that schedule, was saved."""
    found: dict[tuple[str, str], Path] = {}
    by_ranks: dict[int, list[list[object]]] = {}
    for name, schedule in RESUMED:
        found[name, schedule] = saved / name / schedule
        command = [schedules[schedule], "--model", DROPPING, "--text", text, *COMMON, *OPTIONS[name]]
        ends = ["--resume", saved / name / "half", "--save", found[name, schedule], "--metrics", saved / "metrics"]
        by_ranks.setdefault(SCHEDULES[schedule][1]["workers"], []).append([*command, *ends])
    for ranks, runs in by_ranks.items():
        for code, out in several(ranks, runs):
            assert code == 0 and f"resumed after step {STEPS // 2}: " in out
    return found


def test_a_checkpoint_names_every_parameter_of_the_model_once(saved):
    """By its layer, whatever the stages; the manifest has the step, and among the options seed and microbatches."""
    folder = saved / "adamw" / "half" / f"step-{STEPS // 2:08d}"
    module = torch.nn.Sequential(OrderedDict((name, make()) for name, make in dropping_layers().items()))
    found = weights(folder)
    parameters = {name: value.shape for name, value in module.named_parameters()}
    state = {f"{name}.{key}" for name in parameters for key in ("step", "exp_avg", "exp_avg_sq")}
    assert {name: found[name].shape for name in parameters} == parameters
    assert found.keys() == parameters.keys() | state
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["step"] == STEPS // 2 and (manifest["options"]["seed"], manifest["options"]["microbatches"]) == (
        0,
        4,
    )


@pytest.mark.parametrize(("optimizer", "schedule"), RESUMED)
def test_it_goes_on_with_the_same_bits_under_any_schedule(saved, resumed, optimizer, schedule):
    whole = last(saved / optimizer / "whole")
    assert same(last(resumed[optimizer, schedule]), whole)
    assert not same(weights(saved / optimizer / "half" / f"step-{STEPS // 2:08d}"), whole)


# Checkpoints that are incomplete or damaged, and other mistakes


OF_ANOTHER = r"saving to \S.*: it has checkpoints of another run: resume from it, move it, or save elsewhere"
MADE = "note: the checkpoint was made with"
# Options of a run, its exit code, the lines that it ends with on stderr, and what it prints.
ENDS: dict[str, tuple[str, int, list[str], str]] = {
    # Checkpoints that are not whole are skipped.
    "no manifest": ("--resume {folder}/a", 0, [r"\S.*4\S*: incomplete: it has no manifest: skipped"], "after step 2: "),
    "half a manifest": ("--resume {folder}/b", 0, [r"\S.*4\S*: damaged: skipped"], "after step 2: "),
    "no part": ("--resume {folder}/c", 0, [r"\S.*4\S*: No such file or directory: skipped"], "after step 2: "),
    "another bit": ("--resume {folder}/d", 0, [r"\S.*4\S*: damaged: skipped"], "after step 2: "),
    "none whole": (
        "--resume {folder}/e", 1,
        [r"(?:\S.*: skipped\nmpirun: )+resuming from \S.*: no checkpoint there is complete"], "",
    ),
    # One that was set aside counts where its run ended before another took its place.
    "set aside": ("--resume {folder}/f", 0, [], "after step 4: "),
    "unfinished": ("--resume {folder}/g --save {folder}/g", 0, [], "after step 4: "),
    # The first of several runs by one command begins at the beginning.
    "empty": ("--resume {folder}/h", 1, [r"resuming from \S.*: there is no checkpoint"], ""),
    "empty, and saved to": ("--resume {folder}/h --save {folder}/h", 0, [], "step 1/"),
    "older of its own": ("--resume {folder}/i/step-00000002 --save {folder}/i", 2, [OF_ANOTHER], ""),
    "used": ("--save {half}", 2, [OF_ANOTHER], ""),
    "into itself": ("--save {half}/step-00000002", 2, [r"saving to \S.*: it is a checkpoint itself: .*"], ""),
    "no name": ("--save ''", 2, [r"--save: the folder has no name \(see .*\)"], ""),
    "done, and traced": (
        "--resume {whole} --trace {folder}/trace", 0,
        ["note: trace: no step is done, so {folder}/trace is not written"], "",
    ),
    "another model": (
        "--resume {half} --model mpirun.examples.mlp:tiny", 2, [r"\S.*: has no \S+: is it of another model\?"], ""
    ),
    "another optimizer": (
        "--resume {half} --optimizer sgd", 2,
        [r"the optimizer is torch.optim.sgd.SGD: \S.* was made with torch.optim.adamw.AdamW"], "",
    ),
    "verified": (
        "--resume {half} --verify", 2,
        ["verify repeats all steps from the first, not those before a checkpoint: resume without it"], "",
    ),
    "another seed": ("--resume {half} --seed 1", 0, [f"{MADE} seed 0, not 1"], ""),
    "other options": (
        "--resume {half} --lr 0.5 --warmup 9 --threads 3", 0,
        [f"{MADE} lr 0.001, not 0.5", f"{MADE} threads 1, not 3", f"{MADE} warmup None, not 9"], "",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def damaged(mistakes, schedules, saved, text, tmp_path_factory):
    """How these runs ended, by name, and the names in braces."""
    folder = tmp_path_factory.mktemp("damaged")
    newest, older = f"step-{STEPS:08d}", f"step-{STEPS // 2:08d}"
    for name in "abcdfgi":
        shutil.copytree(saved / "adamw" / "whole", folder / name)
    (folder / "a" / newest / "manifest.json").unlink()
    (folder / "b" / newest / "manifest.json").write_bytes(b'{"checkpoint": 1, "st')
    (folder / "c" / newest / "weights-2.safetensors").unlink()
    part = folder / "d" / newest / "optimizer-1.safetensors"
    data = bytearray(part.read_bytes())
    data[-5] ^= 1
    part.write_bytes(data)
    for step in (newest, older):
        (folder / "e" / step).mkdir(parents=True)
    (folder / "f" / newest).rename(folder / "f" / f".replaced-{newest}")
    (folder / "g" / ".writing-00000009").mkdir()
    (folder / "g" / f".replaced-{older}").mkdir()
    (folder / "h").mkdir()
    names = {"folder": folder, "half": saved / "adamw" / "half", "whole": saved / "adamw" / "whole"}
    command = [schedules["1f1b on 2"], "--text", text, *COMMON, "--model", DROPPING]
    runs = [[*command, *shlex.split(options.format(**names))] for options, *_ in ENDS.values()]
    return dict(zip(ENDS, mistakes(2, runs), strict=True)), names


@pytest.mark.parametrize("name", ENDS)
def test_a_run_resumes_or_says_in_a_sentence_why_not(damaged, name):
    ended, (_, code, lines, said) = damaged[0][name], ENDS[name]
    expected = "".join(f"mpirun: {line}\n" for line in lines).replace("{folder}", str(damaged[1]["folder"]))
    assert ended.code == code and re.fullmatch(expected, ended.err) and said in ended.out, ended


def test_what_a_dead_run_left_unfinished_is_removed(damaged):
    ended, names = damaged[0]["unfinished"], damaged[1]
    assert f"\n{STEPS} of {STEPS} steps are done" in ended.out
    found = sorted(one.name for one in (names["folder"] / "g").iterdir())
    assert found == [".lock", f"step-{STEPS // 2:08d}", f"step-{STEPS:08d}"]
    assert not (names["folder"] / "trace").exists()


# Tied, frozen and other parameters


def test_a_tied_parameter_is_one_entry_whatever_the_stages(several, compiled, text, tmp_path):
    """Saved with embedding and scores on different ranks, resumed in one process."""
    tied = compiled("1f1b", graph={"stages": 4, "tied": [[0, 3]]}, microbatches=4, workers=4)
    alone = compiled("gpipe", stages=1, microbatches=4, workers=1)
    common = ["--model", "models_for_tests:gpt_tied", "--text", text, "--steps", 2, "--canonical", "--save"]
    ((code, _),) = several(4, [[tied, *common, tmp_path / "whole", "--every", 1]])
    assert code == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "step-00000002")
    ((code, _),) = several(1, [[alone, *common, tmp_path / "resumed", "--resume", tmp_path / "half"]])
    assert code == 0
    whole, one = (weights(tmp_path / name / "step-00000002") for name in ("whole", "resumed"))
    assert "embedding.byte.weight" in whole and "head.score.weight" not in whole
    assert whole.keys() == one.keys()


def test_buffers_that_share_memory_or_have_no_plain_layout_are_saved(mistakes, compiled, text, tmp_path):
    """Layers may share one table; two buffers of one name, and state that is no tensor, are refused."""
    alone = compiled("gpipe", stages=2, microbatches=2, workers=1)
    common = [alone, "--text", text, "--steps", 1, "--model"]
    models = {name: f"models_for_tests:buffers_{name}" for name in ("shared", "named_alike", "not_tensors")}
    runs = [[*common, model, "--save", tmp_path / name] for name, model in models.items()]
    again = [*common, models["shared"], "--resume", tmp_path / "shared"]
    shared, alike, odd, resumed = mistakes(1, [*runs, again])
    assert (shared.code, resumed.code) == (0, 0) and "resumed after step 1: " in resumed.out
    found = weights(tmp_path / "shared" / "step-00000001")
    for layer in ("one", "two"):
        assert found[f"{layer}.table"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert (alike.code, odd.code) == (2, 2)
    assert alike.err == "mpirun: two layers of the model have a one.table: in checkpoints names must differ\n"
    assert re.fullmatch(r"mpirun: stage \d has two._extra_state: only parameters and buffers are saved\n", odd.err)


def test_a_folder_that_was_moved_is_unlocked_too(tmp_path):
    (tmp_path / "before").mkdir()
    lock = lock_folder(tmp_path / "before")
    (tmp_path / "before").rename(tmp_path / "after")
    os.close(lock)
    os.close(lock_folder(tmp_path / "after"))
