"""What SIGTERM saves, after each call of `save`, and the order of inputs after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.utils._pytree as pytree
from mpi4py import MPI

from mpirun.data.loader import Batch
from mpirun.data.microbatches import Microbatch
from mpirun.training.batches import InputOrder
from mpirun.training.saving import Checkpoints, Saving

DATA: Any = object()


def saving(name: str) -> Saving:
    """A capital letter: with the position in the data."""
    return Saving(Path(name.lower()), DATA if name.isupper() else None, 3)


@pytest.mark.parametrize(
    ("resumed", "calls", "saved"),
    [
        ("", "l", "l"),
        ("", "bl", "b"),
        ("l", "bl", "l"),
        ("l", "b", "b"),
        ("", "bL", "L"),
        ("", "Lb", "L"),
        ("", "Ll", "L"),
        ("b", "Lb", "L"),
        ("l", "LBl", "B"),
        ("L", "b", "L"),
        ("L", "l", "L"),
        ("L", "N", "N"),
        ("L", "bNb", "N"),
    ],
)
def test_sigterm_saves_what_a_restart_resumes(resumed, calls, saved):
    nothing: Any = None
    checkpoints = Checkpoints(nothing, nothing)
    checkpoints.restart = saving(resumed) if resumed else None
    for call in map(saving, calls):
        checkpoints.at_sigterm = checkpoints.at_sigterm_after(call)
    assert checkpoints.at_sigterm == saving(saved)


@pytest.mark.parametrize(
    ("before", "first", "arranged"),
    [("ab", "bca", "abc"), ("ab", "ca", "ca"), ("", "ba", "ba"), ("abc", "ca", "ac")],
)
def test_a_resumed_run_has_the_order_of_inputs_of_the_run_before(before, first, arranged):
    """It has its own if an input has other keys."""
    order = InputOrder(MPI.COMM_SELF)
    order.resume(paths := [f"['{key}']" for key in before])
    assert order.to_save == paths
    leaves, structure = pytree.tree_flatten({key: key for key in first})
    batch = Batch(0, 0, [1], {0: Microbatch(leaves, None, 1.0, structure=structure)})
    assert "".join(order.arranged(batch).microbatches[0].leaves) == arranged
    assert {*order.to_save} >= {f"['{key}']" for key in arranged}
