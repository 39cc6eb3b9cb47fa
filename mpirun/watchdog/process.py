"""The watchdog's process: looks at the ranks of its host, and ends them if one has died or nothing moves.

1. A rank that ends before it is done, ranks whose scripts call different methods, or a whole job in which nothing has
   moved for the time limit, is explained in one message, and all ranks are ended.
2. Watchdogs of other hosts report to the one beside rank 0, which speaks for all. If a host is silent for too long, the
   watchdogs on both sides end their ranks.
3. Neither MPI nor the interpreter of any rank takes part in this.

Standard input is one line, the plan that `rank_side` makes. It stays open while the rank that started this is alive.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import selectors
import signal
import socket
import sys
import time
from typing import Any

from mpirun.watchdog import DONE, FAILED, NOTHING, PHASE, PHASES, SETTING_UP, TRYING, WAIT, WORDS
from mpirun.watchdog.hang_report import Rank, State, different_calls, explain_hang, in_a_line, kernel_state
from mpirun.watchdog.hosts import SILENCE, Hosts, Link

TICK = 0.1  # seconds between two looks
REPORT = 1.0  # seconds between two reports to the other watchdogs, and comparisons with the time limit
SET_UP = 300.0  # seconds without a move that the set-up may take, if the time limit is not longer
LAST_WORDS = 5.0  # seconds that a failing rank has to report why and to end the others
GRACE = 2.0  # seconds that the launcher has to end the other ranks when one is gone
FOLLOWS = 1.0  # seconds within which a rank that has died is gone after those that the launcher has ended for it
DIED = "ended without a word: killed, perhaps by SIGTERM or for lack of memory"
DIED_AT = {PHASES[TRYING]: "MPI died on GPU memory: take gpu messages host"}


class WatchdogProcess:
    """The watchdog of one host."""

    def __init__(self, plan: dict[str, Any]) -> None:
        """`plan`: as `rank_side.Watchdog` writes it."""
        self.host, self.first = plan["host"], plan["first"]
        self.limit: float = plan["timeout"]
        self.silence = max(3 * REPORT, min(self.limit, SILENCE))
        words = memoryview(mmap.mmap(plan["memory"], 0)).cast("q")
        self.ranks = [
            Rank(number, pid, first_line, lines, words[k * WORDS : (k + 1) * WORDS])
            for k, (number, pid, first_line, lines) in enumerate(plan["ranks"])
        ]
        self.selector = selectors.DefaultSelector()
        self.selector.register(sys.stdin.fileno(), selectors.EVENT_READ, "stdin")
        for rank in self.ranks:  # tells which rank ended first; without pidfds the next look finds the ended ranks
            with contextlib.suppress(AttributeError, OSError):
                self.selector.register(os.pidfd_open(rank.pid), selectors.EVENT_READ, rank)
                rank.reported = True
        self.hosts = Hosts(self.selector, plan["token"])
        self.server = None
        if plan["listen"] is not None:
            self.server = socket.socket(fileno=plan["listen"])
            self.server.setblocking(False)
            self.selector.register(self.server, selectors.EVENT_READ, "server")
        elif plan["address"]:
            if not self.hosts.connect(plan["address"], plan["port"]):
                alone = "cannot reach the one beside rank 0: hangs are explained host by host"
                _speak(f"the watchdog on {self.host} {alone}")
            self._report()
        self.compared = time.monotonic()
        self.ending: float | None = None  # when the ranks that are left are killed
        self.stop = self.spoken = False

    def run(self) -> None:
        """Watch until all ranks of this host have ended."""
        while not self.stop:
            for key, _ in self.selector.select(TICK):
                if key.data == "server":
                    assert self.server is not None
                    try:
                        self.hosts.add(self.server.accept()[0])
                    except OSError:  # the peer is gone, or too many files are open: it still waits at the next look
                        time.sleep(TICK)
                elif isinstance(key.data, Link):
                    self._receive(key.data)
                elif key.data == "stdin" and not os.read(sys.stdin.fileno(), 1):
                    self.selector.unregister(sys.stdin.fileno())
                    self.stop = self.ranks[0].words[PHASE] == DONE
                elif isinstance(key.data, Rank):  # in the order in which they ended
                    self.selector.unregister(key.fileobj)
                    self._rank_ended(key.data)
            self._look()
            if time.monotonic() - self.compared >= REPORT:
                self._compare()
        self.hosts.send(bye=True)

    def _receive(self, link: Link) -> None:
        for message in self.hosts.receive(link):
            if "failed" in message:
                self.spoken = True
                self._end_ranks(LAST_WORDS)
            if "died" in message:
                self._rank_died(message["died"])
            if "end" in message:
                self.spoken = True
                self._end_ranks(0 if message["end"] == "now" else GRACE)

    def _look(self) -> None:
        self._hear_failures()
        for rank in self.ranks:
            rank.look()
            if not rank.reported and kernel_state(rank.pid) is None:
                self._rank_ended(rank)
        if self.ending is not None and time.monotonic() >= self.ending:
            for rank in self.ranks:
                if not rank.gone:  # else another process may have its pid
                    with contextlib.suppress(OSError):
                        os.kill(rank.pid, signal.SIGKILL)
        self.stop = self.stop or all(rank.gone for rank in self.ranks)

    def _hear_failures(self) -> None:
        """End all ranks if one fails; that rank itself reports why before it ends, so no watchdog speaks."""
        if not self.spoken and any(rank.words[PHASE] == FAILED for rank in self.ranks):
            self.spoken = True
            self.hosts.send(failed=True)
            self._end_ranks(LAST_WORDS)

    def _rank_ended(self, rank: Rank) -> None:
        if not rank.gone:
            rank.gone = True
            self._hear_failures()
            if rank.words[PHASE] != DONE:
                self._rank_died(self._cause(rank).state(self.host))

    def _cause(self, rank: Rank) -> Rank:
        """The rank that died by itself: the launcher ends those that wait for it, and they may be gone sooner."""
        until = time.monotonic() + (0 if self.spoken or rank.words[WAIT] == NOTHING else FOLLOWS)
        while time.monotonic() < until:
            for other in self.ranks:
                if other.words[WAIT] == NOTHING and other.words[PHASE] != DONE and kernel_state(other.pid) is None:
                    return other
            time.sleep(TICK)
        return rank

    def _rank_died(self, state: State) -> None:
        """A rank ended before it was done: the first host's watchdog says so, and all ranks are ended."""
        if self.first or not self.hosts.links:
            if not self.spoken:
                self.spoken = True
                _speak(f"{in_a_line(state)}: {DIED_AT.get(state['at'], DIED)}")
            self.hosts.send(end="soon")
        else:
            self.hosts.send(died=state)
            self.spoken = True
        self._end_ranks(GRACE)

    def _report(self) -> list[State]:
        """Send the states of this host's ranks to the other hosts; returns them."""
        states = [rank.state(self.host) for rank in self.ranks]
        self.hosts.send(states=states)
        return states

    def _compare(self) -> None:
        """Report to the other hosts; end the job if one is silent, scripts call different methods, or nothing moves."""
        self.compared = time.monotonic()
        here = self._report()
        if self.spoken or self.ending is not None:
            return
        if (lost := self.hosts.silent(self.silence)) is not None:
            reason = f"{lost} has not answered for {self.silence:g} s"
            self._end_job(f"{reason}: it is down, or the network is; the other ranks are", here)
            return
        if self.hosts.links and not self.first:
            return  # the first host's watchdog decides
        left = [state for state in here + self.hosts.states() if state["at"] != PHASES[DONE]]
        if (difference := different_calls(left)) is not None:
            self._end_job(difference, left)
            return
        limit = self.limit
        if any(state["at"] == PHASES[SETTING_UP] for state in left):
            limit = max(limit, SET_UP)
        if all(state["in_script"] for state in left):
            return  # nobody waits in this run: ranks may be in another one, or wait for somebody at a keyboard
        if left and min(state["moved"] for state in left) > limit:
            self._end_job(f"nothing has moved for {limit:g} s: {explain_hang(left)}", left)

    def _end_job(self, reason: str, states: list[State]) -> None:
        self.spoken = True
        _speak("\n  ".join([reason, *map(in_a_line, sorted(states, key=lambda state: state["rank"]))]))
        self.hosts.send(end="now")
        self._end_ranks(0)

    def _end_ranks(self, grace: float) -> None:
        """Kill the ranks of this host after `grace` seconds, unless the launcher has ended them by then."""
        at = time.monotonic() + grace
        self.ending = at if self.ending is None else min(self.ending, at)


def _speak(sentence: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"mpirun: {sentence}\n".encode())


def main() -> None:
    """Read the plan and watch. Signals that end the ranks of a host do not end this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ends with its ranks, which may have something to save
    plan = sys.stdin.buffer.readline()
    if plan.endswith(b"\n"):
        WatchdogProcess(json.loads(plan)).run()
