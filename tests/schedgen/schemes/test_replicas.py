"""Replicas of a scheme are that scheme side by side, and share the sums of gradients."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from compiled import compiled, sizes_of
from edited_programs import runs_with
from examples import examples
from hypothesis import assume, given, settings

from schedgen.checker import check
from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.schemes import SCHEMES, load
from schedgen.schemes.scheme import Sizes
from schedgen.simulator.simulate import simulate
from schedgen.util.errors import UsageError


@pytest.mark.parametrize("name", SCHEMES)
def test_a_replica_runs_as_the_scheme_does(name):
    """Its jobs start when the scheme's start, on ranks of its own: consecutive ones, or every R-th."""
    small = sizes_of(name)
    large = small._replace(microbatches=3 * small.microbatches, workers=12, replicas=3)
    alone = compiled(name, small)
    for interleave in (False, True):
        program = compile(load(name, large, interleave=interleave), large)
        for field in ("compute", "weights"):
            every, one = (getattr(each.header, field) for each in (program, alone))
            for r in range(3):
                assert (every[..., r::3] == (3 * one + r if interleave else 4 * r + one)).all()
        one, every = (simulate(each, each.header.cost).windows for each in (alone, program))
        for times, of_all in zip(one, every, strict=True):
            assert (of_all.reshape((4, 3) if interleave else (3, 4)) == (times[:, None] if interleave else times)).all()


GREEDY = ("depth-first", "breadth-first")


@settings(max_examples=examples(100))
@given(
    st.sampled_from(list(SCHEMES)), st.integers(1, 4), st.integers(1, 17),
    st.sampled_from(["own", "limited", "1f1b", *GREEDY]), st.booleans(),
)  # fmt: skip
def test_any_number_of_replicas_and_microbatches_is_proved_and_runs(name, replicas, microbatches, order, interleave):
    options = {"own": {}, "limited": {"mode": "greedy", "memory_limit": 9}, "1f1b": {"n": "1f1b"}}
    options = options.get(order, {"mode": "greedy", "n": order})
    one = sizes_of(name)
    sizes = one._replace(microbatches=microbatches, workers=4 * replicas, replicas=replicas)
    try:
        small = sizes.per_replica()
        compiled(name, small, **options)
    except UsageError:
        assume(False)
    program = compile(load(name, sizes, interleave=interleave), sizes, Options(**options))
    runs_with(check(program), program)
    simulate(program, program.header.cost)


def test_shards_of_weights_have_one_owner_for_all_replicas():
    """Those of a w without k are spread over the replicas first, and then over the workers of each."""
    for shards, owners in (((4,), [[0, 2, 1, 3], [1, 3, 0, 2]]), ((2, 3), [[0, 2], [1, 3, 0]])):
        sizes = Sizes(2, 4, 4, replicas=2, shards=shards)
        program = compiled("1f1b", sizes)
        runs_with(check(program), program)
        assert [list(each) for each in program.header.shard_owners] == owners


@pytest.mark.parametrize(("shards", "owners"), [(1, ()), (4, ((2, 5, 1, 4), (1, 4, 0, 3)))])
def test_a_w_of_k_places_the_shards_of_each_replica(tmp_path, shards, owners):
    (tmp_path / "mine.py").write_text("def w(s, b, d, k):\n    return (2 - s - k) % 3, (s + 0 * k) % 3")
    sizes = Sizes(2, 5, 6, replicas=2, shards=(shards,))
    program = compiled(tmp_path / "mine.py", sizes, n="depth-first")
    runs_with(check(program), program)
    assert program.header.shard_owners == owners
    assert program.header.compute[0].tolist() == [[0, 3, 0, 3, 0], [1, 4, 1, 4, 1]]


def test_a_w_of_t_places_the_slices_of_each_replica(tmp_path):
    (tmp_path / "mine.py").write_text("def w(s, b, d, t, *, stages):\n    return (s + stages * t, s + stages * t)")
    sizes = Sizes(2, 4, 8, replicas=2)
    program = compiled(tmp_path / "mine.py", sizes, n="1f1b", tensor=2)
    runs_with(check(program), program)
    assert program.header.compute[0, :, :2].tolist() == [[0, 4], [2, 6], [1, 5], [3, 7]]
