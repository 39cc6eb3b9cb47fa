"""Messages arrive as they were sent, and an OrderedAllreduce is the sum in the order of its keys, for any type.

On memory that MPI may access at once, and on a device whose kernels run late,
with and without a copy in host memory. The checks, and the ranks of each, are
in programs/check_transport.py.
"""

from __future__ import annotations

import pytest

CLAIMS = (
    "sums of float32", "sums of bfloat16", "short sums", "sums in the background", "messages", "kinds", "under way",
    "weights again", "groups", "in the stream", "kept",
)  # fmt: skip


@pytest.fixture(scope="module")
def ran(launch):
    """`python -m mpi4py` ends all ranks if one fails."""
    return launch(3, program=["-m", "mpi4py", "programs/check_transport.py"])


@pytest.mark.parametrize("how", ["at once", "late", "late and staged"])
@pytest.mark.parametrize("claim", CLAIMS)
def test_on_three_ranks(ran, claim, how):
    assert f"holds: {claim}, {how}" in ran.out.splitlines(), ran.err


def test_nothing_else_failed(ran):
    assert ran.code == 0, ran.err
