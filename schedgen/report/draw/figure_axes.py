"""One scene in matplotlib's axes: bars, reasons for waiting, memory held, messages, and shares of time beside them.

Row k of the axes, from k to k + 1, is worker k: bars, and below them a strip for what it holds. Fonts and hatches
are here, too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgba_array
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from numpy.typing import NDArray

from schedgen.ir.instructions import KIND_NAME, Kind, Op
from schedgen.report.draw.colours import HELD, INK, LOOKS, PAPER, SHARE_COLOURS, TRACK, TRANSFER_COLOURS, colours
from schedgen.report.draw.scene import Scene, format_time

FONT = "DejaVu Sans"
LABEL, SMALL, LARGE = 6.5, 7.0, 9.0  # points: labels of bars, other text, headings
HATCHES = {"": "", "/": "/////", "\\": "\\\\\\\\\\", ".": "....."}  # Look.hatch -> matplotlib's, as dense as used here
HATCH_OPACITY = 0.35
MOST_VECTORS = 6000  # bars; more of them are drawn as pixels
TOP, BAR, STRIP = 0.06, 0.62, 0.22  # of a row's height: space above the bars, bars, memory held
LINK = 0.5  # a link's row, of a worker's

Label = tuple[int, str]  # number of a bar, text


@cache
def text_width(text: str, size: float) -> float:
    """The width in points of a text of `size` points."""
    outline = TextPath((0, 0), text, size=size, prop=FontProperties(family=FONT), usetex=False)
    return float(outline.get_extents().width)


def rows(scene: Scene) -> float:
    """The height of a scene, in rows of workers."""
    return scene.program.header.workers + LINK * (len(scene.links.names) if scene.links else 0)


def fitting_labels(scene: Scene, row: float, wide: float) -> list[Label]:
    """Labels of the bars that have room for one: letter and microbatch, or one of them.

    `row`: inches of a worker's row; `wide`: points of a unit of time.
    """
    if row * 72 * BAR <= LABEL:
        return []
    bars, labels = scene.bars, []
    for k in np.flatnonzero(bars.length * wide > 0.85 * LABEL).tolist():
        letter, number = LOOKS[bars.look[k]].letter, str(bars.mb[k])
        texts = (letter + number, number) if bars.mb[k] >= 0 else (letter,)
        fits = [text for text in texts if text_width(text, LABEL) + 1 < bars.length[k] * wide]
        labels += [(k, text) for text in fits[:1]]
    return labels


def draw_rows(axes: Axes, scene: Scene, by: str, count: int, span: float, wide: float, labels: Sequence[Label]) -> None:
    """Draw bars, waits and memory on an axis of `span` time, in the colours of `count` microbatches or stages."""
    workers, bars = scene.program.header.workers, scene.bars
    axes.set_xlim(0, span)
    axes.set_ylim(rows(scene), 0)
    tracks = _corners(np.zeros(workers), np.arange(workers) + TOP, scene.makespan, BAR)
    axes.add_collection(PolyCollection(tracks, facecolor=TRACK, linewidth=0))
    gaps = scene.gaps()
    thin = _corners(gaps.start, gaps.worker + TOP + 0.42 * BAR, gaps.end - gaps.start, 0.16 * BAR)
    causes = to_rgba_array(SHARE_COLOURS)[gaps.share]
    axes.add_collection(PolyCollection(thin, facecolors=causes, linewidth=0, rasterized=len(thin) > MOST_VECTORS))
    pixels = len(bars.row) > MOST_VECTORS
    for look in scene.looks:
        _draw_bars(axes, scene, look, by, count, wide, pixels)
    for k, text in labels:
        x, y = bars.start[k] + bars.length[k] / 2, bars.worker[k] + TOP + BAR / 2
        axes.text(x, y, text, size=LABEL, color=LOOKS[bars.look[k]].ink, ha="center", va="center_baseline")
    _draw_held(axes, scene, pixels)


def _draw_bars(axes: Axes, scene: Scene, look: int, by: str, count: int, wide: float, pixels: bool) -> None:
    """Draw the bars of one look; narrow ones have neither edges nor hatches."""
    bars = scene.bars
    chosen = np.flatnonzero(bars.look == look)
    number = (bars.mb if by == "microbatch" else bars.stage)[chosen]
    paints = to_rgba_array(colours(LOOKS[look], count))[np.maximum(number, 0)]
    corners = _corners(bars.start[chosen], bars.worker[chosen] + TOP, bars.length[chosen], BAR)
    narrow = float(np.median(bars.length[chosen])) * wide < 4
    edges, linewidths = (paints, 0.0) if narrow else (PAPER, 0.5)
    axes.add_collection(
        PolyCollection(corners, facecolors=paints, edgecolors=edges, linewidths=linewidths, rasterized=pixels)
    )
    if LOOKS[look].hatch and not narrow:
        hatch = HATCHES[LOOKS[look].hatch]
        axes.add_collection(
            PolyCollection(corners, facecolors="none", edgecolors=INK, linewidths=0, hatch=hatch, alpha=HATCH_OPACITY)
        )


def _corners(x: NDArray[Any], y: NDArray[Any], width: NDArray[Any] | float, height: float) -> Any:
    """The corners of N rectangles, (N, 4, 2); an array is fast in matplotlib, but its stubs do not allow it."""
    right, below = x + width, y + height
    return np.stack([x, y, right, y, right, below, x, below], axis=-1).reshape(-1, 4, 2)


def _draw_held(axes: Axes, scene: Scene, pixels: bool) -> None:
    """Draw the memory that a worker holds over time below its bars; a full strip is the most that any worker holds."""
    held = scene.held(in_bytes=True) if scene.sized else scene.held_activations()
    bounds, start, end = scene.program.bounds, scene.timeline.start, scene.timeline.start + scene.timeline.length
    during = held.during
    after = during - held.freed
    most = max(int(during.max()), 1)
    for rank in scene.program.ranks_with_rows.tolist():
        rows = slice(bounds[rank], bounds[rank + 1])
        time = np.repeat(np.stack([start[rows], end[rows]], axis=1).ravel(), 2)
        level = np.stack([during[rows], after[rows]], axis=1).ravel()
        level = np.concatenate([[0], np.repeat(level, 2)[:-1]])
        turns = np.append(True, np.diff(level) != 0) | np.append(np.diff(level) != 0, True)
        base = rank + 0.98
        top = base - STRIP * level[turns] / most
        axes.fill_between(time[turns], base, top, color=HELD, linewidth=0, rasterized=pixels)


def draw_transfers(axes: Axes, scene: Scene, kinds: Collection[str]) -> None:
    """Draw messages of these kinds as lines: from the sender at the SEND's start to the receiver at the arrival."""
    table, start, arrival = scene.program.rows, scene.timeline.start, scene.timeline.arrival
    sends = scene.program.rows_of(Op.SEND)
    edge = np.where(table.to > table.rank, TOP + BAR, TOP)  # the edge of the bar nearer to the other worker
    for kind, paint in TRANSFER_COLOURS.items():
        chosen = sends[table.kind[sends] == Kind[kind.upper()]] if kind in kinds else sends[:0]
        lines = [
            ((start[k], table.rank[k] + edge[k]), (arrival[k], table.to[k] + 2 * TOP + BAR - edge[k]))
            for k in chosen.tolist()
        ]
        heads = [end for _, end in lines]
        if heads:
            axes.add_collection(LineCollection(lines, colors=paint, linewidths=0.5, alpha=0.8, zorder=4))
            axes.plot(*zip(*heads, strict=True), "o", color=paint, markersize=1.4, markeredgewidth=0, zorder=5)


