"""What a rank does, as text: from its words in shared memory and from what the kernel says of its process."""

from __future__ import annotations

import time
from typing import TypedDict

from mpirun.watchdog import BEAT, IN_SCRIPT, OTHERS, PHASE, PHASES, ROW, STEP, TRAINING, WAIT

ACTIVITIES = {"R": "computing", "D": "blocked in the kernel", "T": "stopped", "t": "stopped", "S": "asleep"}


class State(TypedDict):
    """A rank's state, as watchdogs send it to each other."""

    rank: int
    host: str
    at: str  # what it executes
    waits: str | None  # for what; None: for nothing
    process: str  # what its process does
    moved: float  # seconds since it last moved
    in_script: bool  # whether its script runs code of its own, between two calls


def kernel_state(pid: int) -> str | None:
    """The letter of a process's state, as the kernel says it; None if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            letter = file.read().rpartition(b") ")[2][:1].decode()
    except OSError:
        return None
    return None if letter in "ZXx" else letter


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
        at, waits = PHASES[phase], None
        if phase == TRAINING:
            at = f"step {self.words[STEP] + 1}"
            if 0 <= row < len(self.lines):
                at = f"{at}: {self._line(row)}"
        if wait == OTHERS or (wait >= 0 and wait == row):
            waits = "the other ranks"
        elif 0 <= wait < len(self.lines):
            waits = self._line(wait)
        letter = None if self.gone else kernel_state(self.pid)
        activity = "gone" if letter is None else ACTIVITIES.get(letter, "alive")
        moved = time.monotonic() - self.moved
        return {"rank": self.number, "host": host, "at": at, "waits": waits, "process": activity, "moved": moved,
                "in_script": bool(self.words[IN_SCRIPT])}  # fmt: skip


def in_a_line(state: State) -> str:
    """A rank's state in a line."""
    activity = "" if state["process"] == "gone" else f", {state['process']}"
    if state["waits"]:
        activity = f", waiting for {state['waits']}"
    return f"rank {state['rank']} on {state['host']}: {state['at']}{activity}"


def explain_hang(states: list[State]) -> str:
    """A sentence: the ranks that wait for no other, for which others may wait."""
    busy = [x for x in states if x["waits"] is None or x["process"] in ("stopped", "gone")]
    named = ", ".join(f"rank {x['rank']} on {x['host']} is {x['process']}" for x in busy)
    return named or "every rank waits for others"
