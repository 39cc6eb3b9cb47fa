"""Evaluations and predictions between the steps of a script: what they compute, and what they leave alone."""

from __future__ import annotations

from engine_scripts import SAVING


def test_evaluations_leave_the_buffers_alone_with_which_other_ranks_train(tmp_path, scripts):
    """Each rank has its own mean of the microbatches that it has seen; those of rank 0 are the model's."""
    script = """
class Centred(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("mean", torch.zeros(4))
    def forward(self, x):
        if self.training:
            self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return super().forward(x - self.mean)
def losses(evaluates):
    torch.manual_seed(0)
    with mpirun.Engine("ddp", [Centred()], stages=1, microbatches=4, loss=mse_loss, timeout=0) as run:
        for number in range(3):
            yield run.step((x + number, x)).loss
            if evaluates:
                run.evaluate([(x, x)])
                run.predict([(x, x)])
                run.export(folder / str(number))
assert list(losses(True)) == list(losses(False))
"""
    (done,) = scripts(2, [[SAVING + script, tmp_path]])
    assert done.code == 0, done.err


def test_evaluations_are_in_eval_mode_whatever_it_leaves_out(scripts):
    """A stage that is only a dropout returns its input; branches are not scaled, nothing is sampled, a buffer stays."""
    script = """
import copy
import mpirun, torch
from mpi4py import MPI
from torch import nn
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(6))
        self.register_buffer("mean", torch.zeros(512))
    def forward(self, x):
        for layer in self.layers:
            y = torch.tanh(layer(x))
            if self.training:
                y = y * y.new_empty(len(y), 1).bernoulli_(0.8) / 0.8
            x = x + y
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
            x = x + torch.randn_like(x)
        return x - self.mean
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(512, 512), nn.Dropout(0.5), nn.Linear(512, 512))
x = torch.randn(64, 512)
data = torch.utils.data.TensorDataset(x, torch.zeros(64, 512))
branches = Branches()
for net, model in ((plain, list(plain)), (branches, mpirun.split(branches, x[:4], stages=3))):
    with mpirun.Engine("1f1b", model, loss=nn.functional.mse_loss, stages=3, microbatches=8, timeout=60) as run:
        loader = run.loader(data, microbatch_size=4)
        expected = copy.deepcopy(net).eval()(x)
        for trained in (False, True):
            found, predicted = run.evaluate(loader), run.predict(loader)
            if run.rank == 0 and not trained:
                torch.testing.assert_close(predicted, expected, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(found.loss, expected.square().mean().item(), rtol=1e-5, atol=0)
            for batch in loader:
                run.step(batch)
        before = run.evaluate(loader).loss
        assert before == run.evaluate(loader).loss
"""
    (done,) = scripts(3, [[script]])
    assert done.code == 0, done.err


ADAPTED = """
import mpirun, torch
from torch import nn
from torch.nn.functional import linear, mse_loss
class Adapted(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.added = nn.Parameter(torch.randn(4, 4))
        self.merged = False
        self.weight.requires_grad_(False)
    def train(self, mode=True):
        if self.merged == mode:
            self.weight.data += (-1 if mode else 1) * self.added.data
            self.merged = not mode
        return super().train(mode)
    def forward(self, x):
        return super().forward(x) + (0 if self.merged else linear(x, self.added))
"""


def test_modules_with_a_train_of_their_own_are_told_when_an_evaluation_ends(scripts):
    """As layers that add an adapter to their weight in eval mode; one that was in eval mode before stays in it."""
    script = """
def losses(evaluates):
    torch.manual_seed(0)
    x, net = torch.randn(4, 4), nn.Sequential(Adapted(), Adapted(), nn.Dropout())
    net[2].eval()
    with mpirun.Engine("gpipe", [net], stages=1, microbatches=2, loss=mse_loss, timeout=0) as run:
        for _ in range(3):
            yield run.step((x, x)).loss
            if evaluates:
                run.evaluate([(x, x)])
torch.testing.assert_close(list(losses(True)), list(losses(False)))
"""
    (done,) = scripts(1, [[ADAPTED + script]])
    assert done.code == 0, done.err


