"""What the tests of splitting share."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from schedgen.util.errors import MpirunWarning


@pytest.fixture
def seeded() -> Iterator[None]:
    """The same numbers in every test, and no warning of BatchNorm's statistics."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*statistics are those", MpirunWarning)
        yield
