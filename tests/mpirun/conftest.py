"""What the tests share: real launches by mpiexec, compiled schedules, and a small text."""

from __future__ import annotations

import argparse
import inspect
import json
import shlex
import subprocess
import sys
import time
import typing
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from engine_scripts import PRELUDE
from processes import ROOT, environment, kill, mpiexec, processes
from run_results import differences
from standing_launch import StandingLaunch

from schedgen.cli.main import main as schedgen

HERE = Path(__file__).parents[1] / "helpers"


class LaunchResult(NamedTuple):
    """How a launch ended."""

    code: int
    out: str
    err: str
    seconds: float
    ended: float  # time.time() when mpiexec returned
    marker: str

    @property
    def ours(self) -> list[str]:
        """The lines on stderr that mpirun wrote; MPI may add its own."""
        return [line for line in self.err.splitlines() if line.startswith("mpirun: ")]


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory, warm_ranks: list[str]) -> Callable[..., LaunchResult]:
    """`mpiexec -n RANKS python -m mpirun ARGUMENTS`, in the folder of models_for_tests.py.

    ranks=None: without mpiexec. program: what follows `python` instead of `-m mpirun`.
    A launch that takes longer than `limit` seconds is ended, and the test fails.
    """

    def launch(
        ranks: int | None,
        *arguments: object,
        program: Sequence[str] = ("-m", "mpirun"),
        env: dict[str, str] | None = None,
        limit: float = 300,
    ) -> LaunchResult:
        marker = uuid.uuid4().hex
        command = warm_ranks if ranks is None else [*mpiexec(), "-n", str(ranks), sys.executable]
        command = [*command, *program, *map(str, arguments)]
        folder = tmp_path_factory.mktemp("launch")
        # Files, not pipes: a process left behind must not keep us reading.
        with (folder / marker).open("w+") as out, (folder / "err").open("w+") as err:
            begin = time.monotonic()
            job = subprocess.Popen(
                command, cwd=HERE, env=environment(marker, env), stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
            try:
                code: int | None = job.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            seconds, ended = time.monotonic() - begin, time.time()
            if code is None:
                kill(marker)
                job.kill()
                job.wait()
        stdout, stderr = (folder / marker).read_text(), (folder / "err").read_text()
        assert code is not None, f"still running after {limit} s: {shlex.join(command)}\n{stdout}\n{stderr}"
        return LaunchResult(code, stdout, stderr, seconds, ended, marker)

    return launch


def endless(run: Sequence[object]) -> list[str]:
    """The words of a run in a standing launch, which has a time limit, and needs no watchdog."""
    return [*map(str, run), *([] if run[0] in ("graph", "profile") else ["--timeout", "0"])]


class Ended(NamedTuple):
    """How one of several runs in a launch ended; `out` and `err` of all ranks."""

    code: int
    out: str
    err: str


MOST = 100  # runs per launch: what runs leave behind, such as communicators, accumulates


@pytest.fixture(scope="session")
def in_one_launch(
    tmp_path_factory: pytest.TempPathFactory, warm_ranks: list[str]
) -> Iterator[Callable[..., list[Any]]]:
    """Executes a list of runs one after the other in one launch, and returns run_server.py's answer to each.

    A launch of the same number of ranks and the same environment is reused, unless `fresh`.
    """
    launches: dict[object, StandingLaunch] = {}

    def in_one_launch(
        ranks: int, runs: Sequence[Any], limit: float = 300, env: dict[str, str] | None = None, fresh: bool = False
    ) -> list[Any]:
        key, env = (ranks, *(env or {}).items()), env or {}
        if key in launches and (fresh or launches[key].runs + len(runs) > MOST):
            launches.pop(key).close()
        if key not in launches:
            launches[key] = StandingLaunch(ranks, env, tmp_path_factory.mktemp("launch"))
        launch = launches.pop(key)  # put back only if every run is answered
        results = [launch.run(run, limit) for run in runs]
        launches[key] = launch
        return results

    yield in_one_launch
    for launch in launches.values():
        launch.close()


@pytest.fixture(scope="session")
def mistakes(in_one_launch: Callable[..., list[Any]]) -> Callable[..., list[Ended]]:
    """Runs of mpirun with mistakes, none of which may end in a traceback."""

    def mistakes(ranks: int, runs: Sequence[Sequence[object]], env: dict[str, str] | None = None) -> list[Ended]:
        results = in_one_launch(ranks, [["mpirun", *map(str, run)] for run in runs], env=env)
        ended = [Ended(*result) for result in results]
        assert not any("Traceback" in run.out + run.err for run in ended)
        return ended

    return mistakes


@pytest.fixture(scope="session")
def scripts(in_one_launch: Callable[..., list[Any]]) -> Callable[..., list[Ended]]:
    """Scripts, each a text behind PRELUDE and its arguments, that close their Engines and end with one exit code."""

    def scripts(ranks: int, runs: Sequence[Sequence[object]]) -> list[Ended]:
        requests = [["-c", PRELUDE + inspect.cleandoc(text), *map(str, words)] for text, *words in runs]
        return [Ended(*result) for result in in_one_launch(ranks, requests)]

    return scripts


@pytest.fixture(scope="session")
def execute(scripts: Callable[..., list[Ended]]) -> Callable[..., Ended]:
    """A script that should end with `code`, and, if they are given, with these lines on stdout and stderr."""

    def execute(
        ranks: int,
        text: str,
        *arguments: object,
        code: int = 0,
        out: list[str] | None = None,
        err: list[str] | None = None,
    ) -> Ended:
        (ended,) = scripts(ranks, [[text, *arguments]])
        assert ended.code == code, ended
        assert out is None or ended.out.splitlines() == out, ended
        assert err is None or ended.err.splitlines() == err, ended
        return ended

    return execute


@pytest.fixture(scope="session")
def several(in_one_launch: Callable[..., list[Any]]) -> Callable[..., list[tuple[int, str]]]:
    """Runs of mpirun: the exit code and the stdout of each."""

    def several(ranks: int, runs: Sequence[Sequence[object]], fresh: bool = False) -> list[tuple[int, str]]:
        ended = in_one_launch(ranks, [["mpirun", *endless(run)] for run in runs], fresh=fresh)
        return [(code, out) for code, out, _ in ended]

    return several


class Seen(NamedTuple):
    """The result of a run that programs/inspected_run.py executed."""

    code: int
    out: str
    weights: str  # a hash of all weights in the end, on all ranks

    @property
    def differences(self) -> dict[str, float]:
        """What --verify printed."""
        return differences(self.out)


@pytest.fixture(scope="session")
def inside(in_one_launch: Callable[..., list[Any]]) -> Callable[..., list[Seen]]:
    """Runs of mpirun, each an object as programs/inspected_run.py takes them."""

    def inside(ranks: int, runs: Sequence[dict[str, Any]]) -> list[Seen]:
        runs = [{**run, "arguments": endless(run["arguments"])} for run in runs]
        return [Seen(*result) for result in in_one_launch(ranks, runs)]

    return inside


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Runs `schedgen compile SCHEME OPTIONS` and returns the file.

    A scheme of several lines is the source of a file that defines w and n; a graph that is a dict is written to a file.
    """

    def compiled(scheme: str, **options: Any) -> Path:
        folder = tmp_path_factory.mktemp("compiled")
        if isinstance(options.get("graph"), dict):
            (folder / "graph").write_text(json.dumps(options["graph"]))
            options = {**options, "graph": folder / "graph"}
        if "\n" in scheme:
            (folder / "scheme.py").write_text(inspect.cleandoc(scheme))
            scheme = str(folder / "scheme.py")
        arguments = []
        for name, value in options.items():
            arguments += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        assert schedgen(["compile", scheme, *arguments, "-o", str(folder / "schedule.json")]) == 0
        return folder / "schedule.json"

    return compiled


@pytest.fixture(scope="session")
def traces() -> Path:
    """The folder of the golden schedules: 4 workers, 4 stages, 8 microbatches."""
    return ROOT / "traces"


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 kB of Python source."""
    data = b"".join(Path(module.__file__).read_bytes() for module in (argparse, inspect, typing))[:200_000]
    assert len(data) == 200_000
    file = tmp_path_factory.mktemp("text") / "text.py"
    file.write_bytes(data)
    return file


@pytest.fixture(scope="session")
def left_behind() -> Callable[[LaunchResult], list[int]]:
    """The processes of a launch that still run after a grace of 2 s for the kernel to reap them."""

    def left_behind(result: LaunchResult) -> list[int]:
        deadline = time.monotonic() + 2
        while (left := list(processes(result.marker))) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    return left_behind
