"""Latency against memory of the schemes that `schedgen.compare` found, as SVG by matplotlib."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from schedgen.bounds import bounds
from schedgen.compare import Comparison, Row
from schedgen.errors import UsageError

# The same bytes every time.
_STYLE: dict[Any, Any] = {"svg.hashsalt": "schedgen", "svg.fonttype": "none", "font.size": 8}


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
        for axes, what, words in (
            (left, "peak_activations", "activations a worker holds at the most"),
            (right, "weights", "weights a worker holds at the most, in stages"),
        ):
            _points(axes, found.rows, what)
            axes.set_xlabel(words)
            axes.margins(x=0.15)
            axes.set_xlim(left=0)
            axes.grid(color="0.9")
        left.set_ylabel("latency")
        left.set_ylim(0.95 * min(_bound(limits, most), found.rows[0].latency), 1.08 * found.rows[-1].latency)
        left.legend()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})


def _points(axes: Any, rows: Sequence[Row], what: str) -> None:
    """A mark a scheme, a line along the groups of lpp and of fslpp; schemes at one place share a label."""
    for name, style in (("lpp", "-"), ("fslpp", ":")):
        along = sorted((row.groups or 0, getattr(row, what), row.latency) for row in rows if row.scheme == name)
        axes.plot([x for _, x, _ in along], [y for *_, y in along], style, color="C0", label=f"{name}, along G")
    places: dict[tuple[float, float], list[str]] = defaultdict(list)
    for row in rows:
        places[getattr(row, what), row.latency].append(row.label)
    for (x, y), labels in places.items():
        axes.plot(x, y, "o", color="C1", markersize=4)
        axes.annotate(",\n".join(labels), (x, y), (5, 0), textcoords="offset points", va="center", fontsize=6)


def _bound(limits: Sequence[Mapping[str, float]], memory: float) -> float:
    """What the latency of none of them can be below; `limits`: with one activation a worker."""
    return min(max(one["work"], one["critical_path"], one["memory"] / memory) for one in limits)
