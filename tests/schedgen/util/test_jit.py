"""Kernels as Python and kernels compiled by numba: the same results to the byte."""

import io
import json
import os
import shutil
import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest
from compiled import compiled
from examples import further

import schedgen.util.jit
from schedgen.checker import check
from schedgen.ir.file import parse, read, write
from schedgen.schemes.scheme import Sizes
from schedgen.simulator.buffer_sizes import buffer_sizes
from schedgen.simulator.footprint import footprint
from schedgen.simulator.machine import Machine
from schedgen.simulator.memory_plan import memory_plan
from schedgen.simulator.simulate import simulate
from schedgen.util.errors import RefusedFile, UsageError
from schedgen.util.jit import kernel

# Numbers of three digits and more, several owners, relays, splits, limits.
CASES = [
    ("fsdp", Sizes(5, 110, 12), {"weight_slots": 2}),
    ("lpp", Sizes(6, 12, 6, 3), {}),
    ("lpp", Sizes(4, 8, 4, 2), {"tied": [stages for n in (2, 3, 4) for stages in combinations(range(4), n)]}),
    ("zb-v", Sizes(8, 12, 4), {"prefetch": 1}),
    ("dualpipe-v", Sizes(8, 12, 4), {"recompute": [0, 7]}),
    ("depth-first", Sizes(8, 12, 4), {"memory_limit": 6}),
]


def both(monkeypatch, function):
    """The result as Python and as compiled."""
    results = []
    for small in (10**12, 0):
        monkeypatch.setattr(schedgen.util.jit, "SMALL", small)
        results.append(function())
    return results


def outcome(function):
    try:
        return function()
    except (RefusedFile, UsageError) as error:
        return str(error)


@pytest.mark.parametrize(("name", "sizes", "options"), CASES, ids=[case[0] for case in CASES])
def test_both_ways_compile_check_write_read_and_simulate_alike(name, sizes, options, monkeypatch):
    def everything():
        program = compiled(name, sizes, **options)
        file = io.BytesIO()
        write(program, file)
        again, fault = read(io.BytesIO(file.getvalue()), "file")
        assert fault is None
        run = simulate(again, again.header.cost, Machine(alpha=0.1, beta=0.01, activation=7, weight=20))
        amounts = buffer_sizes(Machine(activation=7, weight=20), again.header.stages)
        return file.getvalue(), check(again), run, memory_plan(again, amounts).slot, footprint(again, amounts)

    (text, memory, run, slot, needed), (text2, memory2, run2, slot2, needed2) = both(monkeypatch, everything)
    assert text == text2
    assert all((a == b).all() for a, b in zip(memory + needed, memory2 + needed2, strict=True))
    assert (slot == slot2).all()
    for column in ("start", "end", "arrival", "idle", "cause"):
        assert (getattr(run, column) == getattr(run2, column)).all()


def test_both_ways_refuse_alike(monkeypatch):
    sizes = Sizes(4, 4, 4)
    file = io.BytesIO()
    write(compiled("fsdp", sizes), file)
    good = json.loads(file.getvalue())
    rng = np.random.default_rng(1)
    refusals = set()
    for _ in range(60):
        damaged = json.loads(json.dumps(good))
        rank = damaged["programs"][rng.integers(4)]
        a, b = rng.integers(len(rank), size=2)
        rank[a], rank[b] = rank[b], rank[a]
        first, second = both(
            monkeypatch, lambda damaged=damaged: outcome(lambda: check(parse(json.dumps(damaged), "f")))
        )
        assert type(first) is type(second)
        if isinstance(first, str):
            assert first == second
            refusals.add(first.rsplit("(rule ", 1)[1])
    assert len(refusals) >= 4  # of the rules


def test_a_kernel_is_compiled_when_its_work_adds_up(monkeypatch):
    monkeypatch.setattr(schedgen.util.jit, "SMALL", 10)

    def is_compiled(function):
        return hasattr(function, "signatures")

    often, one_of_many = kernel(lambda a: a + 1), kernel(lambda a: a + 2)
    assert [is_compiled(often.sized(work)) for work in (4, 5, 1, 0)] == [False, False, True, True]
    assert [is_compiled(one_of_many.sized(1, ahead)) for ahead in (8, 9)] == [False, True]


@pytest.fixture
def compiled_package(tmp_path):
    """Run a package with jit.py and a kernel that adds another module's number: its result and its cache files."""
    package, kept = tmp_path / "schedgen", tmp_path / "kept"
    (package / "util").mkdir(parents=True)
    (package / "__init__.py").touch()
    shutil.copy(schedgen.util.jit.__file__, package / "util")
    (package / "mine.py").write_text(
        "from schedgen.other import NUMBER\nfrom schedgen.util.jit import SMALL, kernel\n\n"
        "@kernel\ndef add(a):\n    return a + NUMBER\n\nprint(add.sized(SMALL)(1))\n"
    )

    def compiled_package(number):
        (package / "other.py").write_text(f"NUMBER = {number}\n")
        done = subprocess.run(
            [sys.executable, "-B", "-c", "import schedgen.mine"], cwd=tmp_path, capture_output=True, text=True,
            env={**os.environ, "NUMBA_CACHE_DIR": str(kept)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return int(done.stdout), sorted(file.name for file in kept.rglob("*.nb?"))

    return compiled_package


def test_a_kernel_is_compiled_again_when_another_module_changes_and_where_the_cache_is_damaged(
    compiled_package, tmp_path
):
    (first, files), second = compiled_package(1), compiled_package(10)
    assert files and first == 2 and second == (11, files)
    (index,) = (tmp_path / "kept").rglob("*.nbi")
    for size in (20, *further(0)):
        index.write_bytes(index.read_bytes()[:size])
        assert compiled_package(10) == second
