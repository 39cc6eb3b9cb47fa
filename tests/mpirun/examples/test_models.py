"""The example models: a cut does not change what they compute, and a seed fixes their weights and data."""

from __future__ import annotations

import re
import sys
import types

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mpirun.data.microbatches import Microbatch, Microbatches
from mpirun.examples import gpt, mlp
from mpirun.model.build_stage import build_stage
from mpirun.model.contract import Model
from mpirun.model.dataflow import Input, Value
from mpirun.model.load_model import join_stages, load_model
from mpirun.model.trial import Trial
from mpirun.training.arguments import _compile as compile_for
from schedgen.util.errors import UsageError

TEXT = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 10_000).astype(np.uint8))
TINY = {"gpt": (gpt.tiny, 10), "mlp": (mlp.tiny, 12)}  # an embedding, 8 blocks or 10 layers, and the scores
META = nn.Linear(4, 4, device="meta")
BOTH = pytest.mark.parametrize("name", TINY)


def microbatch(model: Model, text: Tensor, seed: int, step: int, mb: int) -> Microbatch:
    return Microbatches(model.batch, text, seed, 1)(step, mb)


def modules(model: Model, seed: int = 0) -> list[nn.Module]:
    return [build_stage(model, stage, seed) for stage in range(len(model.stages))]


def parameters(parts: list[nn.Module]) -> dict[str, Tensor]:
    return {name: parameter for part in parts for name, parameter in part.named_parameters()}


@pytest.mark.parametrize(("name", "stages"), [("gpt", 2), ("gpt", 10), ("mlp", 3), ("mlp", 12)])
def test_a_cut_model_computes_what_the_whole_does(name, stages):
    make, _ = TINY[name]
    (uncut_module,), parts = modules(make(1)), modules(make(stages), seed=1)
    uncut = dict(uncut_module.named_parameters())
    cut = parameters(parts)
    assert list(cut) == list(uncut)
    with torch.no_grad():
        for key, parameter in cut.items():
            parameter.copy_(uncut[key])
        (data,), *_ = microbatch(make(1), TEXT, 0, 0, 0)
        x = data
        for part in parts:
            x = part(x)
        assert torch.equal(x, uncut_module(data))


@BOTH
def test_layers_joined_by_a_schedule_are_the_model(name):
    """Uneven stages, the same layers in the same order, ties where they were."""
    make, layers = TINY[name]
    counts = [1, layers - 3, 2]
    model = join_stages(load_model(f"mpirun.examples.{name}:tiny", sum(counts), 0), counts)
    assert [len(part) for part in modules(model)] == counts
    assert list(parameters(modules(model))) == list(parameters(modules(make(1))))


def test_ties_and_layers_that_cannot_be_joined():
    model = join_stages(load_model("mpirun.examples.gpt:tied", 10, 0), [4, 6])
    assert model.tied == [[(0, "embedding.byte.weight"), (1, "head.score.weight")]]
    with pytest.raises(UsageError, match="neither given by their layers nor split"):
        join_stages(load_model("models_for_tests:dropping_function", 3, 0), [1, 2])


@BOTH
def test_weights_depend_on_the_seed_and_not_on_what_was_built_before(name):
    make, _ = TINY[name]
    model = make(4)
    forwards = {stage: build_stage(model, stage, 5) for stage in range(4)}
    torch.rand(3)
    backwards = {stage: build_stage(model, stage, 5) for stage in reversed(range(4))}
    others = {stage: build_stage(model, stage, 6) for stage in range(4)}
    for stage in range(4):
        for a, b in zip(forwards[stage].parameters(), backwards[stage].parameters(), strict=True):
            assert torch.equal(a, b)
        # Some begin as ones or zeros, whatever the seed; every stage has some that do not.
        pairs = zip(forwards[stage].parameters(), others[stage].parameters(), strict=True)
        assert any(not torch.equal(a, b) for a, b in pairs)


