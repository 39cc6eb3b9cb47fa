"""Plain modules, traced and cut, train on 4 ranks as one process does, to the bit: skips, towers, shared parameters."""

from __future__ import annotations

import json

import pytest
from examples import further
from split_models import PLAIN

from schedgen.cli.main import main as schedgen

TRAIN = """
from split_models import PLAIN
def train(name, scheme, *, stages=4, shared="transmit", steps=2, **options):
    plain = PLAIN[name]
    verify = options.setdefault("verify", True)
    options = {"microbatches": 4, "canonical": True, "optimizer": torch.optim.AdamW, "lr": 1e-3, **options}
    with engine(plain.cut(stages, shared), scheme, loss=plain.loss, example=plain.batch(0, 4), clip=1.0, threads=1,
                **options) as run:
        verify or run.resume(folder / "saved")
        while run.steps < steps:
            result = run.step(plain.batch(run.steps))
            yield result.loss, result.grad_norm
            run.steps == 1 and not verify and run.save(folder / "saved")
        assert not verify or run.verify()
"""
# Every plain module, and one of transformers, which has a tie and values that all of the decoder reads: test_split.py
# splits others, and `make test-models` all architectures.
CASES = [("encoder_decoder", "zb-h1", "transmit"), ("tied_on_meta", "fslpp", "replicate")]
CASES += further(("resnet", "fslpp", "transmit"), ("two_tower", "lpp", "replicate"), ("tied", "1f1b", "transmit"))
CASES += further(("t5", "fslpp", "transmit"), ("sequential", "zb-h1", "transmit"), ("gpt2", "gpipe", "replicate"))


@pytest.mark.parametrize(("name", "scheme", "shared"), CASES)
def test_a_plain_module_in_stages_trains_as_in_one_process(execute, tmp_path, name, scheme, shared):
    groups = {"groups": 2} if "lpp" in scheme else {}
    script = f"len([*train({name!r}, {scheme!r}, shared={shared!r}, **{groups})])"
    assert "verify: passed: every bit" in execute(4, TRAIN + script, tmp_path).out


def test_gradients_that_are_rounding_alone_fail_no_verification(execute, tmp_path):
    """Such as those of biases before a normalisation, or of keys: AdamW makes full steps of them."""
    out = execute(4, TRAIN + "len([*train('gpt2', 'lpp', groups=2, canonical=False)])", tmp_path).out
    assert "verify: passed: the limit is 1e-05" in out, out
    (line,) = [line for line in out.splitlines() if "parameter elements are left out" in line]
    left_out, total = (int(word) for word in line.split() if word.isdigit())
    assert 0 < left_out < total / 50


def test_losses_do_not_depend_on_the_cut_under_which_a_run_goes_on(execute, tmp_path):
    """Nor do norms, to the bit, whatever the scheme and dropout. Names in checkpoints are the module's own."""
    script = """
whole = [*train("gpt2", "1f1b", steps=3, verify=False)]
assert whole[1:] == [*train("gpt2", "fsdp", stages=2, steps=3, verify=False)] and len({*whole}) == 3, whole
"""
    assert "resumed after step 1: " in execute(4, TRAIN + script, tmp_path).out


def trains_by(execute, folder, file, name, stages, shared="transmit") -> None:
    """Train by a file, verified."""
    script = f"len([*train({name!r}, sys.argv[2], stages={stages}, shared={shared!r}, microbatches=None)])"
    assert "verify: passed: every bit" in execute(4, TRAIN + script, folder, file).out


# The edges of models in six stages: with skips, and with a tie.
PLANNED = {"tied": 7, **dict(further(("encoder_decoder", 6)))}


@pytest.mark.parametrize("name", PLANNED)
def test_stages_that_a_plan_joins_train_as_in_one_process(execute, tmp_path, name):
    graph, profile, file = (tmp_path / kind for kind in ("graph", "profile", "file"))
    shared = "replicate" if name == "tied" else "transmit"
    graph.write_text(PLAIN[name].cut(6, shared).model(PLAIN[name].loss).graph().text())
    costs = {"F": [1, 2, 1, 3, 2, 2], "B": [2, 4, 2, 6, 4, 4], "activation": 1, "weight": 1000, "beta": 0.001}
    profile.write_text(json.dumps(costs))
    options = ["--graph", graph, "--workers", 4, "--microbatches", 4, "--memory", 5000, "--schemes", "1f1b,zb-h1"]
    assert schedgen(["plan", str(profile), *map(str, options), "-o", str(file)]) == 0
    assert sorted(json.loads(file.read_text())["scheme"]["layers"]) == [1, 1, 2, 2]
    assert len(json.loads(graph.read_text())["edges"]) == PLANNED[name]
    trains_by(execute, tmp_path, file, name, 6, shared)


def test_a_schedule_may_send_the_same_to_each_of_those_that_read_it(execute, compiled, tmp_path):
    """Such as a plan's schedule: plan cannot know whether two layers read the same output of a third."""
    name = "encoder_decoder"
    graph = json.loads(PLAIN[name].cut(4).model(PLAIN[name].loss).graph().text())
    assert graph.keys() == {"stages", "edges"} and [1, 2] in graph["edges"] and [1, 3] in graph["edges"]
    file = compiled("1f1b", graph=graph | {"per_consumer": [1]}, microbatches=4, workers=4)
    trains_by(execute, tmp_path, file, name, 4)
