"""A plot of the schemes that `compare` compiled: latency against memory, as SVG by matplotlib."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from schedgen.report.compare import Comparison, SchemeNumbers
from schedgen.simulator.lower_bounds import lower_bounds
from schedgen.util.errors import UsageError

# With these settings the same comparison gives the same bytes; a $ in the name of a file is a $.
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "schedgen", "svg.fonttype": "none", "font.size": 8, "text.parse_math": False,
}  # fmt: skip


def plot_comparison(comparison: Comparison, title: str, out: BinaryIO) -> None:
    """Write two panels: latency against activations, with the lower bound, and latency against weights of a worker.

    Schemes are numbered in the order of the table, and a legend names them.
    """
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
            _draw_points(axes, rows, field)
            axes.set_xlabel(label)
            axes.margins(x=0.15)
            axes.set_xlim(left=0)
            axes.grid(color="0.9")
        left.set_ylabel("latency")
        left.set_ylim(0.95 * min(_lower_bound(limits, most), rows[0].latency), 1.08 * rows[-1].latency)
        left.plot([], [], **_mark(True), label="a scheme; hollow: another beats it (no * in the table)")
        figure.legend(handles=left.get_legend_handles_labels()[0], loc="outside lower center", ncols=4, frameon=False)
        schemes = [
            (left.plot([], [], **_mark(row.best))[0], f"{k}  {row.label}") for k, row in enumerate(rows, start=1)
        ]
        figure.legend(*zip(*schemes, strict=True), loc="outside right center", frameon=False)
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
    """A mark for each scheme, filled if no other beats it, with its number; schemes at one point share a mark."""
    groups: dict[tuple[float, float], list[int]] = defaultdict(list)
    for number, row in enumerate(rows, start=1):
        groups[getattr(row, field), row.latency].append(number)
    for point, numbers in groups.items():
        axes.plot(*point, **_mark(any(rows[number - 1].best for number in numbers)), zorder=3)
        text = ", ".join(map(str, numbers))
        axes.annotate(text, point, (4, 0), textcoords="offset points", va="center", fontsize=7, zorder=4)


def _lower_bound(limits: Sequence[Mapping[str, float]], activations: float) -> float:
    """The least lower bound of all schemes for this many activations on a worker; `limits`: their bounds for one."""
    return min(max(limit["work"], limit["critical_path"], limit["memory"] / activations) for limit in limits)
