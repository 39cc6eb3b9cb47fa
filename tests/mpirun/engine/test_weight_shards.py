"""Owners of a stage's weight shards train it as one owner does, hold no more than their parts, and save it whole."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from examples import further
from run_results import DEPTH_FIRST, differences, same, weights
from torch.nn.functional import mse_loss

from mpirun.comm.device import Device
from mpirun.engine.grad_norm import line_sums, subtrees, tensor_norms, tree_sum
from mpirun.engine.optimizer import Optimizer
from mpirun.engine.recipe import NamedParameter, Recipe, check_steps_pieces
from mpirun.engine.stage import LocalStage
from mpirun.engine.weight_shards import part_slices, pieces
from mpirun.model.contract import Model
from mpirun.model.parallel_layers import UNSHARDED, ColumnParallelLinear, Shard, sharded_dims
from mpirun.model.stage_shape import StageShape, flat_layout
from schedgen.util.errors import UsageError

# Parts of stage 0 alternate between two workers, all parts of stage 1 are on one worker, those of the rest anywhere.
BY_HAND = """
    import numpy as np

    def w(s, b, d, k):
        return np.select([s == 0, s == 1], [k % 2, 3], (s + 2 * k) % 4), b % 4
"""
GPT, MLP, SKEWED = "models_for_graphs:gpt_of_four", "models_for_graphs:mlp_of_four", "models_for_tests:peculiar"
# Scheme, options, model, options of mpirun. test_parameter_types.py has others, and test_schemes.py fsdp-sharded.
CASES = {
    "owners that compute nothing of it": ("gpipe", {"stages": 4, "shards": 3}, GPT, []),
    "empty parts": ("fsdp", {"stages": 4, "shards": 40}, SKEWED, []),
    "some stages": ("fsdp", {"stages": 4, "shards": "4,1,2,1", "recompute": "all", "microbatches": 8}, SKEWED, []),
    "a w of k": (BY_HAND + DEPTH_FIRST, {"stages": 4, "shards": 4}, MLP, []),
    "two passes": (
        "fsdp",
        {"stages": 2, "shards": 4},
        MLP,
        ["--accumulate", 2, "--optimizer", "sgd", "--momentum", 0.9],
    ),
}
COMMON = ["--steps", 2, "--clip", 1, "--verify"]
STEPS = 2


@pytest.fixture(scope="module")
def schedules(compiled):
    return {
        name: compiled(scheme, **{"workers": 4, "microbatches": 4} | options)
        for name, (scheme, options, *_) in CASES.items()
    }


@pytest.fixture(scope="module")
def canonical(several, schedules, text):
    runs = [
        [schedules[name], "--model", model, "--text", text, *COMMON, "--canonical", *more]
        for name, (*_, model, more) in CASES.items()
    ]
    return dict(zip(CASES, several(4, runs), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_every_bit_is_that_of_one_process(canonical, name):
    code, out = canonical[name]
    assert differences(out) == {"losses": 0, "gradients": 0, "parameters": 0}
    assert code == 0, out


def test_late_devices_and_late_messages_change_no_bit(inside, compiled, text):
    """With weight shards that are passed on."""
    options = {"groups": 2, "shards": 3, "fan_out": 1, "weight_slots": 1}
    schedule = compiled("fslpp", stages=4, workers=4, microbatches=4, **options)
    arguments = [schedule, "--model", MLP, "--text", text, "--steps", 2, "--clip", 1, "--canonical"]
    runs: list[dict[str, Any]] = [{}, {"late": "direct"}, {"late": "staged", "delay": 2}, *further({"delay": 1})]
    ended = inside(4, [{"arguments": arguments, **run} for run in runs])
    assert [run.code for run in ended] == [0] * len(runs) and len({run.weights for run in ended}) == 1


@pytest.fixture(scope="module")
def owned(inside, schedules, text, tmp_path_factory):
    """By rank, the bytes that it owns."""
    arguments = [schedules["two passes"], "--model", "mpirun.examples.gpt:tiny", "--text", text, "--steps", 1]
    file = tmp_path_factory.mktemp("owned") / "bytes"
    (run,) = inside(4, [{"arguments": arguments, "owned": str(file)}])
    assert run.code == 0, run.out
    return json.loads(file.read_text())


@pytest.mark.parametrize("what", ["weights", "gradient", "state"])
def test_every_rank_owns_a_quarter(owned, what):
    quarter = sum(rank[what] for rank in owned) / 4
    assert quarter > 100_000
    assert [rank[what] for rank in owned] == pytest.approx([quarter] * 4, rel=0.05)
    assert owned[0]["state"] == pytest.approx(2 * owned[0]["weights"], rel=0.05)  # AdamW's


def test_a_run_goes_on_with_the_same_bits_with_other_parts_or_none(several, compiled, schedules, text, tmp_path):
    files = {
        "4": schedules["two passes"],  # two stages
        "none": compiled("fsdp", stages=2, microbatches=4, workers=4),
        "3": schedules["owners that compute nothing of it"],  # four stages
    }

    def run(name: str, steps: int, *more: object) -> list[object]:
        lr = ["--lr-schedule", "constant", "--canonical", "--clip", 1]
        return [files[name], "--model", MLP, "--text", text, "--steps", steps, *lr, *more]

    ways = (("4", "4"), ("4", "none"), ("none", "3"), ("3", "4"))
    runs = [run(name, STEPS // 2, "--save", tmp_path / name) for name in files]
    runs.append(run("none", STEPS, "--save", tmp_path / "whole"))
    for first, then in ways:
        runs.append(run(then, STEPS, "--resume", tmp_path / first, "--save", tmp_path / f"{first}-{then}"))
    assert [code for code, _ in several(4, runs)] == [0] * len(runs)
    undivided = weights(tmp_path / "whole" / f"step-{STEPS:08d}")
    for first, then in ways:
        assert same(weights(tmp_path / f"{first}-{then}" / f"step-{STEPS:08d}"), undivided), (first, then)


def test_a_shared_parameter_counts_once_in_the_norm(several, compiled, traces, text, tmp_path):
    """In two stages, or in one with weight shards; gradients are added in another order."""
    divided = compiled("fsdp", stages=1, microbatches=8, workers=4, shards=4)
    files = {"tied": traces / "1f1b-tied.json", "divided": divided}
    common = ["--model", "models_for_tests:gpt_tied", "--text", text, "--steps", 1, "--canonical"]
    runs = [[file, *common, "--metrics", tmp_path / name] for name, file in files.items()]
    assert [code for code, _ in several(4, runs)] == [0, 0]
    tied, one = (json.loads((tmp_path / name).read_text())["grad_norm"] for name in files)
    assert tied == pytest.approx(one, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_a_canonical_norm_has_the_same_bits_however_it_is_cut(dtype):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype) + (0.1j if dtype.is_complex else 0)
    (norm,) = tensor_norms([values], canonical=True)
    assert norm == pytest.approx(float(torch.linalg.vector_norm(values.to(torch.complex128))), rel=1e-12)
    layout, size = flat_layout([values])
    for parts in (2, 3, 7, 60):
        sums = []
        for span in part_slices(size, range(parts)).values():
            for piece in pieces(layout, span):
                sums += subtrees(line_sums(piece.of_parameter(values)), piece.begin * dtype.itemsize // 64)
        assert tree_sum(sums) ** 0.5 == norm


class Counting(torch.optim.SGD):
    """Keeps a tensor that is neither a number nor of the parameter's shape."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["calls"] = torch.zeros(1)
        super().step()


