"""The guard: a process beside the ranks of a host, which says what a rank that died or hangs cannot say.

Ranks show in shared memory what they are doing (`mpirun.watch` starts the
guard and hands it that memory). A rank that ends before it is done, or a
whole job in which nothing has moved for the time limit, is explained in one
message, and all ranks are ended. Guards of other hosts report by TCP to the
one beside rank 0, which speaks for all; a host that cannot be reached any more
ends on both sides. MPI has no part in it, nor has any rank's interpreter.

A script with Python's own library only, so that it is there at once and stays
small. Its standard input is one line, the plan, and stays open as long as the
rank that started it lives.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import selectors
import signal
import socket
import sys
import time
from typing import Any

# What a rank shows: 64-bit words.
PHASE, STEP, ROW, WAIT, BEAT = range(5)
WORDS = 8
SETTING_UP, TRAINING, SAVING, VERIFYING, DONE, FAILED = range(6)
PHASES = ("setting up", "training", "saving a checkpoint", "verifying", "done", "failed")
# WAIT: the row of the transfer or sum that is waited for, or one of these.
NOTHING, OTHERS = -1, -2

TICK = 0.1  # seconds between two looks
REPORT = 1.0  # seconds between two reports to the first guard, and its answers
SET_UP = 300.0  # seconds without a move that the set-up may take, if the time limit is not longer
SILENCE = 60.0  # seconds after which a host that says nothing counts as lost, if the time limit is not shorter
LAST_WORDS = 5.0  # seconds that a rank which fails has to speak and to end the others
LAUNCHERS = ("mpiexec", "mpirun", "prterun", "orterun")
GRACE = 2.0  # seconds that the launcher has to end the other ranks when one is gone
STATES = {"R": "computing", "D": "blocked in the kernel", "T": "stopped", "t": "stopped", "S": "asleep", "": "gone"}

State = dict[str, Any]  # of a rank: rank, host, at, waits, peer, process, moved


def process_state(pid: int) -> str:
    """The kernel's letter for a process; empty for one that has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            letter = file.read().rpartition(b")")[2].split()[0].decode()
    except OSError:
        return ""
    return "" if letter in "ZXx" else letter


def launcher(pid: int) -> tuple[int, str] | None:
    """The nearest process above that is an mpiexec, with when it was started.

    With a host that is cut off it would wait for the end of its connection there.
    """
    for _ in range(16):
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
                name, _, fields = file.read().decode().partition("(")[2].rpartition(")")
        except OSError:
            return None
        if name.startswith(LAUNCHERS):
            return pid, fields.split()[19]
        pid = int(fields.split()[1])
    return None


class Rank:
    """A rank of this host."""

    def __init__(self, number: int, pid: int, first_line: int, lines: list[str], words: memoryview) -> None:
        """`lines`: its instructions; `first_line`: of the first of them in the schedule."""
        self.number, self.pid, self.first_line, self.lines, self.words = number, pid, first_line, lines, words
        self.seen: tuple[int, ...] = ()
        self.moved = time.monotonic()
        self.gone = False

    def look(self) -> None:
        seen = (self.words[PHASE], self.words[STEP], self.words[ROW], self.words[BEAT])
        if seen != self.seen:
            self.seen, self.moved = seen, time.monotonic()

    @property
    def ended_well(self) -> bool:
        return bool(self.words[PHASE] == DONE)

    def line(self, row: int) -> str:
        return f"line {self.first_line + row}: {self.lines[row]}"

    def state(self, host: str) -> State:
        """What it is doing, in words, and which rank it waits for (None: none, -1: all that are behind)."""
        phase, row, wait = self.words[PHASE], self.words[ROW], self.words[WAIT]
        at, waits, peer = PHASES[phase], None, None
        if phase == TRAINING:
            at = f"step {self.words[STEP] + 1}"
            if 0 <= row < len(self.lines):
                at = f"{at}: {self.line(row)}"
        if wait == OTHERS or (wait >= 0 and wait == row):
            waits, peer = "the other ranks", -1
        elif 0 <= wait < len(self.lines):
            instruction = json.loads(self.lines[wait])
            waits, peer = self.line(wait), instruction.get("from", instruction.get("to", -1))
        process = STATES.get("" if self.gone else process_state(self.pid), "alive")
        return {"rank": self.number, "host": host, "at": at, "waits": waits, "peer": peer, "process": process}


def position(state: State) -> str:
    """A rank's state in a line."""
    doing = "" if state["process"] == "gone" else f", {state['process']}"
    if state["waits"]:
        doing = f", waiting for {state['waits']}"
    return f"rank {state['rank']} on {state['host']}: {state['at']}{doing}"


def culprit(states: list[State]) -> str:
    """Which rank all others wait for in the end, or the circle in which they wait for each other."""
    by_rank = {state["rank"]: state for state in states}

    def next_of(rank: int) -> int | None:
        """The rank that a rank waits for; of a sum's the first that has not come to it."""
        peer: int | None = by_rank[rank]["peer"]
        if peer != -1:
            return peer
        late = [state["rank"] for state in states if state["peer"] != -1]
        return min(late, default=None)

    path = [min(by_rank)]
    stopped = [state["rank"] for state in states if state["process"] in ("stopped", "gone")]
    if stopped:  # a rank may wait and be stopped
        path = stopped[:1]
    else:
        while (peer := next_of(path[-1])) is not None:
            if peer in path:
                circle = [*path[path.index(peer) :], peer]
                return ", ".join(f"rank {a} waits for rank {b}" for a, b in itertools.pairwise(circle))
            if peer not in by_rank:
                return f"rank {path[-1]} waits for rank {peer}, whose host does not answer"
            path.append(peer)
    last = by_rank[path[-1]]
    if last["peer"] == -1:
        return "all ranks are in a sum that does not end"
    return f"rank {last['rank']} on {last['host']} is {last['process']}, and others wait for it"


class Link:
    """A connection to another guard: lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self.rest, self.out, self.heard = connection, b"", b"", time.monotonic()
        self.host, self.states = "", []  # type: str, list[State]
        self.trusted, self.open, self.left = False, True, False
        connection.setblocking(False)

    def say(self, **words: object) -> None:
        self.out += json.dumps(words).encode() + b"\n"
        with contextlib.suppress(OSError):  # full, or broken: `heard` will tell
            self.out = self.out[self.socket.send(self.out) :]

    def hear(self) -> list[dict[str, Any]]:
        """What has come since."""
        try:
            data = self.socket.recv(1 << 20)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.open = False
            return []
        self.heard = time.monotonic()
        *lines, self.rest = (self.rest + data).split(b"\n")
        try:
            found = [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError):
            found = [{}] if self.trusted else []
        self.open = self.trusted or (bool(found or len(self.rest) < 1000) and len(found) == len(lines))
        return found


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
            if not process_state(rank.pid):
                self.gone(rank)
        if self.ending is not None and time.monotonic() >= self.ending:
            for rank in self.ranks:
                with contextlib.suppress(OSError):
                    os.kill(rank.pid, signal.SIGKILL)
        self.stop = self.stop or all(rank.gone for rank in self.ranks)

    def compare(self) -> None:
        """With other hosts, and with the time limit."""
        now = time.monotonic()
        here = self.states()
        if now - self.reported > REPORT:
            self.reported = now
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
                if launcher(self.launcher[0]) != self.launcher:
                    break
                os.kill(self.launcher[0], signal.SIGTERM)


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


if __name__ == "__main__":
    main()
