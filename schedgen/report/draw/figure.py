"""A schedule as SVG or PNG, by matplotlib: bars, what is held below them, shares of time on the right.

The same scene gives the same SVG. Large schedules are drawn as pixels inside it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from schedgen.analysis.subject import Numbers
from schedgen.ir.instructions import Kind, Op
from schedgen.report.draw import Scene, amount, facts, heading, numbered
from schedgen.report.draw.colours import HELD, INK, LOOKS, PAPER, SHARE_COLOURS, TRACK, TRANSFER_COLOURS, colours
from schedgen.simulator.time_breakdown import SHARES
from schedgen.util.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NARROWEST, WIDEST, LEFT, RIGHT = 9.0, 14.0, 0.42, 1.70  # inches: of the picture, and of its margins
DPI, TALLEST = 200, 100.0  # pixels an inch; inches
MOST_VECTORS = 6000  # bars; more of them are drawn as pixels
FONT, LABEL, SMALL, LARGE = "DejaVu Sans", 6.5, 7.0, 9.0  # points
LINE = 0.17  # inches: of the legends
_HATCH = {"": "", "/": "/////", "\\": "\\\\\\\\\\", ".": "....."}
HATCH = 0.35  # opacity
BAR, STRIP = 0.62, 0.22  # of a row's height: bars, and what is held


def figure(
    scenes: Sequence[Scene], out: BinaryIO, form: str, by: str, transfers: Collection[str], *, bare: bool = False
) -> None:
    """Write the picture as `form`, svg or png; `by`: microbatch or stage.

    `transfers`: kinds of messages to draw; `bare`: without titles and legends.
    """
    with _style():
        from matplotlib.figure import Figure

        span = max(scene.makespan for scene in scenes)
        rows, width = [_row(scene) for scene in scenes], _width(scenes, span)
        wide = (width - LEFT - RIGHT) * 72 / span  # points of a unit of time
        labels = [_labels(scene, row, wide) for scene, row in zip(scenes, rows, strict=True)]
        above, below = ([], []) if bare else _legends(scenes, by, transfers, any(labels), width)
        heights = [row * scene.program.header.workers for row, scene in zip(rows, scenes, strict=True)]
        top, bottom, between = 0.45 + LINE * len(above), 0.39 + LINE * len(below), 0.42  # inches
        if bare:
            top, bottom = 0.2, 0.22
        whole = sum(heights) + top + bottom + between * (len(scenes) - 1)
        drawing = Figure(figsize=(width, whole))
        at = whole - top
        for scene, height, said in zip(scenes, heights, labels, strict=True):
            box = (LEFT / width, (at - height) / whole, (width - LEFT - RIGHT) / width, height / whole)
            axes = drawing.add_axes(box)
            _bars(axes, scene, by, numbered(scenes, by), span, wide, said)
            _transfers(axes, scene, transfers)
            _axis(axes, scene, captioned=scene is scenes[-1] and not bare)
            if not bare:
                axes.set_title(heading(scene), size=LARGE, loc="left", pad=5, weight="bold")
                axes.set_title(facts(scene), size=SMALL, loc="right", pad=5)
            side = drawing.add_axes(((width - 1.55) / width, box[1], 1.05 / width, box[3]))
            _shares(side, scene)
            at -= height + between
        _legend(drawing, above, whole - 0.16)
        _legend(drawing, below, LINE * len(below) - 0.04)
        _save(drawing, out, form)


def legend(scenes: Sequence[Scene], out: BinaryIO, by: str, transfers: Collection[str]) -> None:
    """What `figure` would say of all these, as an SVG of its own."""
    with _style():
        from matplotlib.figure import Figure

        above, below = _legends(scenes, by, transfers, True, NARROWEST)
        lines = [*above, *below]
        drawing = Figure(figsize=(NARROWEST, LINE * len(lines)))
        _legend(drawing, lines, LINE * (len(lines) - 0.5))
        _save(drawing, out, "svg")


@contextlib.contextmanager
def _style() -> Iterator[None]:
    """How matplotlib draws within it; UsageError where there is none."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError("SVG and PNG need matplotlib: pip install 'schedgen[draw]'") from None
    style: Any = {
        "svg.hashsalt": "schedgen",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.sans-serif": [FONT],
        "text.parse_math": False,
        "font.size": SMALL,
        "text.color": INK,
        "axes.labelcolor": INK,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "hatch.linewidth": 0.8,
        "axes.linewidth": 0.5,
    }
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a file's name may have letters that the font lacks
        yield


