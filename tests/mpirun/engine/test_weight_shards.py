"""Owners of a stage's weight shards hold no more than these, and save it whole; test_schemes.py trains by shards."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from run_results import same, weights
from torch.nn.functional import mse_loss

from mpirun.comm.device import Device
from mpirun.engine.core.stage import LocalStage
from mpirun.engine.grad_norm import line_sums, subtrees, tensor_norms, tree_sum
from mpirun.engine.optimizer import Optimizer
from mpirun.engine.recipe import ELEMENTWISE, NamedParameter, Recipe
from mpirun.model.contract import Model
from mpirun.model.parallel_layers import UNSLICED, ColumnParallelLinear, Slice, sliced_dims
from mpirun.model.stage_shape import StageShape, flat_layout, pieces, shard_spans
from schedgen.util.errors import UsageError

STEPS = 2


@pytest.fixture(scope="module")
def owned(inside, compiled, text, tmp_path_factory):
    """By rank, the bytes that it owns."""
    schedule = compiled("fsdp", stages=2, microbatches=4, workers=4, shards=4)
    arguments = [schedule, "--model", "mpirun.examples.gpt:tiny", "--text", text, "--steps", 1]
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


def test_a_run_goes_on_with_the_same_bits_with_other_parts_or_none(several, compiled, text, tmp_path):
    """Of parameters of four types; one without elements is in no shard."""
    sizes = {"microbatches": 4, "workers": 4}
    files = {
        "4": compiled("fsdp", stages=2, shards=4, **sizes),
        "none": compiled("1f1b", stages=4, **sizes),
        "40": compiled("fsdp", stages=8, shards=40, **sizes),  # some are empty
    }

    def run(name: str, steps: int, *more: object) -> list[object]:
        options = ["--lr-schedule", "constant", "--canonical", "--clip", 0.1]
        model = ["--model", "models_for_tests:four_types", "--text", text]
        return [files[name], *model, "--steps", steps, *options, *more]

    def last(name: str) -> dict[str, torch.Tensor]:
        found = weights(tmp_path / name / f"step-{STEPS:08d}")
        return {entry: value for entry, value in found.items() if ".nothing." not in entry}

    ways = (("4", "none"), ("none", "40"), ("40", "4"))
    runs = [run(name, STEPS // 2, "--save", tmp_path / name) for name in files]
    runs.append(run("none", STEPS, "--save", tmp_path / "whole"))
    for first, then in ways:
        runs.append(run(then, STEPS, "--resume", tmp_path / first, "--save", tmp_path / f"{first}-{then}"))
    assert [code for code, _ in several(4, runs)] == [0] * len(runs)
    whole = last("whole")
    assert {value.dtype for value in whole.values()} == {torch.float32, torch.bfloat16, torch.float64, torch.complex64}
    for first, then in ways:
        assert same(last(f"{first}-{then}"), whole), (first, then)


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
    for shards in (2, 3, 7, 60):
        sums = []
        for span in shard_spans(size, range(shards)).values():
            for piece in pieces(layout, span):
                sums += subtrees(line_sums(piece.of_parameter(values)), piece.begin * dtype.itemsize // 64)
        assert tree_sum(sums) ** 0.5 == norm


class Counting(torch.optim.SGD):
    """Keeps a tensor that is neither a number nor of the parameter's shape."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["calls"] = torch.zeros(1)
        super().step()


DIVIDED = pytest.mark.parametrize("divided", ["into shards", "into tensor slices", "not"])


def optimizer_of(divided: str, factory: Callable[..., torch.optim.Optimizer], elementwise: bool = False) -> Optimizer:
    """The optimizer of a linear layer whose weight has an attribute; the rank owns shards of it, a shard, or all."""
    shard = Slice(0, 2) if divided == "into tensor slices" else UNSLICED
    module = ColumnParallelLinear(4, 8, shard)
    module.weight.kind = "matrix"
    model = Model([module], mse_loss, sliced=[0], tensor_parallel=shard.count)
    shape = StageShape((), ("weight", "bias"), sliced_dims=sliced_dims(module))
    shards = {"shards": (0, 1, 2), "owned_shards": (0, 1)} if divided == "into shards" else {"owned_shards": (-1,)}
    stage = LocalStage(module, 0, shape, Device(), **shards)
    return Optimizer(Recipe(factory, elementwise=elementwise), model, {0: stage})


@DIVIDED
def test_other_classes_than_torch_s_elementwise_ones_step_pieces_if_the_user_says_so(divided):
    def factory(named: Sequence[NamedParameter]) -> torch.optim.Optimizer:
        return Counting([entry.parameter for entry in named], 0.1)

    why = "^several ranks divide stage0.weight, and Counting is none of torch.optim's classes that step element by ele"
    with contextlib.nullcontext() if divided == "not" else pytest.raises(UsageError, match=why):
        optimizer_of(divided, factory)
    assert optimizer_of(divided, factory, elementwise=True).by_unit


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_torch_s_elementwise_optimizers_step_pieces_as_the_whole(kind):
    """In every release of torch, so that this list stays right."""
    torch.manual_seed(0)
    start, gradients = torch.randn(6, 4), torch.randn(3, 6, 4) * torch.tensor([1, 1e-3, 1e3])[:, None, None]

    def stepped(x: torch.Tensor, given: Sequence[torch.Tensor]) -> torch.Tensor:
        parameter = torch.nn.Parameter(x.clone())
        optimizer = kind([parameter], weight_decay=0.1) if kind is not torch.optim.Rprop else kind([parameter])
        for gradient in given:
            parameter.grad = gradient.clone()
            optimizer.step()
        return parameter.detach()

    pieces = [
        stepped(x, of_x) for x, of_x in zip(start.view(-1).split(12), gradients.view(3, 2, 12).unbind(1), strict=True)
    ]
    assert torch.equal(torch.cat(pieces).view(6, 4), stepped(start, gradients))
