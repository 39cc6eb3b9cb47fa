"""What SIGTERM saves, after each call of `save`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpirun.training.saving import Saving

DATA: Any = object()


def saving(name: str) -> Saving:
    """A capital letter: with the position in the data."""
    return Saving(Path(name.lower()), DATA if name.isupper() else None, 3)


@pytest.mark.parametrize(
    ("calls", "resumed", "saved"),
    [
        ("l", None, "l"),
        ("bl", None, "b"),
        ("bl", "l", "l"),
        ("bL", None, "L"),
        ("Lb", None, "L"),
        ("Ll", None, "L"),
        ("Lb", "b", "L"),
        ("LBl", "l", "B"),
    ],
)
def test_sigterm_saves_what_a_restart_resumes(calls, resumed, saved):
    at_sigterm, resumed_from = None, None if resumed is None else Path(resumed)
    for call in map(saving, calls):
        at_sigterm = call if call.replaces(at_sigterm, resumed_from) else at_sigterm
    assert at_sigterm == saving(saved)
