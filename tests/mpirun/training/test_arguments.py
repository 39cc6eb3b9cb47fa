"""What an Engine and its methods take as arguments, and the one sentence that refuses others."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
import torch
from torch.nn.functional import mse_loss

from mpirun.engine.recipe import NamedParameter
from mpirun.training.arguments import Given, make_recipe
from schedgen.util.errors import UsageError


@pytest.mark.parametrize("given", [torch.optim.Adam, functools.partial(torch.optim.Adam, eps=1e-3)])
def test_an_optimizer_s_class_is_called_with_the_parameters_alone(given):
    weight = torch.nn.Parameter(torch.ones(1))
    made = make_recipe(given, 0.1, None, None).make([NamedParameter("weight", weight, weight.shape, True)])
    (optimizer,) = made.optimizers
    (group,) = optimizer.param_groups
    assert type(optimizer) is torch.optim.Adam and group["params"] == [weight] and "param_names" not in group


def test_rates_are_numbers_of_any_type():
    assert make_recipe(None, np.float32(0.5), None, None).rate(0) == 0.5
    for rate in (True, "0.5"):
        with pytest.raises(UsageError, match="lr should be a number or a function of the step, not "):
            make_recipe(None, rate, None, None)


def test_a_module_that_is_not_in_stages_is_to_be_split():
    """A Sequential's children are its stages, if there are as many as are asked for."""
    module = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
    taken = Given(module, mse_loss, 4, None, 0).take(4)
    assert [*taken.stages] == [*module]
    for given, name in ((module, "Sequential"), (module[0], "Linear")):
        words = f"the model, a {name}, is not in 2 stages: split it first, mpirun.split(model, example, stages=2)"
        for stages, layers in ((2, None), (1, [1, 1])):
            with pytest.raises(UsageError, match=re.escape(words)):
                Given(given, mse_loss, stages, None, 0).take(stages, layers)


def test_a_schemes_name_takes_the_options_of_compile(execute):
    """And has as many microbatches as ranks, unless it is said."""
    script = """
plain = nn.Sequential(*layers(2))
expected = mse_loss(plain(x), x).item()
for scheme, options, scheme_of_file in (
    ("zb-h1", {"replicas": 2, "shards": 2, "n": "depth-first"}, {"replicas": 2, "shards": [2, 2]}),
    ("1f1b-rr", {"replicas": [1, 3], "microbatches": 8, "updates": "flush"}, {"replicas": [1, 3], "microbatches": 8}),
    ("fsdp", {"shards": 2, "recompute": [0], "weight_slots": 1}, {"shards": [2, 2]}),
):
    with engine(layers(2), scheme, **{"microbatches": None, "example": (x[:1], x[:1]), **options}) as run:
        assert math.isclose(run.step((x, x)).loss, expected, rel_tol=1e-5)
        header = run.session.header
        found = {**header.scheme, "shards": [len(header.weight_shards.of(s)) for s in range(2)]}
        assert all(found[name] == value for name, value in scheme_of_file.items()), found
with engine(nn.Linear(4, 4), "fsdp", microbatches=None) as run:
    run.step((x, x))
    assert len(run.session.header.weight_shards.of(0)) == 4
"""
    execute(4, script)
