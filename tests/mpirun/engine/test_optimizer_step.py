"""What NORM tells all ranks, and the rate that they step with."""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from examples import examples
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mpirun.comm.device import Device
from mpirun.engine.grad_buffers import GradBuffer
from mpirun.engine.optimizer import Optimizer
from mpirun.engine.optimizer_step import are_equal, numbers_for_equality
from mpirun.engine.recipe import NamedParameter, Recipe
from mpirun.engine.stage import LocalStage
from mpirun.model.contract import Model
from mpirun.model.stage_shape import StageShape
from schedgen.ir.limits import MOST_WORKERS
from schedgen.util.errors import UsageError


def test_whether_rates_are_the_same_is_told_of_as_many_ranks_as_there_may_be():
    """Their numbers are added in floats, one after the other."""
    rates = np.random.default_rng(0).random(examples(100))
    for rate, other in zip(rates, np.roll(rates, 1), strict=True):
        columns = [np.full(MOST_WORKERS, number, float) for number in numbers_for_equality(rate)]
        assert are_equal(*(np.cumsum(column)[-1] for column in columns))
        for column, number in zip(columns, numbers_for_equality(other), strict=True):
            column[-1] = number
        assert not are_equal(*(np.cumsum(column)[-1] for column in columns))


def test_a_rate_that_is_one_tensor_for_all_optimizers_is_scheduled_once():
    rate = torch.tensor(0.01)
    recipe = Recipe(
        lambda named: torch.optim.Adam([entry.parameter for entry in named], lr=rate),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    )
    weight = nn.Parameter(torch.ones(1))
    made = [recipe.make([NamedParameter("weight", weight, weight.shape, True)]) for _ in range(2)]
    for step in range(3):
        for optimizer in made:
            optimizer.set_rate(step)
        assert [optimizer.rate for optimizer in made] == pytest.approx([0.01 * 0.5**step] * 2)
    assert rate == torch.tensor(0.01)


def linear(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> tuple[Optimizer, LocalStage, GradBuffer]:
    """The optimizer of a rank with one matrix, its stage and its gradient."""
    module = nn.Linear(3, 2, bias=False)
    stage = LocalStage(module, 0, StageShape((), ("weight",)), Device(), owned_parts=(-1,))
    recipe = Recipe(lambda named: make([entry.parameter for entry in named]))
    optimizer = Optimizer(recipe, Model([module], mse_loss), {0: stage})
    return optimizer, stage, GradBuffer(stage, [0], [torch.zeros(stage.size, dtype=torch.uint8)])


@pytest.mark.parametrize("options", [{}, {"lr": None}])
def test_the_rate_of_an_optimizer_that_has_none_is_0(options):
    """That of Adafactor in transformers is None where it chooses the rate itself."""
    optimizer, *_ = linear(lambda parameters: torch.optim.Optimizer(parameters, options))
    assert optimizer.rate(0) == 0


class AssigningData(torch.optim.SGD):
    """Puts another tensor in the place of the weights."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data - self.param_groups[0]["lr"] * parameter.grad


class AssigningGradients(torch.optim.SGD):
    """Puts another tensor in the place of the gradients."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = parameter.grad * 1
        super().step()


class Clearing(torch.optim.SGD):
    """Clears the gradients."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.zero_grad()


class AssigningWhereGroupsAreRead(torch.optim.SGD):
    """As AssigningGradients, in a method that torch's step() calls."""

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        for parameter in group["params"]:
            parameter.grad = parameter.grad * 1
        return super()._init_group(group, *lists)


def clearing_by_a_hook(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    made = torch.optim.SGD(parameters, lr)
    made.register_step_post_hook(lambda optimizer, *arguments: optimizer.zero_grad())
    return made


MAKES = [
    torch.optim.SGD, AssigningData, AssigningGradients, AssigningWhereGroupsAreRead, Clearing, clearing_by_a_hook,
]  # fmt: skip


def steps_as_in_place(make: Callable[[list[nn.Parameter], float], torch.optim.Optimizer], factor: float) -> None:
    """SGD on gradients that a hook multiplies by `factor` should step the weights in the memory of the engine."""
    optimizer, stage, gradient = linear(lambda parameters: make(parameters, 0.5))
    (weight,), (total,) = stage.views(stage.weights), stage.views(gradient.total)
    expected = weight.clone()
    for step in range(3):
        total.copy_(torch.randn(2, 3))
        expected -= 0.5 * factor * total
        optimizer.step((0, -1), gradient, step, 0.0)
        assert torch.equal(weight, expected)
        assert torch.equal(stage.module.weight, expected)


@pytest.mark.parametrize("make", MAKES)
def test_an_optimizer_may_assign_where_torch_s_write_in_place(make):
    """The engine has the weights and the gradients in memory of its own."""
    steps_as_in_place(make, 1)


def test_a_hook_of_all_optimizers_may_assign_gradients():
    def double(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = parameter.grad * 2

    hook = register_optimizer_step_pre_hook(double)
    try:
        steps_as_in_place(torch.optim.SGD, 2)
    finally:
        hook.remove()


def test_what_a_script_assigns_replaces_the_weights_if_it_is_like_them():
    optimizer, stage, _ = linear(lambda parameters: torch.optim.SGD(parameters, 0.5))
    (weight,), parameter = stage.views(stage.weights), optimizer.parameters[0, -1][0]
    own, before, assigned = parameter.data, weight.clone(), torch.randn(3, 2).t()
    parameter.data = assigned
    with optimizer.assigned():
        assert torch.equal(weight, assigned)
    assert torch.equal(own, before)
    parameter.data = own
    with optimizer.assigned():
        assert torch.equal(weight, before)
    parameter.data = assigned
    optimizer.take_assigned()
    assert torch.equal(weight, assigned)
    assert parameter.is_set_to(weight)
    parameter.data = own.as_strided((2, 3), (1, 2))  # its memory is that of the weights
    expected = parameter.data.clone()
    optimizer.take_assigned()
    assert torch.equal(weight, expected)
    for other in (own[:1], own.double()):
        parameter.data = other
        with pytest.raises(UsageError, match=f"^what was assigned to .data of stage0.weight is {other.dtype} of "):
            optimizer.take_assigned()
        parameter.data = own


def test_parameters_that_are_frozen_between_steps_are_named():
    """Those that the factory was given, and those of the script's module."""
    module, factory = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), partial(torch.optim.SGD, lr=0.5)
    module[0].requires_grad_(False)
    stage = LocalStage(copy.deepcopy(module), 0, StageShape((), ("1.weight", "1.bias")), Device(), owned_parts=(-1,))
    optimizer = Optimizer(
        Recipe(lambda named: factory([x.parameter for x in named])), Model([module], mse_loss), {0: stage}
    )
    given = optimizer.parameters[0, -1]
    for parameter, name in ((given[1], "1.bias"), (module[1].weight, "1.weight"), (module[0].weight, "0.weight")):
        assert not optimizer.changed_flag()
        parameter.requires_grad_(flag := not parameter.requires_grad)
        assert optimizer.changed_flag().startswith(
            f"requires_grad of stage0.{name} has become {flag}, but a run trains"
        )
        parameter.requires_grad_(not flag)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda x: x.register_hook(abs), "gives stage0.weight a hook (register_hook), which a stage would not call"),
        (
            lambda x: x.register_post_accumulate_grad_hook(id),
            "gives stage0.weight a hook (register_post_accumulate_grad_hook), which a stage would not call",
        ),
        (lambda x: x.requires_grad_(False), "freezes stage0.weight: freeze it in the model, before the first step"),
    ],
)
def test_hooks_and_freezing_by_a_factory_are_refused(change, sentence):
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        change(parameters[0])
        return torch.optim.SGD(parameters, 0.5)

    with pytest.raises(UsageError, match=f"^the optimizer's factory {re.escape(sentence)}$"):
        linear(make)


