"""What a picture of a schedule shows: a program and its timeline as bars, gaps and memory by worker.

Nothing is measured in pixels here; `terminal`, `figure` and `page` decide how a scene looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from schedgen.analysis import MemoryTimeline, analyse
from schedgen.ir.instructions import COMPUTE, LETTER, Op
from schedgen.ir.program import Program
from schedgen.report.draw.colours import LOOKS
from schedgen.simulator.buffer_sizes import BufferSizes
from schedgen.simulator.network import LinkUse
from schedgen.simulator.timeline import COOL_DOWN, TimeBreakdown, Timeline, time_breakdown
from schedgen.util.arrays import Ints, Numbers, Small, Times
from schedgen.util.errors import number_of

_LETTER = {**LETTER, Op.RECOMPUTE: "R", Op.STEP: "S"}
_INDEX = {look.letter: k for k, look in enumerate(LOOKS)}
LOOK_OF_OP = np.array([_INDEX[_LETTER[op]] if op in _LETTER else -1 for op in Op], np.int8)  # index of LOOKS; -1: none


class Bars(NamedTuple):
    """The bars, which are jobs and those STEPs that take time: arrays with one entry for each."""

    row: Numbers  # of the program
    worker: Ints
    start: Times
    length: Times
    look: Small  # an index of LOOKS
    stage: Ints
    mb: Ints  # -1: a STEP


class Gaps(NamedTuple):
    """When and why workers are idle: arrays with one entry for each gap."""

    worker: Numbers
    start: Times
    end: Times
    share: Small  # an index of schedgen.simulator.timeline.SHARES


class Scene(NamedTuple):
    """One timeline of one schedule. Times begin at zero and are in seconds, or in units of the costs."""

    name: str  # in headings
    file: str  # the schedule file that line numbers refer to
    program: Program
    timeline: Timeline
    breakdown: TimeBreakdown
    sizes: BufferSizes
    seconds: bool  # whether times are seconds
    bars: Bars
    links: LinkUse | None  # None: not shown

    @property
    def makespan(self) -> float:
        """From the first instruction's start to the last one's end."""
        return self.breakdown.makespan

    @property
    def latency(self) -> float:
        """When the last job ends."""
        jobs = self.bars.mb >= 0
        return float((self.bars.start + self.bars.length)[jobs].max())

    @property
    def sized(self) -> bool:
        """Whether the costs have sizes in bytes; without them, memory is counted in buffers."""
        lifetimes = analyse(self.program).lifetimes
        return bool((lifetimes.amounts(self.sizes.by_kind(self.program.header)) > 1).any())

    @property
    def looks(self) -> list[int]:
        """The indices of LOOKS that occur."""
        return [int(look) for look in np.unique(self.bars.look)]

    def gaps(self) -> Gaps:
        """All waits, and the time after a worker's last instruction."""
        start, until, bounds = self.timeline.start, self.breakdown.until, self.program.bounds
        ranks, listed = np.arange(self.program.header.workers), self.program.ranks_with_rows
        ends = np.zeros(len(ranks))
        ends[listed] = (start + self.timeline.length)[bounds[listed + 1] - 1]
        worker = np.concatenate([self.program.rows.rank, self.program.rows.rank, ranks])
        first = np.concatenate([start - self.timeline.wait, until, ends])
        last = np.concatenate([until, start, np.full(len(ranks), self.makespan)])
        share = np.concatenate([self.breakdown.early, self.breakdown.late, np.full(len(ranks), COOL_DOWN, np.int8)])
        some = last > first
        return Gaps(worker[some], first[some], last[some], share[some])

    def held(self, in_bytes: bool) -> MemoryTimeline:
        """Memory held, in bytes or buffers, without what owners hold throughout, empty slots and workspaces."""
        lives, sizes = analyse(self.program).lifetimes, self.sizes.by_kind(self.program.header)
        return lives.timeline(lives.amounts(sizes) if in_bytes else np.ones(len(lives.buffer), np.int64))

    def held_activations(self) -> MemoryTimeline:
        """The number of saved forwards held."""
        return analyse(self.program).lifetimes.saved()

    def shares(self) -> Times:
        """The parts of each worker's time, shape (workers, SHARES); rows add up to 1."""
        shares: Times = self.breakdown.time / self.breakdown.time.sum(axis=1, keepdims=True)
        return shares

    def peak_activations(self) -> Numbers:
        """By worker: the most forwards at once whose backward is still to come."""
        return analyse(self.program).memory.saved


