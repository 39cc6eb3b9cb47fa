"""A rank is killed at a random moment: all end, no checkpoint suffers, and the resumed run ends with the same bits.

A few of the runs that `make test-crash` does 50 of.
"""

from __future__ import annotations

import pytest
from examples import further
from kill_and_resume import Crasher


@pytest.fixture(scope="module")
def crasher(tmp_path_factory, warm_ranks) -> Crasher:
    return Crasher(tmp_path_factory.mktemp("crash"), seed=1, ranks=2, steps=12)


@pytest.mark.parametrize("kind", [*further("anywhen"), "writing"])
def test_a_run_that_is_killed_and_resumed(crasher, kind):
    crash = crasher.crash(kind)
    assert crash.whole and crash.same
    assert crash.lasted < 5
