"""Tests call kernels often and on little: compiled they take a tenth of the time, and here they check bounds, too.

What a command does with small inputs, which is to interpret kernels, the tests that start one see. test_jit.py compares
both ways. Everything computes in one thread: there is a test at a time for every core. What Python has compiled is
kept: tests start hundreds of processes.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import mpiexec

import schedgen.util.jit

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_BOUNDSCHECK", "1")
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "kernels"))
schedgen.util.jit.SMALL = 0


def pytest_configure(config: pytest.Config) -> None:
    """Before there are workers, two processes compile the kernels: each worker and rank would compile all of them."""
    kept = Path(os.environ["NUMBA_CACHE_DIR"]) / "compiled"
    newest = max(file.stat().st_mtime for file in Path(schedgen.util.jit.__file__).parents[1].rglob("*.py"))
    if not config.getoption("numprocesses", None) or (kept.exists() and kept.stat().st_mtime > newest):
        return
    program = Path(__file__).parent / "helpers" / "programs" / "compile_kernels.py"
    with tempfile.TemporaryDirectory() as folder:
        halves = [
            subprocess.Popen([sys.executable, str(program), folder, half], stdout=subprocess.DEVNULL)
            for half in ("first", "second")
        ]
        assert [half.wait() for half in halves] == [0, 0]
    kept.touch()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The two longest files first: a worker that began one of them last would end long after the others."""
    items.sort(key=lambda item: item.path.name not in ("test_readme.py", "test_benchmarks.py"))


@pytest.fixture(scope="session")
def warm_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whatever is started by $MPIEXEC has imported torch: helpers/warm_ranks.py. COLD_RANKS=1: it imports torch."""
    program, folder = str(Path(__file__).parent / "helpers" / "warm_ranks.py"), str(tmp_path_factory.mktemp("warm"))
    environment = {key: text for key, text in os.environ.items() if key != "PYTHONPATH"}
    servers = [
        subprocess.Popen(
            [sys.executable, program, "serve", folder, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        for name in ("0", "1")
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPIEXEC", shlex.join([sys.executable, "-I", "-S", program, "mpiexec", folder, *mpiexec()]))
        yield
    in_the_way = {server.communicate()[0] for server in servers}
    assert in_the_way == {b""}, f"variables that no rank was forked with: {in_the_way}"