DIVIDED = pytest.mark.parametrize("divided", ["into parts", "into tensor shards", "not"])


def optimizer_of(divided: str, factory: Callable[..., torch.optim.Optimizer]) -> Optimizer:
    """The optimizer of a linear layer whose weight has an attribute; the rank owns parts of it, a shard, or all."""
    shard = Shard(0, 2) if divided == "into tensor shards" else UNSHARDED
    module = ColumnParallelLinear(4, 8, shard)
    module.weight.kind = "matrix"
    model = Model([module], mse_loss, sharded=[0], tensor_parallel=shard.count)
    shape = StageShape((), ("weight", "bias"), sharded_dims=sharded_dims(module))
    parts = {"parts": (0, 1, 2), "owned_parts": (0, 1)} if divided == "into parts" else {"owned_parts": (-1,)}
    stage = LocalStage(module, 0, shape, Device(), **parts)
    return Optimizer(Recipe(factory), model, {0: stage})


@DIVIDED
def test_an_optimizer_sees_the_attributes_of_parameters(divided):
    """Where they are divided, on the small parameter too on which it is tried."""

    def factory(named: Sequence[NamedParameter]) -> torch.optim.Optimizer:
        for entry in named:
            assert vars(entry.parameter) == ({"kind": "matrix"} if entry.name == "stage0.weight" else {})
        return torch.optim.SGD([entry.parameter for entry in named], 0.1)

    assert optimizer_of(divided, factory).by_unit