def _save(drawing: Figure, out: BinaryIO, form: str) -> None:
    metadata = {"Date": None, "Creator": None} if form == "svg" else {"Software": None}
    drawing.savefig(out, format=form, dpi=DPI, metadata=metadata, facecolor=PAPER)


def _width(scenes: Sequence[Scene], span: float) -> float:
    """Inches of the picture: so many that most jobs have room for letter and number, within bounds."""
    shortest = min(float(np.median(scene.bars.length)) for scene in scenes)
    longest = max(text_width(f"B{int(scene.bars.mb.max())}", LABEL) for scene in scenes)
    return min(max(LEFT + RIGHT + span / shortest * (longest + 2) / 72, NARROWEST), WIDEST)


@cache
def text_width(text: str, size: float) -> float:
    """In points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    outline = TextPath((0, 0), text, size=size, prop=FontProperties(family=FONT), usetex=False)
    return float(outline.get_extents().width)


def _labels(scene: Scene, row: float, wide: float) -> list[tuple[int, str]]:
    """Bars that have room for a label, and that: letter and microbatch, or one of them; `row`: inches of a worker."""
    if row * 72 * BAR <= LABEL:
        return []
    bars, found = scene.bars, []
    for k in np.flatnonzero(bars.length * wide > 0.85 * LABEL).tolist():
        letter, number = LOOKS[bars.look[k]].letter, str(bars.mb[k])
        texts = (letter + number, number) if bars.mb[k] >= 0 else (letter,)
        fits = [text for text in texts if text_width(text, LABEL) + 1 < bars.length[k] * wide]
        found += [(k, text) for text in fits[:1]]
    return found


def _row(scene: Scene) -> float:
    """Inches that a worker takes."""
    workers = scene.program.header.workers
    return min(max(5.0 / workers, 0.075), 0.36, TALLEST / workers)


def _bars(
    axes: Axes, scene: Scene, by: str, count: int, span: float, wide: float, labels: Sequence[tuple[int, str]]
) -> None:
    from matplotlib.collections import PolyCollection

    header, bars = scene.program.header, scene.bars
    pixels = len(bars.row) > MOST_VECTORS
    axes.set_xlim(0, span)
    axes.set_ylim(header.workers, 0)
    tracks = [(0, rank + 0.06, scene.makespan, BAR) for rank in range(header.workers)]
    axes.add_collection(PolyCollection([_corners(*one) for one in tracks], facecolor=TRACK, linewidth=0))
    gaps = scene.gaps()
    thin = [
        _corners(start, rank + 0.06 + 0.42 * BAR, end - start, 0.16 * BAR)
        for start, end, rank in zip(gaps.start, gaps.end, gaps.worker, strict=True)
    ]
    why = np.array(SHARE_COLOURS)[gaps.share].tolist()
    axes.add_collection(PolyCollection(thin, facecolors=why, linewidth=0, rasterized=len(thin) > MOST_VECTORS))
    number = bars.mb if by == "microbatch" else bars.stage
    for kind in scene.looks:
        look = LOOKS[kind]
        mine = np.flatnonzero(bars.look == kind)
        paint = np.array(colours(look, count))[np.maximum(number[mine], 0)]
        corners = [
            _corners(start, rank + 0.06, length, BAR)
            for start, rank, length in zip(bars.start[mine], bars.worker[mine], bars.length[mine], strict=True)
        ]
        fine = float(np.median(bars.length[mine])) * wide < 4
        axes.add_collection(
            PolyCollection(
                corners,
                facecolors=paint.tolist(),
                edgecolors=paint.tolist() if fine else PAPER,
                linewidths=0.0 if fine else 0.5,
                rasterized=pixels,
            )
        )
        if look.hatch and not fine:
            lines = PolyCollection(
                corners, facecolors="none", edgecolors=INK, linewidths=0, hatch=_HATCH[look.hatch], alpha=HATCH
            )
            axes.add_collection(lines)
    for k, text in labels:
        x, y = bars.start[k] + bars.length[k] / 2, bars.worker[k] + 0.06 + BAR / 2
        axes.text(x, y, text, size=LABEL, color=LOOKS[bars.look[k]].ink, ha="center", va="center_baseline")
    _held(axes, scene, pixels)


def _corners(x: float, y: float, width: float, height: float) -> list[tuple[float, float]]:
    return [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]


def _held(axes: Axes, scene: Scene, pixels: bool) -> None:
    """Under every worker's bars, what it holds over time; the worker that holds most fills the strip."""
    held, bounds, walk = scene.held if scene.sized else scene.activations(), scene.program.bounds, scene.walk
    during = held.during.sum(axis=1)
    after = during - held.given.sum(axis=1)
    most = max(int(during.max()), 1)
    for rank in range(scene.program.header.workers):
        rows = slice(bounds[rank], bounds[rank + 1])
        time = np.repeat(np.stack([walk.start[rows], walk.start[rows] + walk.length[rows]], axis=1).ravel(), 2)
        level = np.stack([during[rows], after[rows]], axis=1).ravel()
        level = np.concatenate([[0], np.repeat(level, 2)[:-1]])
        turns = np.append(True, np.diff(level) != 0) | np.append(np.diff(level) != 0, True)
        base = rank + 0.98
        axes.fill_between(
            time[turns], base, base - STRIP * level[turns] / most, color=HELD, linewidth=0, rasterized=pixels
        )


