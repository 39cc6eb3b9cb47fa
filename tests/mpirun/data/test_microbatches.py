"""Batches are cut into as many microbatches as are asked for, and nothing of them is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from mpirun.data.dataset_loaders import loader_class
from mpirun.data.microbatches import (
    Microbatch,
    Microbatches,
    chunk,
    in_own_memory,
    input_and_target,
)  # fmt: skip
from mpirun.engine.loss import MinibatchLoss
from mpirun.model.contract import Model
from mpirun.model.loss import without_padding
from mpirun.training.batches import whole_batch
from schedgen.util.errors import UsageError

CPU = torch.device("cpu")
ROWS = torch.arange(20).view(10, 2)
TREE = {"a": (ROWS, [ROWS + 1]), "name": "x", "none": None}


@pytest.mark.parametrize("count", [1, 2, 5, 10])
def test_nested(count: int) -> None:
    parts = chunk(TREE, count, 10)
    assert len(parts) == count
    assert torch.equal(torch.cat([part["a"][0] for part in parts]), ROWS)
    assert torch.equal(torch.cat([part["a"][1][0] for part in parts]), ROWS + 1)
    for part in parts:
        assert pytree.tree_structure(part) == pytree.tree_structure(TREE)
        assert (part["name"], part["none"]) == ("x", None)


@pytest.mark.parametrize(
    ("tree", "count", "why"),
    [
        (ROWS, 4, "a batch of 10 samples cannot be cut into 4 microbatches of one size"),
        (ROWS[:0], 4, "a batch of 0 samples cannot be cut"),
        (torch.tensor(1), 2, r"the batch\[1\] has no dimensions"),
        (ROWS.T, 2, r"the batch\[1\] has 2 samples in dimension 0, but the batch\[0\] has 10"),
    ],
)
def test_what_cannot_be_cut(tree: Any, count: int, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        whole_batch((tree if tree.ndim and len(tree) % 10 == 0 else ROWS, tree), count, input_and_target)


def test_lists_of_strings_are_cut_if_they_have_one_for_each_sample() -> None:
    names, rows = list("abcd"), ROWS[:4]
    tree = {
        "x": rows,
        "names": names,
        "ids": (None, "1", "2", b"4"),
        "weights": [0.1, 0.2, 0.3, 0.4],
        "classes": ["cat", "dog"],
        "of": [rows],
    }
    first, second = chunk(tree, 2, 4)
    assert (first["names"], second["names"]) == (["a", "b"], ["c", "d"])
    assert (first["ids"], second["ids"]) == ((None, "1"), ("2", b"4"))
    assert (
        first["classes"] == second["classes"] == ["cat", "dog"]
        and first["weights"] == second["weights"]
        and len(second["of"][0]) == 2
    )
    padded = Microbatch([rows], tree, 1.0, size=4, padding=2)
    real = without_padding("target", tree, padded)
    assert (real["names"], real["ids"], real["classes"]) == (["a", "b"], (None, "1"), ["cat", "dog"])
    assert real["weights"] == tree["weights"]


def test_the_loss_of_a_whole_minibatch_gets_once_what_every_microbatch_got() -> None:
    seen: list[Any] = []

    def loss(output: Tensor, target: Any) -> Tensor:
        seen.append(target)
        return (output - target["rows"]).sum()

    rows = torch.arange(8.0).view(4, 2)
    target = {"rows": rows, "names": [*"abcd"], "classes": ["cat", "dog", "cow"], "weights": [0.5, 0.5]}
    minibatch_loss = MinibatchLoss(Model([nn.Identity()], loss, loss_of="minibatch"), CPU, None)
    for number, piece in whole_batch((rows, target), 2, input_and_target).microbatches.items():
        swapped = dict(sorted(piece.target.items())) if number else piece.target  # the same in another order
        minibatch_loss.add_outputs(number, [piece.leaves[0] + 1], piece._replace(target=swapped))
    (gradient,), found, _ = minibatch_loss.take(0)
    assert len(seen) == 1 and torch.equal(seen[0]["rows"], rows)
    assert [seen[0][name] for name in ("names", "classes", "weights")] == [[*"abcd"], ["cat", "dog", "cow"], [0.5, 0.5]]
    assert found == 8 and torch.equal(gradient, torch.ones(2, 2))
    minibatch_loss.forget()
    renamed = {"labels" if name == "rows" else name: x for name, x in target.items()}
    for number, of_microbatch in enumerate((piece, piece._replace(target=renamed))):
        minibatch_loss.add_outputs(number, [rows], of_microbatch)
    with pytest.raises(ValueError, match=r"extra key.*labels"):
        minibatch_loss.take(0)


def test_a_loss_of_the_whole_minibatch_is_without_padding_and_has_metrics() -> None:
    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return (output * target).sum(), {"samples": len(output)}

    minibatch_loss, rows = MinibatchLoss(Model([nn.Identity()], loss), CPU, None), torch.ones(2, 3)
    for number, padding in enumerate((0, 1, 2)):
        minibatch_loss.add_outputs(number, [rows], Microbatch([], 2 * rows, 1.0, 2, padding))
    taken = [minibatch_loss.take(number) for number in range(3)]
    assert all(found == 18 and metrics["samples"] == 3 for _, found, metrics in taken)
    whole, part, none = (gradient for (gradient,), *_ in taken)
    assert whole.tolist() == [[2] * 3] * 2 and part.tolist() == [[2] * 3, [0] * 3] and none is None


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (lambda output, target: output, "the loss should be one number"),
        (lambda output, target: 5.0, "the loss should be one number"),
        (lambda output, target: output.detach().sum(), "the loss has no gradient: it depends on no parameter"),
    ],
)
def test_a_loss_of_the_whole_minibatch_is_one_number_with_a_gradient(loss: Any, sentence: str) -> None:
    minibatch_loss = MinibatchLoss(Model([nn.Identity()], loss), CPU, None)
    minibatch_loss.add_outputs(0, [torch.zeros(4)], Microbatch([], torch.zeros(4), 1.0, 4))
    with pytest.raises(UsageError, match=sentence):
        minibatch_loss.take(0)


def test_microbatches_lie_in_memory_as_tensors_of_their_own():
    """And a tensor that does so is not copied."""

    def split(collated: Tensor) -> tuple[list[Tensor], Tensor]:
        return [collated, collated[1:]], collated[:, 3:]

    rows = torch.arange(90.0).view(6, 15)
    pieces = chunk((rows, rows.T.contiguous().T), 3, 6)
    items = loader_class(rows)(rows, 2, 3, range(3), split, collate=lambda rows: torch.stack(rows)[:, 1:])
    made = [items.microbatch(0, 0, number) for number in range(3)]
    values = [x for piece in pieces for x in piece] + [x for one in made for x in (*one.leaves, one.target)]
    assert all(x.stride() == x.clone().stride() and x.data_ptr() % 64 == 0 for x in values)
    assert torch.equal(pieces[1][1], rows[2:4])
    assert torch.equal(made[1].target, rows[2:4, 4:])
    assert in_own_memory(rows) is rows


def test_a_dict_has_its_leaves_in_sorted_order_of_its_keys() -> None:
    inputs = [{"b": 1, "a": (2, {"d": 3, "c": 4})}, {"a": (5, {"d": 6, "c": 7}), "b": 8}]
    made = iter(inputs)

    def make(text: Tensor, rng: Any) -> tuple[Any, Tensor]:
        return pytree.tree_map(lambda number: torch.full((4,), number), next(made)), torch.zeros(4)

    pieces = Microbatches(make, torch.zeros(1), 0, 2)
    for step, leaves in ((1, [2, 4, 3, 1]), (2, [5, 7, 6, 8])):
        assert [int(leaf[0]) for leaf in pieces(step, 0).leaves] == leaves