@DIVIDED
def test_what_an_optimizer_keeps_for_a_part_has_its_shape_or_is_not_saved(divided):
    optimizer = optimizer_of(divided, lambda named: Counting([entry.parameter for entry in named], 0.1))
    (unit, parameters), *_ = optimizer.parameters.items()
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.by_unit[unit].step(0)
    part = re.escape(
        f"of shape (1,), for a part of stage0.weight, of shape {tuple(parameters[0].shape)}: for such a part "
    )
    refused = pytest.raises(UsageError, match=f"^the optimizer keeps calls, {part}")
    with contextlib.nullcontext() if divided == "not" else refused:
        optimizer.check_saved()


class TrustRatio(torch.optim.SGD):
    """Steps the parameters of some groups by their norm."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad *= parameter.norm() / parameter.grad.norm() if group["adapts"] else 1
        super().step()


class ClipsEach(torch.optim.SGD):
    """Clips the gradient of each parameter."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad *= min(5 / float(parameter.grad.norm()), 1)
        super().step()


class StepsTheSmall(torch.optim.SGD):
    """Leaves out parameters whose gradient is not small."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad *= float(parameter.grad.norm()) < 0.003
        super().step()


def grouped(**options: Any) -> Any:
    """A factory with two groups of other options; `by`: which parameters are in the second."""
    by = options.pop("by")

    def factory(named: Any) -> torch.optim.Optimizer:
        print("makes groups")
        groups = [{"params": [x.parameter for x in named if not by(x)]}]
        groups.append({"params": [x.parameter for x in named if by(x)], **options})
        return torch.optim.SGD(groups, 0.1, momentum=0.9)

    return factory


def alone(kind: Any) -> Any:
    """A factory that says which group has the parameter whose name is b."""
    return lambda named: kind([{"params": [x.parameter], "adapts": x.name == "b"} for x in named], 0.1)


HAS_ROWS = {"by": lambda x: x.parameter.dim() > 1}
PIECEWISE: dict[str, tuple[Any, float | None, str | None]] = {
    "the lr of matrices": (grouped(lr=0.5, **HAS_ROWS), None, "SGD has another lr for pieces of a than for the whole"),
    "which a run sets": (grouped(lr=0.5, **HAS_ROWS), 0.1, None),
    "their decay": (grouped(weight_decay=1e-6, **HAS_ROWS), 0.1, "SGD has another weight_decay for pieces of a than "),
    "that of all with rows": (grouped(weight_decay=0.1, lr=0.5, by=lambda x: len(x.shape) > 1), None, None),
    "entries that are not read": (grouped(elements=0, **HAS_ROWS), None, None),
    "a later parameter": (alone(TrustRatio), None, "TrustRatio steps pieces of b differently from the whole"),
    "clipping": (alone(ClipsEach), None, "ClipsEach steps pieces of a differently from the whole"),
    "small gradients": (alone(StepsTheSmall), None, "StepsTheSmall steps pieces of a differently from the whole"),
}


@pytest.mark.parametrize("case", PIECEWISE)
def test_an_optimizer_steps_pieces_as_the_whole_or_is_refused(case, capsys):
    """And nothing that its factory prints is seen."""
    factory, rate, why = PIECEWISE[case]
    recipe, tried = Recipe(factory, None if rate is None else lambda step: rate), set[str]()
    with contextlib.nullcontext() if why is None else pytest.raises(UsageError, match=f"^the optimizer {why}"):
        for name in ("a", "b"):
            piece = NamedParameter(name, torch.nn.Parameter(torch.zeros(8)), torch.Size((4, 4)), False)
            check_steps_pieces(recipe, piece, None, tried)
    assert not capsys.readouterr().out
