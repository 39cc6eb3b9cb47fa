"""What SIGTERM saves, after each call of `save`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
    session: Any = None
    checkpoints = Checkpoints(session)
    checkpoints.resumed = saving(resumed) if resumed else None
    for call in map(saving, calls):
        checkpoints.at_sigterm = checkpoints.at_sigterm_after(call)
    assert checkpoints.at_sigterm == saving(saved)
