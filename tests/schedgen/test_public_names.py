"""`import schedgen` gives its public names, and imports no more than it is asked for."""

import subprocess
import sys

import pytest

import schedgen

SIZES = schedgen.Sizes(stages=2, microbatches=2)


@pytest.mark.parametrize("name", schedgen.__all__)
def test_every_public_name_is_there_and_told(name):
    assert getattr(schedgen, name) is not None
    assert name == "__version__" or any(
        name in line.split("  ")[0].split(", ") for line in schedgen.__doc__.splitlines()
    )


def test_other_names_are_not_there():
    with pytest.raises(AttributeError, match="no attribute lower"):
        schedgen.lower  # noqa: B018


def test_importing_it_alone_imports_no_numpy():
    subprocess.run([sys.executable, "-c", "import sys, schedgen; sys.exit('numpy' in sys.modules)"], check=True)


def test_a_scheme_is_two_functions():
    scheme = schedgen.Scheme("mine", None, lambda s, b, d: (s, s), lambda s, b, d: b, "b", "greedy")
    program = schedgen.compile(scheme, SIZES, schedgen.Options(prefetch=0))
    assert schedgen.check(program).saved.tolist() == [2, 1]  # the older microbatch goes first
    assert schedgen.stats(program)["latency"] == max(schedgen.simulate(program, {"F": 1, "B": 2}).end)
