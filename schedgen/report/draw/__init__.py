"""Pictures of schedules: rows are workers, time runs to the right.

Here is what is drawn, computed once from a simulation or a measured run;
`terminal`, `figure` and `page` only say how. Nothing is measured in pixels here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from schedgen.analysis.lifetimes import SAVED
from schedgen.analysis.subject import Numbers
from schedgen.ir.instructions import COMPUTE, Ints, Op, Small
from schedgen.ir.program import Program
from schedgen.report.draw.colours import LOOKS
from schedgen.simulator.memory_plan import Bytes
from schedgen.simulator.memory_timeline import Held, held
from schedgen.simulator.simulate import Times
from schedgen.simulator.time_breakdown import COOL_DOWN, Idle, idle
from schedgen.simulator.timeline import Timeline

_LETTER = {Op.FWD: "F", Op.BWD: "B", Op.BWD_I: "I", Op.BWD_W: "W", Op.RECOMPUTE: "R", Op.STEP: "S"}
LOOK = {op: [look.letter for look in LOOKS].index(letter) for op, letter in _LETTER.items()}


class Bars(NamedTuple):
    """What is drawn as a bar, by row of the program: jobs, and STEPs that take time."""

    row: Numbers
    worker: Ints
    start: Times
    length: Times
    look: Small  # an index of colours.LOOKS
    stage: Ints
    mb: Ints  # -1: a STEP


class Gaps(NamedTuple):
    """When and why a worker stands still."""

    worker: Numbers
    start: Times
    end: Times
    share: Small  # an index of schedgen.simulator.time_breakdown.SHARES


class Scene(NamedTuple):
    """One walk through one schedule. Times begin at zero and are in seconds, or in units of the costs."""

    name: str  # what to call it
    file: str  # where its lines are
    program: Program
    walk: Timeline
    idle: Idle
    held: Held  # in bytes
    counted: Held  # in numbers of buffers
    seconds: bool  # whether times are seconds
    bars: Bars

    @property
    def makespan(self) -> float:
        return self.idle.makespan

    @property
    def latency(self) -> float:
        """When the last job ends."""
        jobs = self.bars.mb >= 0
        return float((self.bars.start + self.bars.length)[jobs].max())

    @property
    def sized(self) -> bool:
        """Whether the costs say how large things are; if not, what is held is counted in buffers."""
        return bool((self.held.taken > self.counted.taken).any())

    @property
    def looks(self) -> list[int]:
        """The kinds of bars that occur."""
        return [int(look) for look in np.unique(self.bars.look)]

    def gaps(self) -> Gaps:
        """All waits, and the time behind a worker's last instruction."""
        begin, until, start = self.walk.start - self.walk.wait, self.idle.until, self.walk.start
        ends = (self.walk.start + self.walk.length)[self.program.bounds[1:] - 1]
        ranks = np.arange(self.program.header.workers)
        worker = np.concatenate([self.program.rows.rank, self.program.rows.rank, ranks])
        first = np.concatenate([begin, until, ends])
        last = np.concatenate([until, start, np.full(len(ranks), self.makespan)])
        share = np.concatenate([self.idle.early, self.idle.late, np.full(len(ranks), COOL_DOWN, np.int8)])
        some = last > first
        return Gaps(worker[some], first[some], last[some], share[some])

    def activations(self) -> Held:
        """How many forwards are saved: what each row adds when it starts, and ends."""
        return Held(self.counted.taken[:, SAVED : SAVED + 1], self.counted.given[:, SAVED : SAVED + 1])

    def share(self) -> Times:
        """Of each worker's time, by `time_breakdown.SHARES`: shape (workers, shares), rows add up to 1."""
        share: Times = self.idle.time / self.idle.time.sum(axis=1, keepdims=True)
        return share

    def peak_activations(self) -> Numbers:
        """By worker: the most forwards at once whose backward is still to come."""
        peak = np.zeros(self.program.header.workers, np.int64)
        np.maximum.at(peak, self.program.rows.rank, self.activations().during[:, 0])
        return peak


