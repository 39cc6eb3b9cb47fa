"""Messages arrive as they left, and a Sum is the sum in the order of its keys, for any type.

What is checked, and on which ranks, stands in programs/transport.py.
"""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def ran(launch):
    """`python -m mpi4py` ends all ranks if one fails."""
    return launch(3, program=["-m", "mpi4py", "programs/transport.py"])


@pytest.mark.parametrize("claim", ["sums of float32", "sums of bfloat16", "messages", "kinds", "groups"])
def test_on_three_ranks(ran, claim):
    assert f"holds: {claim}" in ran.out.splitlines(), ran.err


def test_nothing_else_failed(ran):
    assert ran.code == 0, ran.err
