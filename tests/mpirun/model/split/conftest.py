"""What the tests of splitting share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def seeded() -> None:
    """The same numbers in every test."""
    torch.manual_seed(0)