def scene(name: str, file: str, program: Program, walk: Timeline, bytes: Bytes, seconds: bool) -> Scene:
    """What there is to draw of one walk; `walk` in microseconds if `seconds`."""
    unit = 1e-6 if seconds else 1.0
    begin = float((walk.start - walk.wait).min())
    arrival = unit * (np.maximum(walk.arrival, walk.start) - begin)
    walk = Timeline(unit * (walk.start - begin), unit * walk.length, unit * walk.wait, walk.cause, arrival)
    table = program.rows
    row = np.flatnonzero(np.isin(table.op, COMPUTE) | ((table.op == Op.STEP) & (walk.length > 0)))
    look = np.array([LOOK.get(op, -1) for op in Op], np.int8)[table.op[row]]
    times = walk.start[row], walk.length[row]
    bars = Bars(row, table.rank[row], *times, look, table.stage[row], table.mb[row])
    one = np.ones(program.header.stages, np.int64)
    counted = held(program, bytes._replace(activation=one, weight=one, partial=one, saved=one, half=one, apart=None))
    return Scene(name, file, program, walk, idle(program, walk), held(program, bytes), counted, seconds, bars)


def sizes(one: Scene) -> str:
    """Workers, stages and microbatches, in words."""
    header = one.program.header
    shards = (
        f" ({header.stages // header.tensor_parallel.degree} in {header.tensor_parallel.degree} shards each)"
        if header.tensor_parallel.degree > 1
        else ""
    )
    counted = (header.workers, "worker", "s"), (header.stages, "stage", "s"), (header.microbatches, "microbatch", "es")
    workers, stages, microbatches = (f"{n} {word}{ending if n != 1 else ''}" for n, word, ending in counted)
    return f"{workers}, {stages}{shards}, {microbatches}"


def title(one: Scene) -> str:
    """The scheme and its sizes."""
    return f"{one.program.header.scheme['name']}: {sizes(one)}"


def titles(scenes: Sequence[Scene]) -> str:
    """Of all scenes; sizes once if they are the same."""
    if len({sizes(one) for one in scenes}) > 1:
        return " and ".join(title(one) for one in scenes)
    names = dict.fromkeys(str(one.program.header.scheme["name"]) for one in scenes)
    return f"{' and '.join(names)}: {sizes(scenes[0])}"


def usual(scenes: Sequence[Scene]) -> str:
    """What colours say unless asked otherwise: the stage where a worker has several; numbers are the microbatch."""
    several = any(np.bincount(np.unique(_places(one)) // one.program.header.stages).max() > 1 for one in scenes)
    return "stage" if several else "microbatch"


def _places(one: Scene) -> Numbers:
    """Of all jobs: worker times stages plus stage."""
    jobs = one.bars.mb >= 0
    places: Numbers = one.bars.worker[jobs].astype(np.int64) * one.program.header.stages + one.bars.stage[jobs]
    return places


def numbered(scenes: Sequence[Scene], by: str) -> int:
    """How many microbatches or stages are told apart by colour: the most of any scene, so that colours agree."""
    return max(int(one.program.header.scheme["microbatches" if by == "microbatch" else "stages"]) for one in scenes)


def heading(one: Scene) -> str:
    """Its name, if that is not the scheme's, and its title."""
    return title(one) if one.name == one.program.header.scheme["name"] else f"{one.name}. {title(one)}"


def facts(one: Scene) -> str:
    peak = int(one.peak_activations().max())
    busy = one.share()[:, 0].mean()
    return f"latency {amount(one.latency, one.seconds)}, busy {busy:.1%}, peak {peak} activation{'s' * (peak != 1)}"


def amount(value: float, seconds: bool) -> str:
    """A time to read."""
    if not seconds:
        return f"{value:.4g}" if value < 1e4 else f"{value:.0f}"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size or unit == "µs":
            break
    return f"{value / size:.3g} {unit}"
