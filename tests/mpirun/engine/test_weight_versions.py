"""Weights that change without a flush: what ranks do is what the equations of PipeDream and 2BW say, to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.func import functional_call

import mpirun.data.microbatches
from mpirun.model.build_stage import build_stage
from mpirun.model.load_model import load_model
from schedgen.ir.weights import UPDATES

GPT = "models_for_graphs:gpt_of_four"
STEPS, BATCHES, STAGES = 2, 12, 4
RATE = 0.05
SGD = ["--optimizer", "sgd", "--lr", RATE, "--weight-decay", 0]
LATE = tuple(name for name in UPDATES if name != "flush")


@pytest.fixture(scope="module")
def recorded(inside, compiled, text, tmp_path_factory):
    """What the ranks did, by updates: losses of every microbatch, gradients of the last updates, weights in the end."""
    folder = tmp_path_factory.mktemp("records")
    runs = [
        {
            "arguments": [
                compiled("pipedream", stages=STAGES, microbatches=BATCHES, updates=updates),
                *("--model", GPT, "--text", text, "--steps", STEPS, "--verify", "--canonical", *SGD),
            ],
            "record": str(folder / updates),
        }
        for updates in LATE
    ]
    assert [run.code for run in inside(4, runs)] == [0] * len(runs)
    return {updates: torch.load(folder / updates) for updates in LATE}


def simulated(updates: str, text: Path):
    """PipeDream, section 3.3, for n stages, counted from 1, and minibatch t, counted from 0:

        w(t + 1) = w(t) - rate * gradient of f(w_1(t - n + 1), w_2(t - n + 2), ..., w_n(t))
        w(t + 1) = w(t) - rate * gradient of f(w_1(t - n + 1), w_2(t - n + 1), ..., w_n(t - n + 1))   vertical sync

    where w(t) for t < 0 is w(0). A pass through the list is t = 0 to B - 1. 2BW (2021, section 3.1) takes several
    microbatches to a minibatch, here n:

        w(t + 1) = w(t) - rate * gradient of f(w(t - 1))
    """
    m = STAGES if updates == "2bw" else 1
    late = {"stash": [STAGES - n for n in range(1, STAGES + 1)], "vertical": [STAGES - 1] * STAGES, "2bw": [1] * STAGES}
    model = load_model(GPT, STAGES, 0)
    data = torch.from_numpy(np.frombuffer(text.read_bytes(), np.uint8).copy())
    modules = [build_stage(model, stage, 0) for stage in range(STAGES)]
    weights = [{name: weight.detach().clone() for name, weight in module.named_parameters()} for module in modules]
    losses = []
    for number in range(STEPS):
        history = [[initial] for initial in weights]
        losses.append([])
        for t in range(BATCHES // m):
            used = [
                {name: weight.clone().requires_grad_() for name, weight in versions[max(0, t - delay)].items()}
                for versions, delay in zip(history, late[updates], strict=True)
            ]
            for b in range(m * t, m * t + m):
                (value,), target, *_ = mpirun.data.microbatches.Microbatches(model.batch, data, 0, 1)(number, b)
                for module, parameters in zip(modules, used, strict=True):
                    value = functional_call(module, parameters, value)
                loss = model.loss(value, target)
                loss.backward()
                losses[-1].append(loss.item())
            for s, parameters in enumerate(used):
                for weight in parameters.values():
                    weight.grad /= m
                history[s].append(stepped(history[s][t], parameters))
        weights = [versions[-1] for versions in history]
    gradients = {(s, name): weight.grad for s, stage in enumerate(used) for name, weight in stage.items()}
    return losses, gradients, {(s, name): weight for s, stage in enumerate(weights) for name, weight in stage.items()}


def stepped(weights, used):
    """w(t + 1) from w(t) and from the weights that the gradient was computed with."""
    new = {name: torch.nn.Parameter(weight.clone()) for name, weight in weights.items()}
    for name, parameter in new.items():
        parameter.grad = used[name].grad
    torch.optim.SGD(new.values(), RATE, fused=True).step()
    return {name: parameter.detach() for name, parameter in new.items()}


@pytest.fixture
def one_thread():
    """As ranks have here: a sum that is split among threads has other bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("updates", LATE)
