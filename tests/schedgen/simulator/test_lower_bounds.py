"""Bounds: no schedule is faster, and the best known ones reach them."""

import numpy as np
import pytest
from compiled import compiled
from drawn_programs import cases
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.simulator.stats import stats


@given(st.data(), cases())
def test_no_schedule_is_below_its_bounds(data, case):
    program = case.compile()
    assert stats(program)["gap"] >= -1e-9
    times = arrays(np.float64, case.sizes.stages, elements=st.integers(1, 5))
    cost = {name: data.draw(times) for name in case.cost}
    assert stats(program, cost)["gap"] >= -1e-9
    assert stats(program, {**cost, "R": 0.0})["gap"] >= -1e-9


def numbers(name, *sizes, cost=None):
    return stats(compiled(name, *sizes), cost)


def test_redone_forwards_are_in_no_one_s_memory_until_they_are_redone(run, tmp_path):
    path = tmp_path / "redone.json"
    assert run("compile", "1f1b", "--stages", 4, "--microbatches", 8, "--recompute", "all", "-o", path).code == 0
    assert "bound                 33 (ends)" in run("stats", path).out
    # A forward that is recomputed elsewhere need not wait for the original: F of stage 0, R and B of stage 1, B of 0.
    moved = Scheme("moved", 2, lambda s, b, d: (s, s * (1 - d)), lambda s, b, d: b, "moved", "greedy")
    alone = stats(compile(moved, Sizes(2, 1, 2), Options(cost={"F": 1, "B": 2, "R": 0})))
    assert alone["latency"] == alone["bounds"]["critical_path"] == 5
    # So it is with each slice of the loss: F of stage 0 and both backwards of it on one worker.
    moved = moved._replace(w=lambda s, b, d: (s * (1 - d), s * (1 - d)))
    options = Options(cost={"F": 1, "B": 2, "R": 0}, tensor=2, replicated_stages=[0, 1])
    sliced = stats(compile(moved, Sizes(2, 1, 4), options))
    assert sliced["latency"] == sliced["bounds"]["work"] == 5 >= sliced["bounds"]["critical_path"]


def test_ddp_reaches_the_work_bound_and_one_microbatch_the_critical_path():
    assert numbers("ddp", 4, 8, 8)["gap"] == 0
    alone = numbers("gpipe", 6, 1)
    assert (alone["latency"], alone["bounds"]["critical_path"], alone["gap"]) == (18, 18, 0)


@pytest.mark.parametrize("W", [4, 8])
def test_zero_bubble_comes_within_the_warm_up_of_the_work_bound(W):
    """ZB-H2 idles only before its first job, W - 1 forwards, and after its last."""
    one = numbers("zb-h2", W, 4 * W)
    assert one["bounds"]["work"] == 3 * 4 * W
    assert one["latency"] == one["bounds"]["work"] + W - 1


def test_lpp_s_formula_is_below_the_work_bound_when_s_is_above_r():
    """Rahimi 2025's S + B/G - 1 in units of F + B: at S = 8, R = 2, B/G = 4 it says 11, but a worker has 16 jobs."""
    one = numbers("lpp", 8, 8, 4, 2)
    assert one["bounds"]["work"] / 3 == 16 > 8 + 8 / 2 - 1
    assert one["latency"] / 3 >= max(8 + 8 / 2 - 1, 8 / 2 * 8 / 2 + 2 - 1)