def test_an_eval_that_computes_with_weights_that_are_fetched_later_is_refused(scripts):
    """It would add the adapter of an earlier step. Where ranks have the weights, adapters may be merged."""
    script = """
for scheme in ("ddp", "fsdp"):
    torch.manual_seed(0)
    x, stages = torch.randn(4, 4), [Adapted(), Adapted()]
    expected = (stages[1](stages[0](x))).detach()
    with mpirun.Engine(scheme, stages, microbatches=2, loss=mse_loss, lr=0.0, timeout=60) as run:
        run.step((x, x))
        predicted = run.predict([(x, x)])
        if run.rank == 0:
            torch.testing.assert_close(predicted, expected)
"""
    (done,) = scripts(2, [[ADAPTED + script]])
    assert done.code == 2 and done.err.splitlines() == [
        "mpirun: eval() of stage 0 uses its trained weights, as layers that merge an adapter do, but ranks "
        "fetch them only afterwards: leave adapters unmerged, or take a schedule that fetches no weights, such as ddp"
    ]


SENT = """
import gc, torch, mpirun
from torch.nn.functional import mse_loss
from mpirun.engine.core.buffers import LocalBuffer
gc.collect()
x = torch.zeros(4, 4)
with mpirun.Engine("fsdp", [torch.nn.Linear(4, 4) for _ in range(2)], microbatches=2, loss=mse_loss) as run:
    run.evaluate([(x, x)] * 3)
    run.predict([(x, x)])
    left = sum(len(found.sends) for found in gc.get_objects() if isinstance(found, LocalBuffer))
    lefts = run.comm.gather(left)
    if lefts:
        print(lefts)
"""


def test_weights_that_an_evaluation_sends_have_been_sent_when_it_ends(scripts):
    (done,) = scripts(2, [[SENT]])
    assert (done.code, done.out) == (0, "[0, 0]\n"), done.err


WITHIN = """
import torch, mpirun
from torch.nn.functional import mse_loss
data = [(x, x) for x in torch.arange(20.0).view(5, 4)]
with mpirun.Engine("gpipe", [torch.nn.Linear(4, 4)], microbatches=2, loss=mse_loss, timeout=0) as run:
    loader = run.loader(data, shuffle=True)
    for batch in loader:
        run.step(batch)
        print(loader.epoch, loader.step, run.evaluate(loader).samples, run.evaluate(loader, 2).samples)
    print(len(run.predict(loader)), run.steps)
"""


def test_an_evaluation_in_the_middle_of_an_epoch_is_over_all_of_it(scripts):
    (done,) = scripts(1, [[WITHIN]])
    assert (done.code, done.out) == (0, "0 1 5 4\n0 2 5 4\n1 0 5 4\n5 3\n"), done.err


MODULE_S_OUTPUT = """
import torch, mpirun
from torch.nn.functional import mse_loss
class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    def forward(self, x):
        between = self.first(x)
        return {"out": self.second(between), "between": between}
def loss(output, target):
    return mse_loss(output["out"], target)
torch.manual_seed(0)
x, net = torch.randn(8, 4), Two()
cut = mpirun.split(net, x[:4], stages=2)
for model, own in ((cut, loss), (cut.model(loss), None), (cut.model(lambda output, _: output["between"].sum()), loss)):
    with mpirun.Engine("1f1b", model, loss=own, microbatches=2, timeout=0) as run:
        found, scored = run.predict([(x, x)]), run.evaluate([(x, x)]).loss
        if run.rank == 0:
            print({name: value.allclose(net(x)[name]) for name, value in found.items()}, end=" ")
            print(abs(scored - loss(net(x), x)).item() < 1e-5)
"""


def test_losses_and_predictions_are_of_the_module_s_own_output_whoever_makes_the_model(scripts):
    (done,) = scripts(2, [[MODULE_S_OUTPUT]])
    assert (done.code, done.out.splitlines()) == (0, ["{'out': True, 'between': True} True"] * 3), done.err


WITHOUT_TARGETS = """
import torch, mpirun
from torch.nn.functional import mse_loss
x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
with mpirun.Engine("gpipe", [torch.nn.Linear(4, 4)], microbatches=2, loss=mse_loss, timeout=0) as run:
    run.step((x, x))
    print(run.predict([(x, None)]).equal(run.predict([(x, x)])))
"""


def test_a_prediction_after_a_step_needs_no_targets(scripts):
    (done,) = scripts(1, [[WITHOUT_TARGETS]])
    assert (done.code, done.out) == (0, "True\n"), done.err
