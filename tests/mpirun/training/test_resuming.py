"""Scripts go on from checkpoints: what is restored of optimizers and the data's order, and which options may change."""

from __future__ import annotations

import re

from engine_scripts import SAVING

RESUMES = """
import sys, torch, mpirun
from mpirun.examples.mlp import tiny
model = tiny(1)
text = torch.frombuffer(bytearray(open(sys.argv[3], "rb").read()), dtype=torch.uint8)
with mpirun.Engine(sys.argv[1], model) as run:
    loader = run.loader(lambda step, microbatch, rng: model.batch(text, rng))
    assert run.resume(sys.argv[2])
    print(run.step(next(iter(loader))).loss, run.steps)
"""


def test_a_run_of_the_command_line_goes_on_in_a_script(several, scripts, compiled, text, tmp_path):
    """With the same optimizer; a script does not know the text."""
    schedule = compiled("1f1b", stages=1, microbatches=2)
    options = ["--model", "mpirun.examples.mlp:tiny", "--text", text, "--steps", 2, "--save", tmp_path]
    ((code, out),) = several(1, [[schedule, *options]])
    assert code == 0, out
    (done,) = scripts(1, [[RESUMES, schedule, tmp_path, text]])
    assert done.out.split()[-1] == "3", done.err
    assert re.fullmatch(r"mpirun: note: the checkpoint was made with text \w{8}, not no text\n", done.err), done.err


def test_a_run_whose_steps_are_all_done_is_exported_and_saved_when_it_is_started_again(tmp_path, scripts):
    """As one that was killed before its export: the data that it resumes give the shape of a microbatch."""
    script = """
from itertools import islice
from safetensors.torch import load_file
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(data)
def weights(name):
    files = (folder / name).glob("*.safetensors")
    return {key: value.tolist() for file in files for key, value in load_file(file).items()}
data = [(row, row) for row in x]
for kind, dataset in (("map", data), ("stream", Stream()), ("function", lambda *_: (x[2:4], x[:2]))):
    losses = []
    for part in ("whole", "exported", "saved"):
        with engine(2) as run:
            loader = run.loader(dataset, 2)
            assert run.resume(folder / kind, data=loader) == (part != "whole")
            for batch in islice(loader, 0 if run.steps else 1):
                run.step(batch)
                run.save(folder / kind, data=loader)
            if part == "saved":
                assert run.save(folder / kind, data=loader)
            else:
                run.export(folder / f"{kind}-{part}")
            assert (run.steps, loader.epoch, loader.step) == (1, 0, 1)
            losses.append(run.step(next(iter(loader))).loss)
    assert len({*losses}) == 1 and weights(f"{kind}-whole") == weights(f"{kind}-exported") != {}
with engine(2) as run:
    assert run.resume(folder / "map") and refused(lambda: run.export(folder / "without data")) == 2
"""
    (done,) = scripts(2, [[SAVING + script, tmp_path]])
    assert done.code == 0, done.err
    assert done.err.splitlines()[-1] == "mpirun: export: nothing has been trained or evaluated yet"


DRAWN_AGAIN = """
import sys
import mpirun, torch
from mpi4py import MPI
x, found = torch.ones(4, 4), []
for seed in (0, 1 + MPI.COMM_WORLD.rank):
    torch.manual_seed(seed)
    modules = [torch.nn.Linear(4, 4) for _ in range(2)]
    with mpirun.Engine("1f1b", modules, stages=2, microbatches=2, loss=torch.nn.functional.mse_loss) as run:
        loader = run.loader([(torch.ones(4), torch.ones(4))] * 4)
        if not run.resume(sys.argv[1], data=loader):
            run.step(next(iter(loader)))
            run.save(sys.argv[1], data=loader)
        found.append(run.evaluate(loader).loss)
assert found[0] == found[1], found
"""


def test_a_resumed_run_may_draw_other_weights_which_the_checkpoint_replaces(tmp_path, scripts):
    (done,) = scripts(2, [[DRAWN_AGAIN, tmp_path]])
    assert (done.code, done.err) == (0, "")


