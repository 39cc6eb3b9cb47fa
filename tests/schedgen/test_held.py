"""held: the series has the peaks that the checker finds, and comes back to zero."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from schedgen.cost import Machine
from schedgen.held import held
from schedgen.places import measured
from schedgen.simulate import simulate


def peaks_of_held(program, data):
    """The most of each kind is the peak of that kind, and all that is taken is given back."""
    stages = program.header.stages
    sizes = st.lists(st.integers(1, 9), min_size=stages, max_size=stages)
    edges = len(program.header.edges)
    apart = data.draw(st.none() | st.lists(st.integers(1, 9), min_size=edges, max_size=edges))
    machine = Machine(**{key: data.draw(sizes) for key in ("activation", "weight", "saved", "half")}, apart=apart)
    found = held(program, measured(machine, stages, edges))
    peak = np.zeros((program.header.workers, found.taken.shape[1]), np.int64)
    np.maximum.at(peak, program.rows.rank, found.during)
    assert peak.T.tolist() == [kind.tolist() for kind in simulate(program, program.header.cost, machine).memory]
    assert found.taken.min() >= 0 and found.given.min() >= 0
    for kind in range(found.taken.shape[1]):
        net = np.bincount(program.rows.rank, (found.taken - found.given)[:, kind], minlength=program.header.workers)
        assert not net.any()


@settings(max_examples=40)
@given(st.data())
def test_the_most_of_each_kind_is_the_peak_of_that_kind(cases, data):
    peaks_of_held(data.draw(cases).compile(), data)