def draw_links(axes: Axes, scene: Scene) -> None:
    """Draw what occupies links and cards below the workers, in the colours of messages."""
    if scene.links is None:
        return
    used, below = scene.links, scene.program.header.workers + 0.1 * LINK
    tracks = _corners(np.zeros(len(used.names)), below + LINK * np.arange(len(used.names)), scene.makespan, 0.8 * LINK)
    axes.add_collection(PolyCollection(tracks, facecolor=TRACK, linewidth=0))
    paints = to_rgba_array([TRANSFER_COLOURS.get(KIND_NAME.get(kind, ""), INK) for kind in Kind])
    paints = paints[scene.program.rows.kind[used.row]]
    corners = _corners(used.start, below + LINK * used.link, used.length, 0.8 * LINK)
    pixels = len(used.row) > MOST_VECTORS
    axes.add_collection(  # with edges, so that short ones are seen
        PolyCollection(corners, facecolors=paints, edgecolors=paints, linewidths=0.4, rasterized=pixels)
    )


def draw_axis(axes: Axes, scene: Scene, captioned: bool) -> None:
    """Draw ticks for workers and times and, if `captioned`, the axis' caption."""
    workers = scene.program.header.workers
    ranks, names = range(0, workers, -(-workers // 16)), scene.links.names if scene.links else []
    places = [rank + TOP + BAR / 2 for rank in ranks] + [workers + LINK * (k + 0.5) for k in range(len(names))]
    axes.set_yticks(places, [*map(str, ranks), *names])
    axes.tick_params(axis="y", length=0, pad=3)
    axes.tick_params(axis="x", length=2, width=0.5, color=INK, pad=2)
    axes.xaxis.set_major_formatter(lambda value, _: format_time(value, scene.seconds) if value else "0")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#aab1bb")
    if captioned:
        unit = "time" if scene.seconds else "time, in units of the costs"
        axes.set_xlabel(f"{unit}; a row is a worker{' or a link' if names else ''}", size=SMALL, labelpad=2, loc="left")


def draw_shares(axes: Axes, scene: Scene) -> None:
    """Draw each worker's shares of time as a stacked bar, with its busy share in figures."""
    shares, workers = scene.shares(), scene.program.header.workers
    axes.set_xlim(0, 1)
    axes.set_ylim(rows(scene), 0)
    axes.axis("off")
    axes.text(1.04, 0, "busy", size=SMALL, va="bottom")
    rank = np.arange(workers)
    left = np.zeros(workers)
    for share, paint in enumerate(SHARE_COLOURS):
        if shares[:, share].any():
            axes.barh(rank + TOP + BAR / 2, shares[:, share], BAR, left, color=paint, linewidth=0)
        left += shares[:, share]
    if workers <= 32:
        for k in rank.tolist():
            axes.text(1.04, k + TOP + BAR / 2, f"{shares[k, 0]:.0%}", size=SMALL, va="center_baseline")
