"""The environment of all tests: compiled kernels, one thread per process, and servers that ranks are forked from.

The whole suite (`pytest -n 2`) compiles all kernels first, with bounds checks, and calls them however small their input
is: that takes a tenth of the time. Compiling takes a minute, and each change of a source file makes it necessary again.
So a plain `pytest FILE` interprets them where they are not compiled yet. Tests that start a command see small inputs
interpreted; test_jit.py compares both ways. Every process computes in one thread, since a test runs on each core.
Bytecode is cached: tests start hundreds of processes. Their files lie in memory where there is room, for checkpoints
are synced, and would wait for the disk.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import ROOT, mpiexec
from warm_ranks import IN_THE_WAY
from warm_servers import PROGRAM, WarmServers

import schedgen.util.jit

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.pop("PYTHONUNBUFFERED", None)  # it would interleave the lines of two ranks
sys.dont_write_bytecode = False
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_BOUNDSCHECK", "1")
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "kernels"))

INTERPRETED = 20_000_000  # `jit.SMALL` where no kernels are kept: more than tests of the compiler need of any kernel
KEPT = Path(os.environ["NUMBA_CACHE_DIR"]) / "compiled"
ROOM = 4 * 2**30  # bytes that MEMORY should have
MEMORY = Path("/dev/shm")
WARM = "WARM_RANKS"  # environment variable: the folder of the servers, which all pytest workers share


def pytest_configure(config: pytest.Config) -> None:
    """Start the servers of warm ranks and compile the kernels, once, before pytest-xdist starts its workers."""
    is_worker, kept = hasattr(config, "workerinput"), kernels_are_kept()
    schedgen.util.jit.SMALL = 0 if is_worker or kept else INTERPRETED
    if not is_worker:
        if MEMORY.is_dir() and has_room(os.statvfs(MEMORY)):
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
        to_compile = bool(config.getoption("numprocesses", None)) and not kept
        start_servers(config, ask=to_compile)
        if to_compile:
            compile_kernels()


def has_room(memory: os.statvfs_result) -> bool:
    """Whether files in memory have room, and may be executed, as some of the tests' are."""
    return memory.f_bavail * memory.f_frsize > ROOM and not memory.f_flag & os.ST_NOEXEC


def kernels_are_kept() -> bool:
    """Whether the kernels of the current sources have been compiled."""
    return KEPT.exists() and KEPT.read_bytes() == schedgen.util.jit.sources()


def compile_kernels() -> None:
    """Compile the kernels in two processes; otherwise each worker and rank would compile all of them."""
    program = Path(__file__).parent / "helpers" / "programs" / "compile_kernels.py"
    with tempfile.TemporaryDirectory() as folder:
        halves = [
            subprocess.Popen([sys.executable, str(program), folder, half], stdout=subprocess.DEVNULL)
            for half in ("first", "second")
        ]
        assert [half.wait() for half in halves] == [0, 0]
    KEPT.write_bytes(schedgen.util.jit.sources())


def start_servers(config: pytest.Config, ask: bool) -> None:
    """Start the two servers of helpers/warm_ranks.py until the session ends; they import torch on the first request.

    `ask`: request a rank of the first server now, so that Python compiles torch's sources once, not in every process.
    """
    folder = tempfile.TemporaryDirectory()
    os.environ[WARM] = folder.name
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # not the installed packages, which may be another checkout's
    servers = WarmServers(Path(folder.name), environment)
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
    """Run the longest file first: a worker that started it last would end long after the others."""
    items.sort(key=lambda item: item.path.name != "test_readme.py")


@pytest.fixture(scope="session")
def warm_ranks() -> Iterator[list[str]]:
    """Make $MPIEXEC fork its ranks from a server that has imported torch, by helpers/warm_ranks.py.

    The value is a stand-in for the Python executable that forks one process. With COLD_RANKS=1 nothing is forked.
    """
    folder, program = os.environ[WARM], [sys.executable, "-I", "-S", str(PROGRAM)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPIEXEC", shlex.join([*program, "mpiexec", folder, *mpiexec()]))
        yield [*program, "rank", folder]
    in_the_way = Path(folder, IN_THE_WAY)
    assert not in_the_way.exists(), f"variables that no rank was forked with: {in_the_way.read_text()}"
