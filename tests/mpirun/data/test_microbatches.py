"""Minibatches are cut into as many microbatches as are asked for, and nothing of them is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from mpirun.data.chunks import chunk, in_own_memory
from mpirun.data.dataset_loaders import loader_class
from mpirun.data.microbatches import Microbatch, Microbatches, Minibatch, input_and_target
from mpirun.engine.loss import MinibatchLoss
from mpirun.model.contract import Model
from mpirun.model.loss import without_padding
from mpirun.training.batches import whole_batch
from mpirun.training.session import mean
from schedgen.util.errors import UsageError

ROWS = torch.arange(20).view(10, 2)
TREE = {"a": (ROWS, [ROWS.T]), "mask": torch.ones(3), "name": "x", "none": None}
DIMS = {"a": (0, [-1]), "mask": None, "name": None, "none": None}


@pytest.mark.parametrize(
    ("rows", "count", "sizes"), [(10, 1, [10]), (10, 2, [5, 5]), (10, 4, [3, 3, 2, 2]), (5, 4, [2, 1, 1, 1])]
)
def test_sizes(rows: int, count: int, sizes: list[int]) -> None:
    parts = chunk(ROWS[:rows], count)
    assert [len(part) for part in parts] == sizes
    assert torch.equal(torch.cat(parts), ROWS[:rows])


@pytest.mark.parametrize("count", range(1, 11))
def test_nested(count: int) -> None:
    parts = chunk(TREE, count, DIMS)
    assert len(parts) == count
    assert torch.equal(torch.cat([part["a"][0] for part in parts]), ROWS)
    assert torch.equal(torch.cat([part["a"][1][0] for part in parts], 1), ROWS.T)
    for part in parts:
        assert pytree.tree_structure(part) == pytree.tree_structure(TREE)
        assert part["mask"] is TREE["mask"]
        assert (part["name"], part["none"]) == ("x", None)


@pytest.mark.parametrize(
    ("tree", "count", "dims", "why"),
    [
        (ROWS, 11, 0, "the minibatch has 10 samples, too few for 11 microbatches"),
        (ROWS, 2, 2, "the minibatch has 2 dimensions, so there is no dimension 2"),
        ((ROWS, torch.tensor(1)), 2, 0, r"the minibatch\[1\] has 0 dimensions, so there is no dimension 0"),
        (
            {"x": ROWS, "y": ROWS.T},
            2,
            0,
            r"minibatch\['y'\] has 2 samples in dimension 0, but the minibatch\['x'\] has 10",
        ),
        (("x", None), 2, 0, "has no tensor that could be cut"),
        ((ROWS, ROWS), 2, (0, 0, 0), "is not nested as the minibatch"),
        ({"x": ROWS, "y": ROWS}, 2, {"x": 0, "z": 0}, "has other keys than the minibatch"),
        (ROWS, 2, "rows", "'rows' is neither a dimension nor None"),
    ],
)
def test_what_cannot_be_cut(tree: Any, count: int, dims: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        chunk(tree, count, dims)


def test_lists_of_strings_are_cut_if_they_have_one_for_each_sample() -> None:
    names, rows = list("abcde"), ROWS[:5]
    tree = {
        "x": rows,
        "names": names,
        "ids": (None, "1", "2", "4", b"5"),
        "weights": [0.1, 0.2, 0.3, 0.2, 0.2],
        "classes": ["cat", "dog"],
        "of": [rows],
    }
    first, second = chunk(tree, 2)
    assert (first["names"], second["names"]) == (["a", "b", "c"], ["d", "e"])
    assert (first["ids"], second["ids"]) == ((None, "1", "2"), ("4", b"5"))
    assert (
        first["classes"] == second["classes"] == ["cat", "dog"]
        and first["weights"] == second["weights"]
        and len(second["of"][0]) == 2
    )
    first, second = chunk(tree, 2, {**dict.fromkeys(tree, 0), "names": None})
    assert (first["names"], first["ids"], second["ids"]) == (names, (None, "1", "2"), ("4", b"5"))
    padded = Microbatch([ROWS[:5]], tree, 1.0, size=5, padding=3)
    real = without_padding("target", tree, padded)
    assert (real["names"], real["ids"], real["classes"]) == (["a", "b"], (None, "1"), ["cat", "dog"])
    assert real["weights"] == tree["weights"]


def test_the_loss_of_a_whole_minibatch_gets_once_what_every_microbatch_got() -> None:
    seen: list[Any] = []

    def loss(output: Tensor, target: Any) -> Tensor:
        seen.append(target)
        return (output - target["rows"]).sum()

    weights, rows = torch.ones(3), torch.arange(8.0).view(4, 2)
    target = {"rows": rows, "weights": weights, "names": [*"abcd"], "classes": ["cat", "dog"]}  # as many as samples
    dims = {"weights": None, "rows": 0, "names": 0, "classes": 0}
    batch = Minibatch(lambda text, rng: (rows, target), (0, dims))
    model = Model([nn.Identity()], loss, batch, loss_of="minibatch")
    pieces = Microbatches(batch, torch.zeros(1), 0, 2)
    minibatch_loss = MinibatchLoss(model, 2, "cpu", None)
    for number in range(2):
        piece = pieces(0, number)
        swapped = dict(sorted(piece.target.items())) if number else piece.target  # the same in another order
        losses = minibatch_loss.add_outputs(number, [piece.leaves[0] + 1], piece._replace(target=swapped))
    assert len(seen) == 1 and torch.equal(seen[0]["rows"], rows) and torch.equal(seen[0]["weights"], weights)
    assert (seen[0]["names"], seen[0]["classes"]) == (target["names"], target["classes"])
    assert losses[0] == 8 and torch.equal(minibatch_loss.take_gradients(0)[0], torch.ones(2, 2))
    minibatch_loss.collected.clear()
    minibatch_loss.add_outputs(0, [rows], piece)
    renamed = {"labels" if name == "rows" else name: x for name, x in target.items()}
    with pytest.raises(UsageError, match=r"targets of a step should have the same keys: .*extra key.*labels"):
        minibatch_loss.add_outputs(1, [rows], piece._replace(target=renamed))
    minibatch_loss.collected.clear()
    del target["weights"]
    for number, piece in whole_batch((rows, target), 2, input_and_target).microbatches.items():
        minibatch_loss.add_outputs(number, [piece.leaves[0] + 1], piece)
    assert (seen[1]["names"], seen[1]["classes"]) == (target["names"], target["classes"])


def test_a_loss_of_the_whole_minibatch_gives_complex_outputs_a_gradient() -> None:
    waves, rows = torch.randn(2, 3, 4, dtype=torch.complex64), torch.randn(2, 3, 4)

    def loss(output: Any, target: object) -> Tensor:
        return (output[0].abs() ** 2).mean() + (output[0].imag * output[1]).sum()

    minibatch_loss = MinibatchLoss(Model([nn.Identity()], loss, lambda text, rng: (0, 0)), 2, "cpu", None)
    for number in range(2):
        minibatch_loss.add_outputs(number, [waves[number], rows[number]], Microbatch([], None, 1.0, 3))
    found = [minibatch_loss.take_gradients(number) for number in range(2)]
    leaves = [x.flatten(0, 1).requires_grad_() for x in (waves, rows)]
    for index, expected in enumerate(torch.autograd.grad(loss(leaves, None), leaves)):
        torch.testing.assert_close(torch.cat([gradients[index] for gradients in found]), expected)


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (lambda output, target: output, "the loss should be one number"),
        (lambda output, target: 5.0, "the loss should be one number"),
        (lambda output, target: output.sum() * 1j, "the loss should be a real number, not torch.complex64"),
        (lambda output, target: (output.sum(), {}), "a loss of the whole minibatch has no metrics beside it"),
        (lambda output, target: output.detach().sum(), "the loss has no gradient: it depends on no parameter"),
    ],
)
def test_a_loss_of_the_whole_minibatch_is_one_real_number_with_a_gradient(loss: Any, sentence: str) -> None:
    minibatch_loss = MinibatchLoss(Model([nn.Identity()], loss, lambda text, rng: (0, 0)), 1, "cpu", None)
    with pytest.raises(UsageError, match=sentence):
        minibatch_loss.add_outputs(0, [torch.zeros(4)], Microbatch([], torch.zeros(4), 1.0, 4))


def test_losses_of_uneven_microbatches_count_by_their_samples() -> None:
    rows = torch.arange(5.0)
    pieces = Microbatches(Minibatch(lambda text, rng: (rows, rows)), torch.zeros(1), 0, 4)
    assert pieces.loss_weights == [0.4, 0.2, 0.2, 0.2]
    losses = [float(pieces(0, number).target.mean()) for number in range(4)]
    assert mean(losses, pieces.loss_weights) == pytest.approx(2.0)
    assert Microbatches(lambda text, rng: (rows, rows), torch.zeros(1), 0, 4).loss_weights == [0.25] * 4


def test_microbatches_lie_in_memory_as_tensors_of_their_own():
    """And a tensor that does so is not copied."""

    def split(collated: Tensor) -> tuple[list[Tensor], Tensor]:
        return [collated, collated[1:]], collated[:, 3:]

    rows, uncut = torch.arange(90.0).view(6, 15), torch.arange(20.0)[3:]
    pieces = [x for cut in (chunk((rows, rows.T), 3, (0, 1)), chunk((rows, uncut), 3, (0, None))) for x in cut]
    items = loader_class(rows)(rows, 2, 3, range(3), split, say=print, collate=lambda rows: torch.stack(rows)[:, 1:])
    made = [items.microbatch(0, 0, number) for number in range(3)]
    values = [x for piece in pieces for x in piece] + [x for one in made for x in (*one.leaves, one.target)]
    assert all(x.stride() == x.clone().stride() and x.data_ptr() % 64 == 0 for x in values)
    assert torch.equal(pieces[1][1], rows[2:4].T) and torch.equal(pieces[4][1], uncut)
    assert torch.equal(made[1].target, rows[2:4, 4:])
    assert in_own_memory(rows) is rows


@pytest.mark.parametrize("whole", [False, True])
def test_a_dict_has_its_leaves_in_sorted_order_of_its_keys(whole: bool) -> None:
    inputs = [{"b": 1, "a": (2, {"d": 3, "c": 4})}, {"a": (5, {"d": 6, "c": 7}), "b": 8}]
    made = iter(inputs)

    def make(text: Tensor, rng: Any) -> tuple[Any, Tensor]:
        return pytree.tree_map(lambda number: torch.full((4,), number), next(made)), torch.zeros(4)

    pieces = Microbatches(Minibatch(make) if whole else make, torch.zeros(1), 0, 2)
    for step, leaves in ((1, [2, 4, 3, 1]), (2, [5, 7, 6, 8])):
        assert [int(leaf[0]) for leaf in pieces(step, 0).leaves] == leaves