def test_what_an_optimizer_keeps_is_resumed_as_it_was_saved(tmp_path, scripts):
    """Python numbers, tensors of other shapes and types than the parameter's; what a scheduler sets in groups."""
    script = """
class Odd(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state, gradient = self.state[parameter], parameter.grad.double()
            if not state:
                state.update(decay=1.0, calls=0, begun=False, scale=torch.ones(()).double(), rows=torch.zeros(4, 1, 1))
            state.update(decay=state["decay"] * 0.9, calls=state["calls"] + 1, begun=True)
            state["scale"] *= 0.9
            state["rows"] += gradient.reshape(4, 1, -1).mean(2, keepdim=True)
            parameter -= state["decay"] * gradient + state["scale"] * state["rows"].sum() / state["calls"]
def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other
class Decay(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self):
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.1 * self.last_epoch
        return self.base_lrs
for make, scheduler in ((torch.optim.Adafactor, None), (Odd, None), (torch.optim.AdamW, Decay)):
    found = []
    for name, parts in (("whole", (4,)), ("parts", (2, 4))):
        for steps in parts:
            with engine(optimizer=lambda named: make([entry.parameter for entry in named]), scheduler=scheduler) as run:
                run.resume(folder / make.__name__ / name)
                while run.steps < steps:
                    run.step((x, x))
                assert run.save(folder / make.__name__ / name)
                (made,) = run.session.interpreter.optimizer.by_unit.values()
                kept = [value for state in made.optimizer.state.values() for value in state.values()]
                predicted = run.predict([(x, x)])
        found.append([predicted, *kept])
    assert len(found[0]) == len(found[1]) and all(map(same, *found)), found
"""
    (done,) = scripts(1, [[SAVING + script, tmp_path]])
    assert (done.code, done.err) == (0, "") and done.out.count("resumed after step 2: ") == 3


def test_options_that_choose_kernels_or_that_are_not_read_may_change(tmp_path, scripts):
    script = """
for steps, switch in ((1, True), (2, False)):
    def adam(named):
        return torch.optim.Adam([{"params": [x.parameter for x in named], "read": switch}], foreach=switch)
    with engine(optimizer=adam) as run:
        run.resume(folder)
        run.step((x, x))
        run.save(folder)
"""
    (done,) = scripts(1, [[SAVING + script, tmp_path]])
    assert (done.code, done.err) == (0, "mpirun: note: the checkpoint was made with read True, not read False\n")


def test_what_is_kept_for_a_parameter_without_dimensions_is_resumed_where_weights_are_divided(
    tmp_path, compiled, scripts
):
    script = """
import sys, mpirun, torch
from torch import nn
class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
    def forward(self, x):
        return super().forward(x) * self.scale
def sgd(named):
    return torch.optim.SGD([x.parameter for x in named], 0.1, momentum=0.9)
x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
found = []
for name, parts in (("whole", (4,)), ("parts", (2, 4))):
    for steps in parts:
        torch.manual_seed(0)
        with mpirun.Engine(sys.argv[1], [Scaled(), Scaled()], loss=nn.functional.mse_loss, optimizer=sgd) as run:
            run.resume(f"{sys.argv[2]}/{name}")
            while run.steps < steps:
                run.step((x, x))
            run.save(f"{sys.argv[2]}/{name}")
            predicted = run.predict([(x, x)])
    found.append(predicted)
assert run.rank or torch.equal(*found)
"""
    schedule = compiled("fsdp", stages=2, microbatches=2, workers=2, shards=2)
    (done,) = scripts(2, [[script, schedule, tmp_path]])
    assert (done.code, done.err) == (0, ""), done.err


def test_options_of_groups_that_a_resumed_run_changes_are_noted(tmp_path, scripts):
    script = """
def train(steps, lr=0.01, **options):
    def adamw(named):
        of_rows = {True: options, False: {}}
        return torch.optim.AdamW([{"params": [x.parameter], **of_rows[len(x.shape) > 1]} for x in named], lr)
    with engine(optimizer=adamw) as run:
        run.resume(folder)
        while run.steps < steps:
            run.step((x, x))
        run.save(folder)
train(1, weight_decay=0.2)
train(2, weight_decay=0.2)
train(3, weight_decay=0.3)
train(4, torch.tensor(0.5), weight_decay=0.3)
train(5, torch.tensor(0.25), weight_decay=0.3)
for lr in (0.25, 0.5):
    with engine(lr=lr) as run:
        run.resume(folder / "rate")
        run.step((x, x))
        run.save(folder / "rate")
"""
    (done,) = scripts(1, [[SAVING + script, tmp_path]])
    notes = [
        "weight_decay [0.01, 0.2], not weight_decay [0.01, 0.3]",
        "lr 0.01, not lr 0.5",
        "lr 0.5, not lr 0.25",
    ]
    notes.append("lr 0.25, not lr 0.5")
    assert done.err.splitlines() == [f"mpirun: note: the checkpoint was made with {words}" for words in notes]


def test_a_checkpoint_of_a_larger_model_is_refused(tmp_path, scripts):
    script = """
with engine(2) as run:
    run.step((x, x))
    run.save(folder / "saved")
with engine() as run:
    run.resume(folder / "saved")
    run.step((x, x))
"""
    (done,) = scripts(1, [[SAVING + script, tmp_path]])
    what = "no stage has 2 of its entries, such as stage1.bias: is it of a larger model?"
    assert (done.code, done.err) == (2, f"mpirun: {tmp_path / 'saved' / 'step-00000001'}: {what}\n")
