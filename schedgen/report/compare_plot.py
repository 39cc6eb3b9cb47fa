"""A plot of the schemes that `compare` compiled: latency against memory, as SVG by matplotlib."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from schedgen.report.compare import Comparison, SchemeNumbers
from schedgen.report.draw.figure_style import text_width
from schedgen.simulator.lower_bounds import lower_bounds
from schedgen.util.errors import UsageError

# With these settings the same comparison gives the same bytes.
_STYLE: dict[Any, Any] = {"svg.hashsalt": "schedgen", "svg.fonttype": "none", "font.size": 8}
_LABEL, _LINE = 7, 8.6  # points: size of the labels, and from one line to the next
_BESIDE = 5.0  # points from a mark to its label
_STEP, _FAR = 3.0, 90  # points that a label moves at a time, and at the most


class Box(NamedTuple):
    """A rectangle, in points."""

    left: float
    bottom: float
    width: float
    height: float

    def overlaps(self, other: Box) -> bool:
        """Whether the two have an inner point in common."""
        beside = self.left + self.width <= other.left or other.left + other.width <= self.left
        return not (beside or self.bottom + self.height <= other.bottom or other.bottom + other.height <= self.bottom)

    def within(self, other: Box) -> bool:
        """Whether it is inside the other."""
        across = other.left <= self.left and self.left + self.width <= other.left + other.width
        return across and other.bottom <= self.bottom and self.bottom + self.height <= other.bottom + other.height


def plot_comparison(comparison: Comparison, title: str, out: BinaryIO) -> None:
    """Write two panels: latency against activations, with the lower bound, and latency against weights of a worker."""
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
        rows = comparison.rows
        most = max(row.peak_activations for row in rows)
        limits = [lower_bounds(header, header.cost, np.ones(header.workers, np.int64)) for header in comparison.headers]
        counts = np.linspace(1, most + 1, 200)
        left.plot(counts, [_lower_bound(limits, count) for count in counts], color="0.6", label="lower bound")
        panels: list[tuple[Any, str, str]] = [
            (left, "peak_activations", "activations a worker holds at the most"),
            (right, "weights", "weights a worker holds at the most, in stages"),
        ]
        for axes, field, label in panels:
            _draw_lines(axes, rows, field)
            axes.set_xlabel(label)
            axes.margins(x=0.15)
            axes.set_xlim(left=0)
            axes.grid(color="0.9")
        left.set_ylabel("latency")
        left.set_ylim(0.95 * min(_lower_bound(limits, most), rows[0].latency), 1.08 * rows[-1].latency)
        left.plot([], [], **_mark(True), label="a scheme; hollow: another beats it (no * in the table)")
        figure.legend(handles=left.get_legend_handles_labels()[0], loc="outside lower center", ncols=4, frameon=False)
        figure.draw_without_rendering()  # lays the figure out: labels need to know where points are
        figure.set_layout_engine("none")
        for axes, field, _ in panels:
            _draw_points(axes, rows, field)
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})


def _draw_lines(axes: Any, rows: Sequence[SchemeNumbers], field: str) -> None:
    """A line along the groups of lpp and of fslpp."""
    for name, style in (("lpp", "-"), ("fslpp", ":")):
        points = sorted((row.groups or 0, getattr(row, field), row.latency) for row in rows if row.scheme == name)
        axes.plot([x for _, x, _ in points], [y for *_, y in points], style, color="C0", label=f"{name}, along G")
    axes.update_datalim([(getattr(row, field), row.latency) for row in rows])


def _mark(best: bool) -> dict[str, Any]:
    fill = "C1" if best else "white"
    return {"marker": "o", "linestyle": "", "markersize": 4.5, "markeredgecolor": "C1", "markerfacecolor": fill}


def _draw_points(axes: Any, rows: Sequence[SchemeNumbers], field: str) -> None:
    """A mark for each scheme, filled if no other beats it; schemes at one point share a label."""
    groups: dict[tuple[float, float], list[SchemeNumbers]] = defaultdict(list)
    for row in rows:
        groups[getattr(row, field), row.latency].append(row)
    for (x, y), group in groups.items():
        axes.plot(x, y, **_mark(any(row.best for row in group)), zorder=3)
    scale = 72 / axes.figure.dpi
    points = (scale * axes.transData.transform(np.array(list(groups), float))).tolist()
    texts = [",\n".join(row.label for row in group) for group in groups.values()]
    sizes = [
        (max(text_width(line, _LABEL) for line in text.split("\n")), _LINE * (text.count("\n") + 1)) for text in texts
    ]
    area = Box(*(scale * np.array(axes.bbox.bounds)))
    for (x, y), text, box in zip(points, texts, place_labels(points, sizes, area), strict=True):
        moved = abs(box.bottom + box.height / 2 - y) > 1
        leader = {"arrowstyle": "-", "linewidth": 0.4, "color": "0.5", "shrinkA": 0, "shrinkB": 2.5}
        axes.annotate(
            text,
            (x / scale, y / scale),
            (box.left - x, box.bottom + box.height / 2 - y),
            xycoords="figure pixels",
            textcoords="offset points",
            va="center",
            fontsize=_LABEL,
            arrowprops=leader if moved else None,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},  # a stroke would make it a path
            zorder=4,
            parse_math=False,  # a $ in the name of a file
        )


def place_labels(points: Sequence[Sequence[float]], sizes: Sequence[tuple[float, float]], area: Box) -> list[Box]:
    """Boxes for labels, beside their points or as near as possible without overlapping other labels or marks.

    `points`: (x, y) of the marks; `sizes`: (width, height) of their labels; `area`: where labels may be placed.
    """
    taken = [Box(x - 3, y - 3, 6, 6) for x, y in points]
    boxes: dict[int, Box] = {}
    for k in sorted(range(len(points)), key=lambda k: (points[k][1], points[k][0])):
        (x, y), (width, height) = points[k], sizes[k]
        choices = [
            Box(left, y + sign * _STEP * step - height / 2, width, height)
            for step in range(int(_FAR / _STEP))
            for sign, left in itertools.product((1, -1), (x + _BESIDE, x - _BESIDE - width, x + 4 * _BESIDE))
        ]
        free = (box for box in choices if box.within(area) and not any(box.overlaps(other) for other in taken))
        boxes[k] = next(free, choices[0])
        taken.append(boxes[k])
    return [boxes[k] for k in range(len(points))]


def _lower_bound(limits: Sequence[Mapping[str, float]], activations: float) -> float:
    """The least lower bound of all schemes for this many activations on a worker; `limits`: their bounds for one."""
    return min(max(limit["work"], limit["critical_path"], limit["memory"] / activations) for limit in limits)
