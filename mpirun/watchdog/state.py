"""What ranks do, in words, and which of them the others wait for."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any, NamedTuple

from mpirun.watchdog import BEAT, DONE, OTHERS, PHASE, PHASES, ROW, STEP, TRAINING, WAIT

LAUNCHERS = ("mpiexec", "mpirun", "prterun", "orterun")
STATES = {"R": "computing", "D": "blocked in the kernel", "T": "stopped", "t": "stopped", "S": "asleep"}

State = dict[str, Any]  # of a rank: rank, host, at, waits, peer, process, moved


class Process(NamedTuple):
    """What the kernel says of a process."""

    pid: int
    name: str
    letter: str  # of its state
    parent: int
    started: int  # in clock ticks since the boot: with the pid it tells processes apart


def process(pid: int) -> Process | None:
    """None for one that has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            name, _, rest = file.read().decode(errors="replace").partition("(")[2].rpartition(")")
    except OSError:
        return None
    fields = rest.split()
    return None if fields[0] in "ZXx" else Process(pid, name, fields[0], int(fields[1]), int(fields[19]))


def launcher(pid: int) -> Process | None:
    """The nearest process above that is an mpiexec."""
    found = process(pid)
    for _ in range(16):
        if found is None or found.name.startswith(LAUNCHERS):
            return found
        found = process(found.parent)
    return None


class Rank:
    """A rank of this host."""

    def __init__(self, number: int, pid: int, first_line: int, lines: list[str], words: memoryview) -> None:
        """`lines`: its instructions; `first_line`: of the first of them in the schedule."""
        self.number, self.pid, self.first_line, self.lines, self.words = number, pid, first_line, lines, words
        self.seen: tuple[int, ...] = ()
        self.moved = time.monotonic()
        self.gone = False
        self.reported = False  # by the kernel, when it ends: a look finds ranks in the order of their numbers

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
        found = None if self.gone else process(self.pid)
        doing = "gone" if found is None else STATES.get(found.letter, "alive")
        return {"rank": self.number, "host": host, "at": at, "waits": waits, "peer": peer, "process": doing}


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
