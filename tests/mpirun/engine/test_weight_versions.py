"""Weights that change without a flush: what ranks do is what PipeDream's equations say, to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.func import functional_call

import mpirun.data.microbatches
from mpirun.model.build_stage import build_stage
from mpirun.model.load_model import load_model
from schedgen.ir.weight_versions import UPDATES

GPT, DROPPING = "models_for_tests:gpt_tiny", "models_for_tests:dropping"
WALKS, BATCHES, STAGES = 2, 8, 4
RATE = 0.05
SGD = ["--optimizer", "sgd", "--lr", RATE, "--weight-decay", 0]
LATE = tuple(name for name in UPDATES if name != "flush")

# Replicas of each stage, when weights change, model, options of compile, options of mpirun
CASES = {
    "straight": ("1,1,1,1", "stash", GPT, {}, []),
    "straight, vertical": ("1,1,1,1", "vertical", GPT, {}, []),
    "three and one": ("3,1", "stash", GPT, {}, ["--optimizer", "sgd", "--momentum", 0.9]),
    "three and one, vertical": ("3,1", "vertical", DROPPING, {}, []),
    "one and three": ("1,3", "vertical", GPT, {}, []),
    "two and two": ("2,2", "stash", DROPPING, {}, []),
    "the last update has one gradient": ("2,2", "vertical", GPT, {"microbatches": 7}, []),
    "activations computed again": ("1,1,1,1", "stash", DROPPING, {"recompute": "all"}, []),
    "warm-up and cosine": ("2,1,1", "stash", GPT, {}, ["--warmup", 1, "--lr-schedule", "cosine"]),
}


@pytest.fixture(scope="module")
def verified(several, compiled, text):
    """What came of every case beside one process that makes the same late updates."""
    runs = []
    for replicas, updates, model, options, more in CASES.values():
        sizes = {"stages": replicas.count(",") + 1, "microbatches": BATCHES, "replicas": replicas, "updates": updates}
        file = compiled("pipedream", **(sizes | options))
        runs.append([file, "--model", model, "--text", text, "--steps", 3, "--verify", "--canonical", *more])
    return dict(zip(CASES, several(4, runs), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_it_gives_the_bits_of_one_process_with_the_same_late_updates(verified, name):
    code, out = verified[name]
    assert code == 0 and "verify: passed: the limit is 0" in out


@pytest.fixture(scope="module")
def recorded(inside, compiled, text, tmp_path_factory):
    """What the ranks did, by updates: losses of every microbatch, gradients of the last updates, weights in the end."""
    folder = tmp_path_factory.mktemp("records")
    runs = [
        {
            "arguments": [
                compiled("pipedream", stages=STAGES, microbatches=BATCHES, updates=updates),
                *("--model", GPT, "--text", text, "--steps", WALKS, "--verify", "--canonical", *SGD),
            ],
            "record": str(folder / updates),
        }
        for updates in LATE
    ]
    assert [one.code for one in inside(4, runs)] == [0] * len(runs)
    return {updates: torch.load(folder / updates) for updates in LATE}


def simulated(updates: str, text: Path):
    """PipeDream, section 3.3, for n stages, counted from 1, and minibatch t, counted from 0:

        w(t + 1) = w(t) - rate * gradient of f(w_1(t - n + 1), w_2(t - n + 2), ..., w_n(t))
        w(t + 1) = w(t) - rate * gradient of f(w_1(t - n + 1), w_2(t - n + 1), ..., w_n(t - n + 1))   vertical sync

    where w(t) for t < 0 is w(0). A walk through the list is t = 0 to B - 1.
    """
    model = load_model(GPT, STAGES, 0, None)
    data = torch.from_numpy(np.frombuffer(text.read_bytes(), np.uint8).copy())
    modules = [build_stage(model, stage, 0) for stage in range(STAGES)]
    weights = [{name: one.detach().clone() for name, one in module.named_parameters()} for module in modules]
    losses = []
    for walk in range(WALKS):
        history = [[one] for one in weights]
        losses.append([])
        for t in range(BATCHES):
            late = [STAGES - n if updates == "stash" else STAGES - 1 for n in range(1, STAGES + 1)]
            used = [
                {name: one.clone().requires_grad_() for name, one in history[s][max(0, t - late[s])].items()}
                for s in range(STAGES)
            ]
            (value,), target, _ = mpirun.data.microbatches.Microbatches(model.batch, data, 0, 1)(walk, t)
            for module, given in zip(modules, used, strict=True):
                value = functional_call(module, given, value)
            loss = model.loss(value, target)
            loss.backward()
            losses[-1].append(loss.item())
            for s, given in enumerate(used):
                history[s].append(stepped(history[s][t], given))
        weights = [versions[-1] for versions in history]
    gradients = {(s, name): one.grad for s, given in enumerate(used) for name, one in given.items()}
    return losses, gradients, {(s, name): one for s, given in enumerate(weights) for name, one in given.items()}


def stepped(weights, given):
    """w(t + 1) from w(t) and from the weights that the gradient was computed with."""
    new = {name: torch.nn.Parameter(one.clone()) for name, one in weights.items()}
    for name, one in new.items():
        one.grad = given[name].grad
    torch.optim.SGD(new.values(), RATE, fused=True).step()
    return {name: one.detach() for name, one in new.items()}


@pytest.fixture
def one_thread():
    """As ranks have here: a sum that is split among threads is another sum."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("updates", LATE)
def test_ranks_do_what_the_paper_s_equations_say(recorded, updates, text, one_thread):
    losses, gradients, weights = simulated(updates, text)
    record = recorded[updates]
    assert record["losses"] == losses
    for ours, theirs in ((record["gradients"][-1], gradients), (record["parameters"], weights)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_they_train_differently(recorded):
    """Or the same bits would prove nothing."""
    ends = {updates: one["losses"][-1][-1] for updates, one in recorded.items()}
    assert ends["stash"] != ends["vertical"]


def test_what_needs_the_whole_gradient_is_refused(mistakes, compiled, text):
    file = compiled("pipedream", stages=4, microbatches=8)
    common = [file, "--model", GPT, "--text", text, "--steps", 1]
    ended = mistakes(4, [[*common, "--clip", 1], [*common, "--accumulate", 2], [*common, "--on-nan", "skip"]])
    whole = "needs the whole gradient, and this schedule updates stages one by one"
    assert [one.err for one in ended] == [
        f"mpirun: --clip {whole}\n",
        f"mpirun: --accumulate {whole}\n",
        "mpirun: --on-nan skip: this schedule has updated stages before all losses are known\n",
    ]
    assert [one.code for one in ended] == [2, 2, 2]


def test_a_run_that_is_resumed_ends_with_the_same_bits(several, compiled, text, tmp_path):
    file = compiled("pipedream", stages=2, replicas="3,1", microbatches=7)
    common = [file, "--model", DROPPING, "--text", text]
    whole, half = tmp_path / "whole", tmp_path / "half"
    runs = [
        [*common, "--steps", 4, "--save", whole, "--every", 4],
        [*common, "--steps", 2, "--save", half, "--every", 2],
        [*common, "--steps", 4, "--save", half, "--every", 4, "--resume", half],
    ]
    assert [code for code, _ in several(4, runs)] == [0, 0, 0]
    files = sorted(one.relative_to(whole) for one in whole.rglob("*.safetensors"))
    assert files and all((whole / one).read_bytes() == (half / one).read_bytes() for one in files)
