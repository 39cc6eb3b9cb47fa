"""Stages with slices on several ranks: their gradients, checkpoints and layers; test_schemes.py trains by slices."""

from __future__ import annotations

import json
import re

import pytest
import torch
import torch.nn.functional as nnf
from examples import further
from models_for_tests import Shifted, pair
from run_results import DEPTH_FIRST
from torch import nn

from mpirun.data.microbatches import Microbatches
from mpirun.engine.expand_slices import expand_model
from mpirun.model.build_stage import build_stage
from mpirun.model.parallel_layers import (
    UNSLICED,
    ColumnParallelLinear,
    HeadParallelAttention,
    RowParallelLinear,
    Slice,
    SlicedDim,
    sliced_dims,
)
from schedgen.util.errors import UsageError

GPT, BLOCK = "models_for_tests:gpt_tensor", "models_for_tests:halves_of_a_block"

SLICED = {"stages": 4, "replicated": [0]}  # a graph
PAIR = {"stages": 1, "tensor": 4, "graph": {"stages": 2}}  # options of compile


def test_what_reads_a_sum_waits_for_it(several, traces, text, tmp_path):
    """The ALLREDUCE that starts the sum does not wait."""
    run = [traces / "1f1b-tensor.json", "--model", GPT, "--text", text, "--steps", 2, "--trace", tmp_path / "trace"]
    assert several(4, [run])[0][0] == 0
    events = [event for event in json.loads((tmp_path / "trace").read_text())["traceEvents"] if event["ph"] == "X"]
    waits = [event["name"] for event in events if event["args"].get("cause") == "reduction"]
    assert any(name.startswith(("FWD", "BWD", "SEND")) for name in waits), waits
    assert not any(name.startswith(("ALLREDUCE x", "ALLREDUCE g")) for name in waits), waits


def losses(out):
    return re.findall(r"loss (\S+)  grad (\S+)", out)


def test_an_engine_evaluates_what_slices_compute(execute, compiled):
    """Slices share parameters, for which a forward-only list needs no ties."""
    script = """
import models_for_tests
from mpirun.model.build_stage import build_stage
model = models_for_tests.slices_of_a_dag(4)
x, y = torch.randn(18, 16, generator=torch.Generator().manual_seed(0)), torch.ones(18, 12)
with mpirun.Engine(sys.argv[1], model, timeout=60) as run:
    loader = run.loader(TensorDataset(x, y), microbatch_size=2)
    predicted, evaluated = run.predict(loader), run.evaluate(loader)
first, left, right, last = (build_stage(model, stage, 0).eval() for stage in range(4))
if run.rank == 0:
    expected = last(left(first(x)), right(first(x)))
    torch.testing.assert_close(predicted, expected)
    torch.testing.assert_close(evaluated.loss, model.loss(expected, y).item(), rtol=1e-5, atol=0)
"""
    dag = """
    edges = [(0, 1), (0, 2), (1, 3), (2, 3)]
    def w(s, b, d):
        return s % 2, s % 2
    """
    execute(4, script, compiled(dag + DEPTH_FIRST, workers=4, tensor=2, graph=SLICED, microbatches=4))


@pytest.fixture(scope="module")
def pair_of_layers(inside, compiled, text, tmp_path_factory):
    """The gradients that 4 ranks have of the two layers, by stage and name, and losses; one step."""
    record = tmp_path_factory.mktemp("records") / "pair"
    file = compiled("1f1b", **PAIR, microbatches=10)
    arguments = [file, "--model", "models_for_tests:pair", "--text", text, "--steps", 1, "--verify", "--canonical"]
    (run,) = inside(4, [{"arguments": arguments, "record": str(record)}])
    assert run.code == 0 and set(run.differences.values()) == {0}
    return torch.load(record)


def test_every_slice_has_its_part_of_the_whole_model_s_gradient(pair_of_layers):
    """Sequential(Linear(16, 48), ReLU, Linear(48, 12)) and its slices on 4 ranks, mean of 10 microbatches."""
    model = pair(2)
    plain = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 12))
    plain.load_state_dict(
        {
            name.replace("up", "0").replace("down", "2"): value
            for name, value in build_stage(model, 0, 0).state_dict().items()
        }
    )
    plain_losses = []
    for mb in range(10):
        (x,), y, *_ = Microbatches(model.batch, torch.zeros(1), 0, 10)(0, mb)
        loss = nnf.mse_loss(plain(x), y)
        plain_losses.append(loss.item())
        (loss / 10).backward()
    assert pair_of_layers["losses"] == [pytest.approx(plain_losses, rel=1e-6)]
    (gradients,) = pair_of_layers["gradients"]
    for t in range(4):
        share = slice(12 * t, 12 * (t + 1))
        torch.testing.assert_close(gradients[t, "up.weight"], plain[0].weight.grad[share])
        torch.testing.assert_close(gradients[t, "up.bias"], plain[0].bias.grad[share])
        torch.testing.assert_close(gradients[t, "down.weight"], plain[2].weight.grad[:, share])
    torch.testing.assert_close(gradients[0, "down.bias"], plain[2].bias.grad)
    assert (1, "down.bias") not in gradients


