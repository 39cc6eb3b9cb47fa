"""What a rank does, as text: from its words in shared memory and from what the kernel says of its process."""

from __future__ import annotations

import json
import time
from typing import NamedTuple, TypedDict

from mpirun.watchdog import BEAT, CALL, IN_SCRIPT, METHODS, OTHERS, PHASE, PHASES, ROW, STEP, TRAINING, WAIT

LAUNCHERS = ("mpiexec", "mpirun", "prterun", "orterun")
ACTIVITIES = {"R": "computing", "D": "blocked in the kernel", "T": "stopped", "t": "stopped", "S": "asleep"}


class State(TypedDict):
    """A rank's state, as watchdogs send it to each other."""

    rank: int
    host: str
    at: str  # what it executes
    waits: str | None  # for what; None: for nothing
    peer: int | None  # the rank that it waits for; None: for none, -1: for all that have not come yet
    process: str  # what its process does
    moved: float  # seconds since it last moved
    calls: int  # how many methods of the Engine its script has called
    call: str  # the last one
    in_script: bool  # whether that has returned


class OsProcess(NamedTuple):
    """What the kernel says of a process."""

    pid: int
    name: str
    letter: str  # of its state
    parent: int
    started: int  # in clock ticks since the boot: with the pid it tells processes apart


def os_process(pid: int) -> OsProcess | None:
    """What the kernel says of a process; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            name, _, rest = file.read().decode(errors="replace").partition("(")[2].rpartition(")")
    except OSError:
        return None
    fields = rest.split()
    return None if fields[0] in "ZXx" else OsProcess(pid, name, fields[0], int(fields[1]), int(fields[19]))


def launcher(pid: int) -> OsProcess | None:
    """The launcher (mpiexec) nearest above a process, or the process itself if it is one; None if there is none."""
    process = os_process(pid)
    for _ in range(16):
        if process is None or process.name.startswith(LAUNCHERS):
            return process
        process = os_process(process.parent)
    return None


class Rank:
    """A rank of this host."""

    def __init__(self, number: int, pid: int, first_line: int, lines: list[str], words: memoryview) -> None:
        """`lines`: its instructions; `first_line`: of the first one in the schedule; `words`: those that it shows."""
        self.number, self.pid, self.first_line, self.lines, self.words = number, pid, first_line, lines, words
        self.seen: tuple[int, ...] = ()
        self.moved = time.monotonic()
        self.gone = False
        self.reported = False  # whether the kernel reports its end, in the order of ends; a look finds ranks by number

    def look(self) -> None:
        """Record the time if the rank has moved: if its words have changed."""
        seen = tuple(self.words[word] for word in (PHASE, STEP, ROW, BEAT, IN_SCRIPT))
        if seen != self.seen:
            self.seen, self.moved = seen, time.monotonic()

    def _line(self, row: int) -> str:
        return f"line {self.first_line + row}: {self.lines[row]}"

    def state(self, host: str) -> State:
        """What the rank does now; `host`: the name of this host."""
        phase, row, wait = self.words[PHASE], self.words[ROW], self.words[WAIT]
        at, waits, peer = PHASES[phase], None, None
        if phase == TRAINING:
            at = f"step {self.words[STEP] + 1}"
            if 0 <= row < len(self.lines):
                at = f"{at}: {self._line(row)}"
        if wait == OTHERS or (wait >= 0 and wait == row):
            waits, peer = "the other ranks", -1
        elif 0 <= wait < len(self.lines):
            instruction = json.loads(self.lines[wait])
            waits, peer = self._line(wait), instruction.get("from", instruction.get("to", -1))
        process = None if self.gone else os_process(self.pid)
        activity = "gone" if process is None else ACTIVITIES.get(process.letter, "alive")
        moved = time.monotonic() - self.moved
        calls, method = divmod(self.words[CALL], len(METHODS))
        return {"rank": self.number, "host": host, "at": at, "waits": waits, "peer": peer, "process": activity,
                "moved": moved, "calls": calls, "call": METHODS[method].removeprefix("begin_").removeprefix("end_"),
                "in_script": bool(self.words[IN_SCRIPT])}  # fmt: skip


def in_a_line(state: State) -> str:
    """A rank's state in a line."""
    activity = "" if state["process"] == "gone" else f", {state['process']}"
    if state["waits"]:
        activity = f", waiting for {state['waits']}"
    return f"rank {state['rank']} on {state['host']}: {state['at']}{activity}"