def _transfers(axes: Axes, scene: Scene, kinds: Collection[str]) -> None:
    """From the worker of a SEND when it starts to that of its RECV when the message is there."""
    from matplotlib.collections import LineCollection

    table, walk = scene.program.rows, scene.walk
    sends = _sends(scene)
    edge = np.where(table.peer > table.rank, 0.06 + BAR, 0.06)  # of the bar that is nearer to the other worker
    for kind, paint in TRANSFER_COLOURS.items():
        mine = sends[table.kind[sends] == Kind[kind.upper()]] if kind in kinds else sends[:0]
        lines = [
            ((walk.start[k], table.rank[k] + edge[k]), (walk.arrival[k], table.peer[k] + 0.12 + BAR - edge[k]))
            for k in mine.tolist()
        ]
        heads = [end for _, end in lines]
        if heads:
            axes.add_collection(LineCollection(lines, colors=paint, linewidths=0.5, alpha=0.8, zorder=4))
            axes.plot(*zip(*heads, strict=True), "o", color=paint, markersize=1.4, markeredgewidth=0, zorder=5)


def _axis(axes: Axes, scene: Scene, captioned: bool) -> None:
    workers = scene.program.header.workers
    ranks = range(0, workers, -(-workers // 16))
    axes.set_yticks([rank + 0.06 + BAR / 2 for rank in ranks], [str(rank) for rank in ranks])
    axes.tick_params(axis="y", length=0, pad=3)
    axes.tick_params(axis="x", length=2, width=0.5, color=INK, pad=2)
    axes.xaxis.set_major_formatter(lambda value, _: amount(value, scene.seconds) if value else "0")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#aab1bb")
    if captioned:
        unit = "time" if scene.seconds else "time, in units of the costs"
        axes.set_xlabel(f"{unit}; a row is a worker", size=SMALL, labelpad=2, loc="left")


def _shares(axes: Axes, scene: Scene) -> None:
    share, workers = scene.share(), scene.program.header.workers
    axes.set_xlim(0, 1)
    axes.set_ylim(workers, 0)
    axes.axis("off")
    axes.text(1.04, 0, "busy", size=SMALL, va="bottom")
    rank = np.arange(workers)
    left = np.zeros(workers)
    for which, paint in enumerate(SHARE_COLOURS):
        if share[:, which].any():
            axes.barh(rank + 0.06 + BAR / 2, share[:, which], BAR, left, color=paint, linewidth=0)
        left += share[:, which]
    if workers <= 32:
        for k in rank.tolist():
            axes.text(1.04, k + 0.06 + BAR / 2, f"{share[k, 0]:.0%}", size=SMALL, va="center_baseline")


class Entry(NamedTuple):
    """A swatch and its words."""

    paints: Sequence[str]  # side by side
    words: str
    hatch: str = ""
    swatch: float = 0.16  # inches

    @property
    def width(self) -> float:
        """Inches, with what is left free behind it."""
        return self.swatch + 0.05 + text_width(self.words, SMALL) / 72 + 0.18


def _legends(
    scenes: Sequence[Scene], by: str, transfers: Collection[str], labels: bool, width: float
) -> tuple[list[list[Entry]], list[list[Entry]]]:
    """Lines of entries for the top, jobs and what colours say, and for the bottom, where time goes and messages."""
    count = numbered(scenes, by)
    top = [
        Entry(colours(LOOKS[kind], count)[:1], f"{LOOKS[kind].letter}  {LOOKS[kind].words}", LOOKS[kind].hatch)
        for kind in sorted({kind for scene in scenes for kind in scene.looks})
    ]
    shown = np.unique(np.linspace(0, count - 1, 24).astype(int))
    paints = np.array(colours(LOOKS[0], count))[shown].tolist()
    number = "; number: microbatch" if labels and by == "stage" else ""
    top.append(Entry(paints, f"{by} 0 to {count - 1}{number}", swatch=0.6))
    top.append(Entry([HELD], "bytes held" if scenes[0].sized else "activations held"))
    spent = np.max([scene.idle.time.sum(axis=0) for scene in scenes], axis=0) > 0
    bottom = [Entry([paint], SHARES[which]) for which, paint in enumerate(SHARE_COLOURS) if spent[which]]
    sent = {int(kind) for scene in scenes for kind in np.unique(scene.program.rows.kind[_sends(scene)])}
    named = [(name, TRANSFER_COLOURS[name]) for name in transfers if Kind[name.upper()] in sent]
    bottom += [Entry([paint], f"sends {name}", swatch=0.1) for name, paint in named]
    return _lines(top, width), _lines(bottom, width)


def _lines(entries: Sequence[Entry], width: float) -> list[list[Entry]]:
    """As many on a line as there is room for."""
    lines: list[list[Entry]] = [[]]
    for entry in entries:
        if sum(one.width for one in (*lines[-1], entry)) > width - LEFT:
            lines.append([])
        lines[-1].append(entry)
    return lines


def _legend(drawing: Figure, lines: Sequence[Sequence[Entry]], y: float) -> None:
    """Draw lines of entries, the first `y` inches above the bottom."""
    from matplotlib.patches import Rectangle

    width, whole = drawing.get_size_inches()
    for number, line in enumerate(lines):
        x, middle = LEFT, (y - LINE * number) / whole
        for entry in line:
            each = entry.swatch / len(entry.paints) / width
            for k, paint in enumerate(entry.paints):
                box = Rectangle((x / width + k * each, middle - 0.05 / whole), each, 0.1 / whole)
                box.set(facecolor=paint, linewidth=0)
                drawing.add_artist(box)
                if entry.hatch:
                    hatched = Rectangle(box.get_xy(), each, 0.1 / whole, fill=False, hatch=_HATCH[entry.hatch])
                    hatched.set(linewidth=0, edgecolor=INK, alpha=HATCH)
                    drawing.add_artist(hatched)
            drawing.text((x + entry.swatch + 0.05) / width, middle, entry.words, size=SMALL, va="center_baseline")
            x += entry.width


def _sends(scene: Scene) -> Numbers:
    return np.flatnonzero(scene.program.rows.op == Op.SEND)
