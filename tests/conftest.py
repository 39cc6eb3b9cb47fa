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
from warm_ranks import IN_THE_WAY
from warm_servers import PROGRAM, WarmServers

import schedgen.util.jit

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.pop("PYTHONUNBUFFERED", None)  # which would write the lines of two ranks into each other
sys.dont_write_bytecode = False
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_BOUNDSCHECK", "1")
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "kernels"))
schedgen.util.jit.SMALL = 0

KEPT = Path(os.environ["NUMBA_CACHE_DIR"]) / "compiled"
WARM = "WARM_RANKS"  # the folder of the servers that all workers share


def pytest_configure(config: pytest.Config) -> None:
    """Before there are workers: the kernels are compiled, and the servers of warm ranks are there."""
    if not hasattr(config, "workerinput"):
        to_compile = bool(config.getoption("numprocesses", None)) and not kernels_are_kept()
        start_servers(config, ask=to_compile)
        if to_compile:
            compile_kernels()


def kernels_are_kept() -> bool:
    """Whether those of today's sources are compiled."""
    return KEPT.exists() and KEPT.read_bytes() == schedgen.util.jit.sources()


def compile_kernels() -> None:
    """Two processes compile them, or each worker and rank would compile all of them."""
    program = Path(__file__).parent / "helpers" / "programs" / "compile_kernels.py"
    with tempfile.TemporaryDirectory() as folder:
        halves = [
            subprocess.Popen([sys.executable, str(program), folder, half], stdout=subprocess.DEVNULL)
            for half in ("first", "second")
        ]
        assert [half.wait() for half in halves] == [0, 0]
    KEPT.write_bytes(schedgen.util.jit.sources())


def start_servers(config: pytest.Config, ask: bool) -> None:
    """Those of helpers/warm_ranks.py, until the end of the session; they import nothing before a rank asks.

    `ask`: one does, of the first, so that Python compiles torch's sources once, not in each worker and server.
    """
    folder = tempfile.TemporaryDirectory()
    os.environ[WARM] = folder.name
    environment = {key: text for key, text in os.environ.items() if key != "PYTHONPATH"}
    servers = WarmServers(Path(folder.name), [environment, environment])
    if ask:
        servers.wait()
    rank = [sys.executable, "-I", "-S", str(PROGRAM), "rank", folder.name, "-c", "pass"]
    asked = subprocess.Popen(rank, env=environment) if ask else None

    def stop() -> None:
        if asked:
            asked.wait()
        servers.close()
        folder.cleanup()

    config.add_cleanup(stop)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The two longest files first: a worker that began one of them last would end long after the others."""
    items.sort(key=lambda item: item.path.name not in ("test_readme.py", "test_benchmarks.py"))


@pytest.fixture(scope="session")
def warm_ranks() -> Iterator[list[str]]:
    """Whatever is started by $MPIEXEC has imported torch: helpers/warm_ranks.py. COLD_RANKS=1: it imports torch.

    The value is what starts a process that has imported torch, too, and then does what Python would do.
    """
    folder, program = os.environ[WARM], [sys.executable, "-I", "-S", str(PROGRAM)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPIEXEC", shlex.join([*program, "mpiexec", folder, *mpiexec()]))
        yield [*program, "rank", folder]
    in_the_way = Path(folder, IN_THE_WAY)
    assert not in_the_way.exists(), f"variables that no rank was forked with: {in_the_way.read_text()}"
