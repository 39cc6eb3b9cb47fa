"""The guard's loop: it looks at the ranks of its host, and ends them where one has died or nothing moves.

A rank that ends before it is done, or a whole job in which nothing has moved
for the time limit, is explained in one message, and all ranks are ended.
Guards of other hosts report by TCP to the one beside rank 0, which speaks for
all; a host that cannot be reached any more ends on both sides. MPI has no part
in it, nor has any rank's interpreter.

Standard input is one line, the plan, and stays open as long as the rank that
started the guard lives.
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

from mpirun.watchdog import DONE, FAILED, PHASE, PHASES, SETTING_UP, WORDS
from mpirun.watchdog.link import Link
from mpirun.watchdog.state import Rank, State, culprit, launcher, position, process

TICK = 0.1  # seconds between two looks
REPORT = 1.0  # seconds between two reports to the other guards, and comparisons with the time limit
SET_UP = 300.0  # seconds without a move that the set-up may take, if the time limit is not longer
SILENCE = 60.0  # seconds after which a host that says nothing counts as lost, if the time limit is not shorter
LAST_WORDS = 5.0  # seconds that a rank which fails has to speak and to end the others
GRACE = 2.0  # seconds that the launcher has to end the other ranks when one is gone


class Guard:
    def __init__(self, plan: dict[str, Any]) -> None:
        self.host, self.first, self.token = plan["host"], plan["first"], plan["token"]
        self.limit: float = plan["timeout"]
        self.silence = max(3 * REPORT, min(self.limit, SILENCE))
        words = memoryview(mmap.mmap(plan["memory"], 0)).cast("q")
        self.ranks = [
            Rank(number, pid, first_line, lines, words[k * WORDS : (k + 1) * WORDS])
            for k, (number, pid, first_line, lines) in enumerate(plan["ranks"])
        ]
        self.selector = selectors.DefaultSelector()
        self.selector.register(sys.stdin.fileno(), selectors.EVENT_READ, "stdin")
        for rank in self.ranks:  # tells who ended first; where a kernel lacks it the next look finds out
            with contextlib.suppress(AttributeError, OSError):
                self.selector.register(os.pidfd_open(rank.pid), selectors.EVENT_READ, rank)
                rank.reported = True
        self.links: list[Link] = []
        self.server = None
        if plan["listen"] is not None:
            self.server = socket.socket(fileno=plan["listen"])
            self.selector.register(self.server, selectors.EVENT_READ, "server")
        elif plan["addresses"]:
            self.connect(plan["addresses"], plan["port"])
        self.reported = time.monotonic()
        self.ending: float | None = None  # when the ranks that are left are killed
        self.stop = self.said = self.cut_off = False
        self.launcher = launcher(os.getppid())

    # Between guards

    def connect(self, addresses: list[str], port: int) -> None:
        for address in addresses:
            with contextlib.suppress(OSError):
                self.adopt(Link(socket.create_connection((address, port), 3)))
                self.links[0].trusted = True
                self.links[0].say(token=self.token, host=self.host)
                return
        self.speak(f"the guard on {self.host} cannot reach the one beside rank 0: hangs are explained by host only")

    def adopt(self, link: Link) -> None:
        self.links.append(link)
        self.selector.register(link.socket, selectors.EVENT_READ, link)

    def close(self, link: Link) -> None:
        """A guard that goes without a word stays known: its silence will count."""
        self.selector.unregister(link.socket)
        link.socket.close()
        if link.left or not link.trusted:
            self.links.remove(link)

    def hear(self, link: Link) -> None:
        for words in link.hear():
            if not link.trusted:
                if words.get("token") != self.token:
                    self.close(link)
                    return
                link.trusted, link.host = True, words["host"]
            link.states = words.get("states", link.states)
            if words.get("bye"):
                link.left = True
            if "failed" in words:
                self.said = True
                self.end(LAST_WORDS)
            if "died" in words:
                self.death(words["died"])
            if "end" in words:
                self.said = True
                self.end(0 if words["end"] == "now" else GRACE)
        if not link.open:
            self.close(link)

    def tell(self, **words: object) -> None:
        for link in self.links:
            link.say(**words)

    # What may happen

    def speak(self, sentence: str) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"mpirun: {sentence}\n".encode())

    def death(self, state: State) -> None:
        """A rank ended before it was done."""
        if self.first or not self.links:
            if not self.said:
                self.said = True
                self.speak(f"{position(state)}: ended without a word: killed, perhaps for lack of memory")
            self.tell(end="soon")
        else:
            self.tell(died=state)
            self.said = True
        self.end(GRACE)

    def hang(self, sentence: str, states: list[State]) -> None:
        self.said = True
        self.speak("\n  ".join([sentence, *map(position, sorted(states, key=lambda state: int(state["rank"])))]))
        self.tell(end="now")
        self.end(0)

    def end(self, grace: float) -> None:
        """Kill the ranks of this host after so many seconds, if the launcher has not."""
        at = time.monotonic() + grace
        self.ending = at if self.ending is None else min(self.ending, at)

    def states(self) -> list[State]:
        now = time.monotonic()
        return [{**rank.state(self.host), "moved": now - rank.moved} for rank in self.ranks]

    # The loop

    def listen(self) -> None:
        """A rank that fails speaks itself, before it ends."""
        if not self.said and any(rank.words[PHASE] == FAILED for rank in self.ranks):
            self.said = True
            self.tell(failed=True)
            self.end(LAST_WORDS)

    def gone(self, rank: Rank) -> None:
        """A rank has ended."""
        if not rank.gone:
            rank.gone = True
            self.listen()
            if not rank.ended_well:
                self.death(rank.state(self.host))

    def look(self) -> None:
        """At the ranks of this host."""
        self.listen()
        for rank in self.ranks:
            rank.look()
            if not rank.reported and process(rank.pid) is None:
                self.gone(rank)
        if self.ending is not None and time.monotonic() >= self.ending:
            for rank in self.ranks:
                with contextlib.suppress(OSError):
                    os.kill(rank.pid, signal.SIGKILL)
        self.stop = self.stop or all(rank.gone for rank in self.ranks)

    def compare(self) -> None:
        """With other hosts, and with the time limit."""
        now = time.monotonic()
        if now - self.reported < REPORT:
            return
        self.reported = now
        here = self.states()
        self.tell(states=here)
        if self.said or self.ending is not None:
            return
        for link in list(self.links):
            if link.trusted and not link.left and now - link.heard > self.silence:
                self.cut_off = True
                what = f"{link.host or 'the host of rank 0'} has not answered for {self.silence:g} s"
                self.hang(f"{what}: it is down, or the network is; the other ranks are", here)
                return
        if self.links and not self.first:
            return  # the first guard decides
        everyone = here + [state for link in self.links for state in link.states]
        left = [state for state in everyone if state["at"] != PHASES[DONE]]
        limit = self.limit
        if any(state["at"] == PHASES[SETTING_UP] for state in left):
            limit = max(limit, SET_UP)
        if left and min(state["moved"] for state in left) > limit:
            self.hang(f"nothing has moved for {limit:g} s: {culprit(left)}", left)

    def loop(self) -> None:
        while not self.stop:
            for key, _ in self.selector.select(TICK):
                if key.data == "server":
                    assert self.server is not None
                    self.adopt(Link(self.server.accept()[0]))
                elif isinstance(key.data, Link):
                    self.hear(key.data)
                elif key.data == "stdin" and not os.read(sys.stdin.fileno(), 1):
                    self.selector.unregister(sys.stdin.fileno())
                    self.stop = self.ranks[0].ended_well
                elif isinstance(key.data, Rank):  # in the order in which they ended
                    self.selector.unregister(key.fileobj)
                    self.gone(key.data)
            self.look()
            self.compare()
        self.tell(bye=True)
        if self.cut_off and self.launcher is not None:
            os.close(2)  # MPICH's waits until nobody here can speak any more, and then for the other host
            for _ in range(5):
                time.sleep(1)
                now = process(self.launcher.pid)
                if now is None or now.started != self.launcher.started:
                    break
                os.kill(self.launcher.pid, signal.SIGTERM)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ends with its ranks, which may have something to save
    plan = b""
    while not plan.endswith(b"\n"):
        piece = os.read(sys.stdin.fileno(), 1 << 20)
        if not piece:
            return
        plan += piece
    Guard(json.loads(plan)).loop()
