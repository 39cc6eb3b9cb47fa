"""Lifetimes.timeline: the series has the peaks that the checker finds, and comes back to zero."""

from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_memory_plan import peaks_of_timeline


@settings(max_examples=examples(40))
@given(st.data())
def test_the_most_of_each_kind_is_the_peak_of_that_kind(cases, data):
    peaks_of_timeline(data.draw(cases).compile(), data)