class Keeping(torch.optim.SGD):
    """Keeps something in its attributes and by parameter; a step may change it."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, 0.1)
        self.array, self.number, self.object = np.zeros(2), np.float32(0), SimpleNamespace(count=0, array=np.zeros(2))
        self.inner = [torch.optim.SGD(parameters, 0.1, momentum=0.9)]
        self.set, self.counter = {1, 2}, Counter("ab")
        self.log, self.numpy, self.own = logging.getLogger("optimizer"), np, set(parameters)

    def step(self, closure: Any = None) -> None:
        self.log.isEnabledFor(logging.INFO)  # which a logger remembers
        super().step()


def change(key: Any) -> Callable[[Any], None]:
    """A function that keeps a number by parameter, under this name."""
    return lambda made: made.state[made.param_groups[0]["params"][0]].update({key: 1})


CHANGES: dict[str, tuple[Callable[[Any], Any], str | None]] = {
    "nothing": (lambda made: None, None),
    "an array": (lambda made: made.array.__iadd__(1), "Keeping has changed its array, which"),
    "a number of numpy's": (lambda made: setattr(made, "number", made.number + 1), "Keeping has changed its number, "),
    "an object's number": (lambda made: setattr(made.object, "count", 1), "Keeping has changed its object, which"),
    "an object's array": (lambda made: made.object.array.__iadd__(1), "Keeping has changed its object, which"),
    "one of several optimizers": (lambda made: made.inner[0].step(), "Keeping has changed its inner, which"),
    "a set": (lambda made: made.set.add(3), "Keeping has changed its set, which"),
    "a counter": (lambda made: made.counter.update("a"), "Keeping has changed its counter, which"),
    "a name": (change("ema_g"), None),
    "a name with a dot": (change("ema.g"), "keeps state under 'ema.g', which checkpoints cannot name: take a string"),
    "a share's name": (change("g@0/2"), "keeps state under 'g@0/2', which checkpoints cannot name"),
    "a number as a name": (change(0), "keeps state under 0, which checkpoints cannot name"),
    "no name": (change(""), "keeps state under '', which checkpoints cannot name"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_checkpoints_would_lose_is_refused(case):
    change, why = CHANGES[case]
    optimizer, _, gradient = linear(Keeping)
    optimizer.step((0, -1), gradient, 0, 0.0)
    change(optimizer.by_unit[0, -1].optimizer)
    with contextlib.nullcontext() if why is None else pytest.raises(UsageError, match=f"^the optimizer {why}"):
        optimizer.check_saved()