@BOTH
def test_a_microbatch_depends_on_seed_step_and_number_alone(name):
    model = TINY[name][0](1)
    first = microbatch(model, TEXT, 3, 2, 1)
    torch.rand(3)
    again = microbatch(model, TEXT, 3, 2, 1)
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(first[:2]), tree_leaves(again[:2]), strict=True))
    for other in ((4, 2, 1), (3, 1, 1), (3, 2, 0)):
        assert not torch.equal(first[0][0], microbatch(model, TEXT, *other)[0][0])


@BOTH
def test_more_stages_than_layers_is_one_clear_error(name):
    _, layers = TINY[name]
    with pytest.raises(UsageError) as error:
        load_model(f"mpirun.examples.{name}:tiny", layers + 1, 0)
    assert str(error.value) == (
        f"--model mpirun.examples.{name}:tiny: it has {layers} layers, too few for {layers + 1} stages"
    )


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("stages", [nn.Identity()], "the model has 1 stages, not the 2 that it is asked for"),
        ("stages", [nn.Identity(), {"score": 5}], "stage 1 should be layers by name, a function or a module, not"),
        ("stages", [nn.Identity(), {"a.b": nn.Identity}], "stage 1 has a layer called 'a.b', which no module can be"),
        ("stages", [nn.Identity(), META], "stage 1 has no values for weight, which is on the meta device"),
        ("sliced", 0, "model(2) raised TypeError"),
        ("loss_of", "step", "loss_of should be microbatch or minibatch, not 'step'"),
        ("sliced", [1], "the model slices stage 1, but only stages before the last can have slices"),
        ("tied", [[(2, "weight")]], "the model ties weight of stage 2, but there are 2 stages"),
    ],
)
def test_a_field_that_is_not_what_it_should_be_is_one_sentence(monkeypatch, field, value, sentence):
    module = types.ModuleType("wrong")
    module.model = lambda stages: mlp.tiny(stages)._replace(**{field: value})
    monkeypatch.setitem(sys.modules, "wrong", module)
    with pytest.raises(UsageError, match=f"^{re.escape(f'--model wrong:model: {sentence}')}"):
        load_model("wrong:model", 2, 0)


@pytest.mark.parametrize(
    ("tie", "sentence"),
    [
        ([(0, "layer0.linear.weight"), (1, "nothing")], "ties nothing of stage 1, which has no such parameter"),
        ([(0, "nothing"), (1, "score.weight")], "ties nothing of stage 0, which has no such parameter"),
        (
            [(0, "layer0.linear.weight"), (1, "score.weight")],
            "ties layer0.linear.weight of stage 0, torch.float32 of shape (128, 128), trained, to score.weig",
        ),
    ],
)
def test_what_cannot_be_tied_is_one_sentence(tie, sentence):
    with pytest.raises(UsageError, match=re.escape(f"the model {sentence}")):
        build_stage(mlp.tiny(2)._replace(tied=[tie]), 1, 0)


def test_with_mixed_precision_shapes_have_the_types_that_travel():
    shapes = Trial(
        mlp.tiny(4),
        mlp.tiny(4).resolved_reads([(), (0,), (1,), (2,)], 1),
        microbatch(mlp.tiny(4), TEXT, 0, 0, 0),
        torch.bfloat16,
    ).shapes()
    assert [shape.outputs[0].dtype for shape in shapes] == [torch.float32] * 3 + [
        torch.bfloat16
    ]  # residual sums, and the scores
    assert all(shape.weight_bytes % 64 == 0 and shape.weight_bytes > 0 for shape in shapes)


def test_a_scheme_s_own_edges_are_those_of_stages_that_do_not_say_what_they_read(tmp_path):
    scheme = tmp_path / "skip.py"
    scheme.write_text(
        "edges = [(0, 1), (0, 2), (1, 2)]\ndef w(s, b, d):\n    return s, s\ndef n(s, b, d):\n    return b\n"
    )
    model = Model([nn.Identity()] * 3, nn.functional.mse_loss)
    assert compile_for(model, str(scheme), 2, 3, {}).header.graph.edges == ((0, 1), (0, 2), (1, 2))
    said = model._replace(reads=[[Input(0)], [Value(0, 0)], [Value(1, 0)]])
    assert compile_for(said, str(scheme), 2, 3, {}).header.graph.edges == ((0, 1), (1, 2))
