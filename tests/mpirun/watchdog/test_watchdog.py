"""The watchdog process of a host's ranks: which rank it names, and how the watchdogs of several hosts agree.

Hosts are processes here, and their ranks are processes that sleep: a watchdog learns what they do from memory alone.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from mpirun.watchdog import FAILED, IN_SCRIPT, NOTHING, PHASE, ROW, STEP, TRAINING, WAIT, WORDS
from mpirun.watchdog.hang_report import explain_hang
from mpirun.watchdog.process import REPORT
from mpirun.watchdog.rank_side import COMMAND

LINES = [
    '{"op": "RECV", "buf": "x.0.0", "from": 0}',
    '{"op": "FWD", "stage": 1, "mb": 0}',
    '{"op": "NORM", "group": 0}',
]


def state(rank: int, waits: str | None, process: str = "asleep") -> dict[str, object]:
    return {"rank": rank, "host": "h", "at": "", "waits": waits, "process": process}


@pytest.mark.parametrize(
    ("states", "sentence"),
    [
        # 0 waits for 1, and 1 computes for ever
        ([state(0, "x"), state(1, None, "computing")], "rank 1 on h is computing"),
        ([state(0, "the other ranks"), state(1, "x")], "every rank waits for others"),
        ([state(0, None), state(1, None, "computing")], "rank 0 on h is asleep, rank 1 on h is computing"),
        # one that is stopped is the reason even while it waits
        ([state(0, "x"), state(1, "x", "stopped")], "rank 1 on h is stopped"),
    ],
)
def test_the_reason_of_a_hang(states, sentence):
    assert explain_hang(states) == sentence


class Host:
    """A watchdog, and ranks that do nothing."""

    def __init__(self, name: str, numbers: list[int], limit: float, server: socket.socket | None, port: int) -> None:
        self.port = port
        self.ranks = [subprocess.Popen(["sleep", "1000"]) for _ in numbers]
        with tempfile.TemporaryFile() as file:
            file.truncate(len(numbers) * WORDS * 8)
            self.words = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
            plan = {
                "host": name,
                "first": 0 in numbers,
                "timeout": limit,
                "memory": file.fileno(),
                "listen": server.fileno() if server else None,
                "address": "127.0.0.1" if port else "",
                "port": port,
                "token": "t",
                "ranks": [(n, one.pid, 10, LINES) for n, one in zip(numbers, self.ranks, strict=True)],
            }
            for k in range(len(numbers)):
                self.show(k, TRAINING, 4, 1, NOTHING)
            self.watchdog = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[file.fileno(), *([server.fileno()] if server else [])],
                text=True,
            )
            self.watchdog.stdin.write(json.dumps(plan) + "\n")
            self.watchdog.stdin.flush()

    def show(self, k: int, phase: int, step: int, row: int, wait: int) -> None:
        words = self.words[k * WORDS : (k + 1) * WORDS]
        words[PHASE], words[STEP], words[ROW], words[WAIT] = phase, step, row, wait

    def ended(self, within: float) -> str:
        """What the watchdog said, once it and its ranks have ended."""
        deadline = time.monotonic() + within
        for one in self.ranks:
            one.wait(deadline - time.monotonic())
        self.watchdog.stdin.close()
        self.watchdog.wait(deadline - time.monotonic())
        return self.watchdog.stderr.read()

    def kill(self) -> None:
        for one in (*self.ranks, self.watchdog):
            one.kill()
            one.wait()
        with contextlib.suppress(BrokenPipeError):
            self.watchdog.stdin.close()
        self.watchdog.stderr.close()


class Hosts:
    """Makes two hosts with two ranks each: `hosts(limit)`, the seconds for which nothing may move."""

    def __init__(self) -> None:
        """None yet."""
        self.made: list[Host] = []

    def __call__(self, limit: float) -> list[Host]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            self.made.append(Host("a", [0, 1], limit, server, 0))
            self.made.append(Host("b", [2, 3], limit, None, port))
        time.sleep(2 * REPORT)  # until they know each other
        return self.made


Scenario = Callable[[Hosts], None]
SCENARIOS: dict[str, Scenario] = {}


def scenario(test: Scenario) -> Scenario:
    """A test that mostly waits: `found` executes five of them at once, and this one ends as it did there."""
    SCENARIOS[test.__name__] = test

    def ends_as_it_did(found: dict[str, Future[None]], request: pytest.FixtureRequest) -> None:
        found[request.node.name].result()

    ends_as_it_did.__name__, ends_as_it_did.__doc__ = test.__name__, test.__doc__
    return ends_as_it_did


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[None]]]:
    """By name, how the scenarios that are selected end, each with hosts of its own."""

    def execute(item: pytest.Function) -> None:
        hosts = Hosts()
        try:
            SCENARIOS[item.name](hosts)
        finally:
            for one in hosts.made:
                one.kill()

    selected = [item for item in request.session.items if item.path == request.path and "found" in item.fixturenames]
    with ThreadPoolExecutor(5) as pool:  # with more, a limit may pass while processes start
        yield {item.name: pool.submit(execute, item) for item in selected}


@scenario
def test_a_hang_is_explained_for_all_hosts_by_the_first(hosts):
    a, b = hosts(limit=4)
    a.show(0, TRAINING, 4, 2, 2)
    b.show(1, TRAINING, 4, 1, 0)
    said = a.ended(20).splitlines()
    assert said == [
        "mpirun: nothing has moved for 4 s: rank 1 on a is asleep, rank 2 on b is asleep",
        '  rank 0 on a: step 5: line 12: {"op": "NORM", "group": 0}, waiting for the other ranks',
        '  rank 1 on a: step 5: line 11: {"op": "FWD", "stage": 1, "mb": 0}, asleep',
        '  rank 2 on b: step 5: line 11: {"op": "FWD", "stage": 1, "mb": 0}, asleep',
        '  rank 3 on b: step 5: line 11: {"op": "FWD", "stage": 1, "mb": 0}, waiting for line 10: '
        '{"op": "RECV", "buf": "x.0.0", "from": 0}',
    ]
    assert b.ended(10) == ""


@scenario
def test_as_long_as_one_rank_anywhere_moves_it_is_no_hang(hosts):
    a, b = hosts(limit=2)
    for step in range(25):
        b.show(0, TRAINING, step, 1, NOTHING)
        time.sleep(0.1)
    assert a.watchdog.poll() is None and b.watchdog.poll() is None
    assert a.ended(20).startswith("mpirun: nothing has moved for 2 s: ")


@scenario
def test_a_rank_that_dies_is_explained_by_the_first_host_and_the_others_are_ended(hosts):
    a, b = hosts(limit=100)
    b.show(0, TRAINING, 4, 1, 0)
    b.ranks[0].kill()
    expected = (
        'mpirun: rank 2 on b: step 5: line 11: {"op": "FWD", "stage": 1, "mb": 0}, waiting for line 10: '
        '{"op": "RECV", "buf": "x.0.0", "from": 0}: ended without a word: '
        "killed, perhaps by SIGTERM or for lack of memory\n"
    )
    assert (a.ended(10), b.ended(10)) == (expected, "")


@scenario
def test_a_rank_that_speaks_itself_is_not_spoken_for(hosts):
    a, b = hosts(limit=100)
    b.show(1, FAILED, 4, 1, NOTHING)
    time.sleep(0.3)
    b.ranks[1].kill()
    a.ranks[0].kill()
    assert (a.ended(10), b.ended(10)) == ("", "")


@scenario
def test_a_host_that_cannot_be_reached_ends_the_run_on_both_sides(hosts):
    """Emulated by a stopped watchdog, which answers as little as one behind a cut cable."""
    a, b = hosts(limit=3)
    b.watchdog.send_signal(signal.SIGSTOP)
    for k in (0, 1):  # a goes on meanwhile
        a.show(k, TRAINING, 9, 1, NOTHING)
    said = a.ended(20)
    assert said.splitlines()[0].endswith(
        "b has not answered for 3 s: it is down, or the network is; the other ranks are"
    )
    assert [line.split(":")[0] for line in said.splitlines()[1:]] == ["  rank 0 on a", "  rank 1 on a"]
    b.watchdog.send_signal(signal.SIGCONT)
    b.ended(20)


@scenario
def test_strangers_and_rubbish_do_no_harm(hosts):
    a, b = hosts(limit=100)
    for rubbish in (b"\x00\xff\n", b'wrong\n{"end": "now"}\n', b'{"end": "now"}\n', b"x" * 100_000):
        with socket.create_connection(("127.0.0.1", b.port), 3) as stranger:
            stranger.sendall(rubbish)
            time.sleep(0.2)
    assert all(one.poll() is None for one in (a.watchdog, b.watchdog, *a.ranks, *b.ranks))


@scenario
def test_all_ranks_may_do_something_else_between_two_calls(hosts):
    """As in a notebook, or with another Engine; but while a rank is in a call, the time limit holds."""
    for ranks in ([0], [0, 1]):
        with socket.create_server(("127.0.0.1", 0)) as server:
            hosts.made.append(Host("a", ranks, 1, server, 0))
        for rank in ranks:
            hosts.made[-1].words[rank * WORDS + IN_SCRIPT] = True
    time.sleep(3)
    for host in hosts.made:
        with pytest.raises(subprocess.TimeoutExpired):
            host.ended(0)
    for host in hosts.made:
        host.words[IN_SCRIPT] = False
    for host in hosts.made:
        assert "nothing has moved for 1 s: rank 0 on a is asleep" in host.ended(10)
