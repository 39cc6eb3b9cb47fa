import contextlib

import pytest

from schedgen.planner import plan
from schedgen.planner.candidates import CandidateBound, candidate_bound


def far_too_low(candidate):
    """Bounds that leave nothing out, but keep the order in which candidates are tried."""
    return CandidateBound(1e-9 * candidate_bound(candidate).seconds, 0.0)


@pytest.fixture
def without_bounds(monkeypatch):
    """A context in which `plan` simulates all candidates."""

    @contextlib.contextmanager
    def context():
        with monkeypatch.context() as patch:
            patch.setattr(plan, "candidate_bound", far_too_low)
            yield

    return context
