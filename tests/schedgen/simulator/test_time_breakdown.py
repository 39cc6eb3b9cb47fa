"""idle: every worker's time is accounted for, by cause."""

import re
from pathlib import Path

import numpy as np
from compiled import compiled
from drawn_programs import cases
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from schedgen.schemes.scheme import Sizes
from schedgen.simulator.machine import Machine
from schedgen.simulator.simulate import simulate
from schedgen.simulator.timeline import (
    BUSY,
    CAUSES,
    COOL_DOWN,
    DEPENDENCY,
    OVERHEAD,
    SEND,
    SHARES,
    STEP,
    SUM,
    TRANSFER,
    WARM_UP,
    time_breakdown,
)


def accounted(name, sizes, machine=None, cost=None):
    program = compiled(name, sizes)
    return time_breakdown(program, simulate(program, cost or program.header.cost, machine).timeline())


def by_name(time):
    return {name: float(value) for name, value in zip(SHARES, time, strict=True) if value}


def test_a_wait_is_for_the_sender_until_it_sends_and_for_the_link_from_there():
    # Two stages, one microbatch: F 1, message 1, F 1, B 2, message 1, B 2, NORM 0.5; worker 1 is done with its B at 5.
    time = accounted("gpipe", Sizes(2, 1), Machine(alpha=0.5, beta=0.25, activation=2)).time
    assert by_name(time[0]) == {"busy": 3, "dependency": 4, "transfer": 1, "sum": 0.5}
    assert by_name(time[1]) == {"busy": 3, "warm-up": 1, "transfer": 1, "cool-down": 3, "sum": 0.5}


def test_sums_steps_and_those_who_end_first():
    # DDP, two stages each: each sum is on the links for 8, and the first begins 2 before the last backward ends; then
    # it arrives, in two latencies, and NORM takes one.
    machine = Machine(alpha=1.0, beta=1.0, weight=8, step=[3, 4])
    for time in accounted("ddp", Sizes(2, 2), machine).time:
        assert by_name(time) == {"busy": 2 * (1 + 2), "sum": 2 * 8 - 2 + 2 * 1 + 1, "step": 3 + 4}
    # GPipe: no sums; both steps begin together, and worker 0 ends a unit earlier.
    time = accounted("gpipe", Sizes(2, 1), Machine(step=[3, 4])).time
    assert by_name(time[0]) == {"busy": 3, "dependency": 3, "step": 3, "cool-down": 1}
    assert by_name(time[1]) == {"busy": 3, "warm-up": 1, "step": 4, "cool-down": 2}


def test_a_pipeline_s_bubble_is_warm_up_cool_down_and_what_is_in_between():
    """1F1B, p = 4: worker k starts k F late, ends k B early, and loses (p - 1)(F + B) in all [Narayanan 2021, 2.2]."""
    time = accounted("1f1b", Sizes(4, 8)).time
    assert time[:, WARM_UP].tolist() == [0, 1, 2, 3]
    assert time[:, COOL_DOWN].tolist() == [0, 2, 4, 6]
    assert (time[:, [WARM_UP, DEPENDENCY, COOL_DOWN]].sum(axis=1) == 3 * (1 + 2)).all()


def test_weights_that_travel_are_waited_for_as_transfers():
    time = accounted("fsdp", Sizes(4, 4), Machine(alpha=0.0, beta=1.0, weight=2)).time
    assert (time[:, TRANSFER] > 0).any() and time[:, WARM_UP].sum() < time[:, TRANSFER].sum()


@settings(max_examples=examples(40))
@given(st.data(), cases())
def test_time_adds_up_and_agrees_with_the_simulation(data, case):
    program = case.compile()
    costs = {key: data.draw(st.sampled_from([0, 0.5, 3])) for key in ("alpha", "beta", "step")}
    run = simulate(program, program.header.cost, Machine(**costs, weight=3))
    found = time_breakdown(program, run.timeline())
    time = found.time
    assert time.min() >= 0 and (time[:, OVERHEAD] == 0).all()
    assert found.begin == 0 and found.makespan == run.end.max()
    assert np.allclose(time.sum(axis=1), found.makespan)
    ends = np.zeros(program.header.workers)
    np.maximum.at(ends, program.rows.rank, run.end)
    waited = time[:, [WARM_UP, DEPENDENCY, COOL_DOWN, TRANSFER, SEND, SUM]].sum(axis=1) - (found.makespan - ends)
    assert np.allclose(waited, run.idle.sum(axis=1))
    waits = run.wait > 0  # of each row, and every one has its cause
    at = program.rows.rank[waits] * len(CAUSES) + run.cause[waits]
    assert np.allclose(np.bincount(at, run.wait[waits], minlength=run.idle.size), run.idle.ravel())
    assert np.allclose(time[:, SEND], run.idle[:, CAUSES.index("send")])
    assert (time[:, SUM] <= run.idle[:, CAUSES.index("reduction")] + 1e-9).all()
    if costs["alpha"] == costs["beta"] == 0:
        assert not time[:, [TRANSFER, SEND, SUM]].any()
    assert np.allclose(time[:, BUSY] + time[:, STEP], ends - run.idle.sum(axis=1))


def test_units_do_not_matter():
    sizes = Sizes(4, 4, 4, 2)
    program = compiled("fslpp", sizes)
    run = simulate(program, {"F": 1, "B": 2}, Machine(alpha=0.1))
    one, other = (time_breakdown(program, run.timeline(unit)) for unit in (1.0, 1e6))
    assert np.allclose(1e6 * one.time, other.time) and one.time[:, TRANSFER].any()


def test_the_reference_names_each_share():
    text = (Path(__file__).parents[3] / "schedgen" / "docs" / "reference.md").read_text()
    assert {*SHARES} <= {*re.findall(r"\*([a-z-]+)\*", text)}
