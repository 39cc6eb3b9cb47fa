"""What stages read from one another: messages of several tensors, the file for the compiler, and mistakes in it."""

from __future__ import annotations

import json

import models_for_tests
import pytest
import torch

from mpirun.model.dataflow import Bundle, Input, TensorSpec, Value, model_graph, spec_of
from schedgen.ir.graph_file import ModelGraph, read_graph

TYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64]


def some(like: TensorSpec) -> torch.Tensor:
    return torch.randint(0, 2, like.size, generator=torch.Generator().manual_seed(0)).to(like.dtype)


@pytest.mark.parametrize("indices", [(), (0,), (1,), (0, 1), (0, 2, 4), (0, 1, 2, 3, 4)])
def test_a_message_of_several_tensors_gives_them_back(indices):
    outputs = [TensorSpec((3, k), dtype) for k, dtype in enumerate(TYPES)]
    bundle, tensors = Bundle(indices, outputs), [some(outputs[index]) for index in indices]
    message = bundle.pack(tensors, torch.device("cpu"))
    assert TensorSpec(tuple(message.shape), message.dtype) == bundle.spec
    assert bundle.spec.bytes >= sum(x.nbytes for x in tensors)
    back = bundle.unpack(message)
    assert all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(back, tensors, strict=True))
    if len(indices) > 1:
        assert all((view.data_ptr() - message.data_ptr()) % 256 == 0 for view in back if view.numel())


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 3, 4, 5),
        torch.randn(2, 4, 5, 3).permute(0, 3, 1, 2),
        torch.randn(2, 4, 5, 1).permute(0, 3, 1, 2),
        torch.randn(2, 3, 4, 5, 6).contiguous(memory_format=torch.channels_last_3d),
        torch.randn(3, 4, 2).permute(2, 0, 1),
        torch.randn(1, 4).T,
        torch.randn(()),
    ],
)
def test_a_tensor_comes_with_its_strides_and_goes_without_a_copy(x):
    sent = (spec := spec_of(x)).sent(x)
    assert (sent.shape, sent.is_contiguous(), sent.data_ptr()) == (spec.size, True, x.data_ptr())
    read = spec.read(sent.clone(memory_format=torch.contiguous_format))
    assert (read.shape, read.stride()) == (spec.shape, x.stride()) and torch.equal(read, x)


def test_a_part_of_a_tensor_comes_with_the_strides_that_a_tensor_like_it_has():
    part = torch.randn(2, 4, 5, 6).permute(0, 3, 1, 2)[:, :3]
    spec = spec_of(part)
    assert spec.read(spec.sent(part)).stride() == torch.empty_like(part).stride() == (60, 1, 15, 3)


def test_outputs_are_apart_where_consumers_read_different_ones():
    a, b = Value(0, 0), Value(0, 1)
    assert model_graph([[Input(0)], [a], [a, Value(1, 0)]]) == ModelGraph(3, ((0, 1), (0, 2), (1, 2)), ())
    assert model_graph([[Input(0)], [b, a], [a, b, Value(1, 0)]]).per_consumer == ()  # both read both
    assert model_graph([[Input(0)], [a], [a, b, Value(1, 0)]]).per_consumer == (0,)
    tied = [[(stage, "weight") for stage in tie] for tie in ([0, 0], [2, 0, 2], [0, 2])]
    assert model_graph([[Input(0)], [a], [Value(1, 0)]], tied).tied == ((0, 2),)


@pytest.fixture(scope="module")
def chain(compiled):
    return compiled("1f1b", stages=4, microbatches=4, workers=2)


def test_a_stage_gets_all_that_its_producer_returns_and_a_model_without_parameters_is_noted(mistakes, chain, text):
    models = [f"models_for_tests:{name}" for name in ("tuples", "unread", "all_frozen")]
    arguments = ("--text", text, "--steps", 2, "--canonical", "--verify")
    whole, unread, frozen = mistakes(2, [[chain, "--model", model, *arguments] for model in models])
    assert (whole.code, whole.err) == (0, ""), whole
    assert (unread.code, unread.err) == (0, ""), unread
    note = "mpirun: note: no parameter is trainable: steps change nothing\n"
    assert (frozen.code, frozen.err) == (0, note), frozen


@pytest.mark.parametrize("model", ["several", "contrastive"])
def test_graph_writes_what_compile_reads(several, text, tmp_path, model):
    file = tmp_path / "graph.json"
    ((code, _),) = several(1, [["graph", "--model", f"models_for_tests:{model}", "--stages", 4, "-o", file]])
    graph = model_graph(getattr(models_for_tests, model)(4).reads)
    assert code == 0
    assert json.loads(file.read_text()).keys() == {"stages", "edges"} | (
        {"per_consumer"} if graph.per_consumer else set()
    )
    assert read_graph(file.read_text(), "file") == graph


def test_graph_says_which_stages_are_tensor_parallel_and_tied(several, tmp_path):
    models = {"mpirun.examples.gpt:tensor": "replicated", "mpirun.examples.gpt:tied": "tied"}
    files = {model: tmp_path / key for model, key in models.items()}
    runs = [["graph", "--model", model, "--stages", 8, "-o", file] for model, file in files.items()]
    assert [code for code, _ in several(1, runs)] == [0, 0]
    for model, key in models.items():
        values = json.loads(files[model].read_text())
        assert (
            values.keys() == {"stages", "edges", key} and values[key] == {"replicated": [0, 7], "tied": [[0, 7]]}[key]
        )


def test_a_tensor_that_torch_negates_lazily_is_sent_negated():
    x = torch._neg_view(torch.ones(3))
    message = spec_of(x).sent(x)
    assert not message.is_neg()
    assert message.tolist() == [-1, -1, -1]