def test_ranks_do_what_the_paper_s_equations_say(recorded, updates, text, one_thread):
    losses, gradients, weights = simulated(updates, text)
    record = recorded[updates]
    assert record["losses"] == losses
    for tensors, reference in ((record["gradients"][-1], gradients), (record["parameters"], weights)):
        assert tensors.keys() == reference.keys()
        assert all(torch.equal(tensors[key], reference[key]) for key in reference)


def test_they_train_differently(recorded):
    """Otherwise the same bits would prove nothing."""
    assert len({record["losses"][-1][-1] for record in recorded.values()}) == len(LATE)


REPLACING = """
made = []
class Replacing(torch.optim.SGD):
    def step(self):
        for p in self.param_groups[0]["params"]:
            if len(sys.argv) == 2 or self is not made[0]:
                p.data = p.data - 0.01 * p.grad
def optimizer(named):
    made.append(Replacing([entry.parameter for entry in named], 0.01))
    return made[-1]
with mpirun.Engine(sys.argv[1], layers(2), loss=mse_loss, optimizer=optimizer, timeout=0, verify=True) as run:
    run.step((x, x))
    sys.exit(not run.verify())
"""


def test_an_update_is_kept_though_the_optimizer_assigns_and_is_seen_where_ranks_lose_it(scripts, compiled):
    """An optimizer replaces the weights by other tensors; with another argument the first on each rank does nothing."""
    schedule = compiled("pipedream", stages=2, microbatches=4)
    kept, lost = scripts(2, [[REPLACING, schedule], [REPLACING, schedule, "lose"]])
    assert kept.code == 0 and "verify: passed" in kept.out, kept.err
    assert lost.code == 1 and "verify: failed" in lost.out, lost.err


def test_a_gradient_that_is_not_finite_ends_the_run_though_later_ones_are(scripts, compiled):
    """The forwards after its update use older weights, and NORM has the gradients of the last update alone."""
    script = """
class Unsound(torch.nn.Linear):
    def forward(self, x):
        output = super().forward(x)
        if (x == 7).all():
            output.register_hook(lambda gradient: gradient * math.inf)
        return output
at = int(sys.argv[2])
with mpirun.Engine(sys.argv[1], [Unsound(4, 4), *layers(1)], loss=mse_loss, optimizer=SGD, timeout=0) as run:
    run.step((x, x))
    x[2 * at : 2 * at + 2] = 7
    run.step((x, x))
    print("done")
"""
    sizes = {"stages": 2, "microbatches": 4}
    late = [(compiled("pipedream", **sizes, updates=updates), 2) for updates in ("stash", "vertical")]
    for done in scripts(2, [[script, *run] for run in [*late, (compiled("pipedream-2bw", **sizes), 1)]]):
        assert (done.code, done.out) == (1, "")
        assert "step 2" in done.err and "the norm of the gradient of bias, stage 0, is nan" in done.err


def test_a_run_that_is_resumed_ends_with_the_same_bits(several, compiled, text, tmp_path):
    file = compiled("pipedream", stages=2, replicas="3,1", microbatches=7)
    common = [file, "--model", "models_for_tests:dropping", "--text", text]
    uninterrupted, half = tmp_path / "whole", tmp_path / "half"
    runs = [
        [*common, "--steps", 4, "--save", uninterrupted, "--every", 4],
        [*common, "--steps", 2, "--save", half, "--every", 2],
        [*common, "--steps", 4, "--save", half, "--every", 4, "--resume", half],
    ]
    assert [code for code, _ in several(4, runs)] == [0, 0, 0]
    files = sorted(file.relative_to(uninterrupted) for file in uninterrupted.rglob("*.safetensors"))
    assert files and all((uninterrupted / file).read_bytes() == (half / file).read_bytes() for file in files)