def test_a_checkpoint_goes_on_under_another_number_of_slices(several, compiled, text, tmp_path):
    """4 slices, then 2, then none, and back; and with a frozen weight and a buffer that are cut."""
    sizes = {"microbatches": 4, "workers": 4}
    four, two = (compiled("1f1b", stages=4 // count, tensor=count, graph=SLICED, **sizes) for count in (4, 2))
    none, four_of_pair = compiled("1f1b", stages=4, **sizes), compiled("1f1b", **PAIR, **sizes)
    none_of_pair = compiled("ddp", stages=2, **sizes)
    for model, schedules in (
        (BLOCK, (four, two, none, *further(two, four))),
        ("models_for_tests:partly_frozen", (four_of_pair, none_of_pair, four_of_pair)),
    ):
        common, saved = ["--model", model, "--text", text, "--clip", 1, "--lr", 0.1], tmp_path / model
        runs = [[schedules[0], *common, "--steps", len(schedules)]]
        for step, schedule in enumerate(schedules, start=1):
            resume = ["--resume", saved] if step > 1 else []
            runs.append([schedule, *common, "--steps", step, "--save", saved, *resume])
        (code, straight), *others = several(4, runs)
        assert code == 0 and {code for code, _ in others} == {0}
        assert losses(straight) == [losses(out)[0] for _, out in others]


def test_an_optimizer_is_told_of_shares_and_refused_where_it_steps_these_otherwise(scripts, compiled):
    script = """
from models_for_tests import pair
def factory(kind, named):
    if run.rank == 0 and not named[0].whole:
        print([(name, tuple(parameter.shape), tuple(shape), whole) for name, parameter, shape, whole in named])
    return kind([entry.parameter for entry in named], 0.1)
x, y = torch.ones(8, 16), torch.ones(8, 12)
class Own(torch.optim.SGD):
    pass
for kind in (Own, torch.optim.Adafactor):
    with mpirun.Engine(sys.argv[1], pair, optimizer=lambda named: factory(kind, named), elementwise=kind is Own) as run:
        run.step((x, y))
"""
    file = compiled("1f1b", stages=1, microbatches=2, tensor=2, graph={"stages": 2})
    (done,) = scripts(2, [[script, file]])
    shares = [("up.weight", (24, 16), (48, 16), False), ("up.bias", (24,), (48,), False)]
    shares += [("down.weight", (12, 24), (12, 48), False), ("down.bias", (12,), (12,), True)]
    why = "several ranks divide up.weight, and Adafactor is none of torch.optim's classes that step element by element"
    assert (done.code, done.out, done.err.partition(":")[2].partition(":")[0]) == (2, f"{shares}\n" * 2, f" {why}")


# Without ranks


@pytest.mark.parametrize("cut", [SlicedDim(0), SlicedDim(1), SlicedDim(0, 3), SlicedDim(1, 2)])
def test_the_parts_of_a_parameter_make_it_up(cut):
    parameter = torch.randn(12, 8)
    for count in (1, 2, 4):
        parts = [cut.share(parameter, Slice(t, count)) for t in range(count)]
        assert torch.equal(cut.join(parts), parameter) and all(part.is_contiguous() for part in parts)
        assert all(cut.full_shape(part.shape, Slice(0, count)) == parameter.shape for part in parts)


@pytest.mark.parametrize(
    "make",
    [
        lambda slice=UNSLICED: HeadParallelAttention(16, 4, slice),
        Shifted,
        lambda slice=UNSLICED: nn.Sequential(
            ColumnParallelLinear(16, 32, slice, False), RowParallelLinear(32, 16, slice)
        ),
    ],
)
@pytest.mark.parametrize("count", [2, 4])
def test_slices_of_a_layer_add_up_to_it(make, count):
    from mpirun.engine.expand_slices import build_slice

    def built(slice=UNSLICED):
        torch.manual_seed(7)
        return make(slice=slice)

    x = torch.randn(2, 3, 16, requires_grad=True)
    layer = built()
    y = layer(x)
    y.square().sum().backward()
    (dx, x.grad), parameters = (x.grad, None), dict(layer.named_parameters())
    slices = [build_slice(built, Slice(t, count)) for t in range(count)]
    total = sum(slice(x) for slice in slices)
    torch.testing.assert_close(total, y)
    total.square().sum().backward()
    torch.testing.assert_close(x.grad, dx)
    for t, slice in enumerate(slices):
        dims = sliced_dims(slice)
        for name, parameter in slice.named_parameters():
            if name in dims:
                torch.testing.assert_close(parameter.grad, dims[name].share(parameters[name].grad, Slice(t, count)))
    for name in parameters.keys() - sliced_dims(layer).keys():  # shared, or slice 0's
        by_slice = [dict(slice.named_parameters()) for slice in slices]
        torch.testing.assert_close(sum(have[name].grad for have in by_slice if name in have), parameters[name].grad)


def test_weights_do_not_depend_on_the_number_of_slices():
    model = pair(2)
    unsliced = build_stage(model, 0, 5)
    parts = [build_stage(expand_model(model, 4), t, 5) for t in range(4)]
    assert torch.equal(torch.cat([part.up.weight for part in parts]), unsliced.up.weight)
    assert torch.equal(torch.cat([part.down.weight for part in parts], dim=1), unsliced.down.weight)


def test_only_what_all_slices_have_is_shared():
    from models_for_tests import slices_of_a_dag

    assert expand_model(slices_of_a_dag(4), 2).tied == [[(2, "shift"), (3, "shift")], [(4, "shift"), (5, "shift")]]


def test_what_does_not_divide_is_refused():
    with pytest.raises(UsageError, match="10 heads do not divide into 4 slices"):
        HeadParallelAttention(20, 10, Slice(0, 4))
