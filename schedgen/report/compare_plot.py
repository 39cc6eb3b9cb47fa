"""Latency against memory of the schemes that `schedgen.report.compare` found, as SVG by matplotlib."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from schedgen.report.compare import Comparison, Row
from schedgen.report.draw.figure_style import text_width
from schedgen.simulator.lower_bounds import bounds
from schedgen.util.errors import UsageError

# The same bytes every time.
_STYLE: dict[Any, Any] = {"svg.hashsalt": "schedgen", "svg.fonttype": "none", "font.size": 8}
_LABEL, _LINE = 7, 8.6  # points: of the schemes' names, and from one line to the next
_BESIDE = 5.0  # points from a mark to its label
_STEP, _FAR = 3.0, 90  # points by which a label gives way, and the most


class Box(NamedTuple):
    """In points."""

    left: float
    bottom: float
    width: float
    height: float

    def meets(self, other: Box) -> bool:
        apart = self.left + self.width <= other.left or other.left + other.width <= self.left
        return not (apart or self.bottom + self.height <= other.bottom or other.bottom + other.height <= self.bottom)

    def within(self, other: Box) -> bool:
        across = other.left <= self.left and self.left + self.width <= other.left + other.width
        return across and other.bottom <= self.bottom and self.bottom + self.height <= other.bottom + other.height


def plot(found: Comparison, title: str, out: BinaryIO) -> None:
    """Two panels: against activations, above the lower bound for so many, and against weights a worker holds."""
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("the plot needs matplotlib: pip install matplotlib") from None
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(10, 5), layout="constrained")
        FigureCanvasSVG(figure)
        figure.suptitle(title)
        left, right = figure.subplots(1, 2, sharey=True)
        most = max(row.peak_activations for row in found.rows)
        limits = [bounds(header, header.cost, header.workers) for header in found.headers]
        memory = np.linspace(1, most + 1, 200)
        left.plot(memory, [_bound(limits, one) for one in memory], color="0.6", label="lower bound")
        panels: list[tuple[Any, str, str]] = [
            (left, "peak_activations", "activations a worker holds at the most"),
            (right, "weights", "weights a worker holds at the most, in stages"),
        ]
        for axes, what, words in panels:
            _lines(axes, found.rows, what)
            axes.set_xlabel(words)
            axes.margins(x=0.15)
            axes.set_xlim(left=0)
            axes.grid(color="0.9")
        left.set_ylabel("latency")
        left.set_ylim(0.95 * min(_bound(limits, most), found.rows[0].latency), 1.08 * found.rows[-1].latency)
        left.plot([], [], **_mark(True), label="a scheme; hollow: another beats it (no * in the table)")
        figure.legend(handles=left.get_legend_handles_labels()[0], loc="outside lower center", ncols=4, frameon=False)
        figure.draw_without_rendering()  # from here on it is known where things are
        figure.set_layout_engine("none")
        for axes, what, _ in panels:
            _points(axes, found.rows, what)
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})


def _lines(axes: Any, rows: Sequence[Row], what: str) -> None:
    """A line along the groups of lpp and of fslpp."""
    for name, style in (("lpp", "-"), ("fslpp", ":")):
        along = sorted((row.groups or 0, getattr(row, what), row.latency) for row in rows if row.scheme == name)
        axes.plot([x for _, x, _ in along], [y for *_, y in along], style, color="C0", label=f"{name}, along G")
    axes.update_datalim([(getattr(row, what), row.latency) for row in rows])


def _mark(best: bool) -> dict[str, Any]:
    fill = "C1" if best else "white"
    return {"marker": "o", "linestyle": "", "markersize": 4.5, "markeredgecolor": "C1", "markerfacecolor": fill}


def _points(axes: Any, rows: Sequence[Row], what: str) -> None:
    """A mark a scheme, filled where no other is better; schemes at one place share a label."""
    places: dict[tuple[float, float], list[Row]] = defaultdict(list)
    for row in rows:
        places[getattr(row, what), row.latency].append(row)
    for (x, y), those in places.items():
        axes.plot(x, y, **_mark(any(row.best for row in those)), zorder=3)
    scale = 72 / axes.figure.dpi
    at = scale * axes.transData.transform(np.array(list(places), float))
    texts = [",\n".join(row.label for row in those) for those in places.values()]
    sizes = [
        (max(text_width(line, _LABEL) for line in text.split("\n")), _LINE * (text.count("\n") + 1)) for text in texts
    ]
    area = Box(*(scale * np.array(axes.bbox.bounds)))
    for (x, y), text, box in zip(at.tolist(), texts, spread(at.tolist(), sizes, area), strict=True):
        aside = abs(box.bottom + box.height / 2 - y) > 1
        leader = {"arrowstyle": "-", "linewidth": 0.4, "color": "0.5", "shrinkA": 0, "shrinkB": 2.5}
        axes.annotate(
            text,
            (x / scale, y / scale),
            (box.left - x, box.bottom + box.height / 2 - y),
            xycoords="figure pixels",
            textcoords="offset points",
            va="center",
            fontsize=_LABEL,
            arrowprops=leader if aside else None,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},  # a stroke would be no text
            zorder=4,
        )


def spread(points: Sequence[Sequence[float]], sizes: Sequence[tuple[float, float]], area: Box) -> list[Box]:
    """Where labels go: beside their points, or as near as they meet neither other labels nor marks."""
    taken = [Box(x - 3, y - 3, 6, 6) for x, y in points]
    found: dict[int, Box] = {}
    for k in sorted(range(len(points)), key=lambda k: (points[k][1], points[k][0])):
        (x, y), (width, height) = points[k], sizes[k]
        ways = [
            Box(left, y + sign * _STEP * step - height / 2, width, height)
            for step in range(int(_FAR / _STEP))
            for sign, left in itertools.product((1, -1), (x + _BESIDE, x - _BESIDE - width, x + 4 * _BESIDE))
        ]
        free = (box for box in ways if box.within(area) and not any(box.meets(other) for other in taken))
        found[k] = next(free, ways[0])
        taken.append(found[k])
    return [found[k] for k in range(len(points))]


def _bound(limits: Sequence[Mapping[str, float]], memory: float) -> float:
    """What the latency of none of them can be below; `limits`: with one activation a worker."""
    return min(max(one["work"], one["critical_path"], one["memory"] / memory) for one in limits)