def build_scene(
    name: str, file: str, program: Program, timeline: Timeline, sizes: BufferSizes, seconds: bool,
    links: LinkUse | None = None,
) -> Scene:  # fmt: skip
    """The scene of a checked program; with `seconds` its times are in microseconds, else in units of the costs."""
    unit = 1e-6 if seconds else 1.0
    begin = float((timeline.start - timeline.wait).min())
    start, length = unit * (timeline.start - begin), unit * timeline.length
    arrival = unit * (np.maximum(timeline.arrival, timeline.start) - begin)
    timeline = Timeline(start, length, unit * timeline.wait, timeline.cause, arrival)
    table = program.rows
    row = np.flatnonzero(np.isin(table.op, COMPUTE) | ((table.op == Op.STEP) & (length > 0)))
    look = LOOK_OF_OP[table.op[row]]
    bars = Bars(row, table.rank[row], start[row], length[row], look, table.stage[row], table.mb[row])
    if links is not None:
        links = links._replace(start=unit * (links.start - begin), length=unit * links.length)
    return Scene(name, file, program, timeline, time_breakdown(program, timeline), sizes, seconds, bars, links)


def size_text(scene: Scene) -> str:
    """Workers, stages and microbatches, as in "4 workers, 4 stages, 8 microbatches"."""
    header = scene.program.header
    replicas = header.scheme.get("replicas")
    groups = f" in {replicas} replicas" if isinstance(replicas, int) else ""
    degree = len(header.tensor_parallel.slices_of(0))
    slices = f" ({header.model_stages} in {degree} slices each)" if degree > 1 else ""
    counts = (header.workers, "worker"), (header.stages, "stage"), (header.microbatches, "microbatch")
    workers, stages, microbatches = (number_of(count, one) for count, one in counts)
    return f"{workers}{groups}, {stages}{slices}, {microbatches}"


def title(scene: Scene) -> str:
    """The scheme and its sizes."""
    return f"{scene.program.header.scheme['name']}: {size_text(scene)}"


def joint_title(scenes: Sequence[Scene]) -> str:
    """The title of several scenes; sizes appear only once if they are the same."""
    if len({size_text(scene) for scene in scenes}) > 1:
        return " and ".join(title(scene) for scene in scenes)
    names = dict.fromkeys(str(scene.program.header.scheme["name"]) for scene in scenes)
    return f"{' and '.join(names)}: {size_text(scenes[0])}"


def heading(scene: Scene) -> str:
    """The scene's title, after its name if that is not the scheme's."""
    is_scheme = scene.name == scene.program.header.scheme["name"]
    return title(scene) if is_scheme else f"{scene.name}. {title(scene)}"


def default_colouring(scenes: Sequence[Scene]) -> str:
    """What colours stand for unless a user chooses: "stage" if a worker has several stages, else "microbatch"."""
    for scene in scenes:
        jobs, stages = scene.bars.mb >= 0, scene.program.header.stages
        pairs = np.unique(scene.bars.worker[jobs].astype(np.int64) * stages + scene.bars.stage[jobs])
        if np.bincount(pairs // stages).max() > 1:
            return "stage"
    return "microbatch"


def colour_count(scenes: Sequence[Scene], by: str) -> int:
    """How many microbatches or stages have a colour: the most of any scene, so that colours agree."""
    key = "microbatches" if by == "microbatch" else "stages"
    return max(int(scene.program.header.scheme[key]) for scene in scenes)


def key_figures(scene: Scene) -> str:
    """Latency, mean busy share and peak activations, in words."""
    peak = number_of(int(scene.peak_activations().max()), "activation")
    busy = scene.shares()[:, 0].mean()
    latency = format_time(scene.latency, scene.seconds)
    return f"latency {latency}, busy {busy:.1%}, peak {peak}"


def format_time(value: float, seconds: bool) -> str:
    """A time for people to read, with its unit if it is in seconds."""
    if not seconds:
        return f"{value:.4g}" if value < 1e4 else f"{value:.0f}"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size or unit == "µs":
            break
    return f"{value / size:.3g} {unit}"
