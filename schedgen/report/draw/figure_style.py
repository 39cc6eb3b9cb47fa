"""Fonts, hatches and settings of the pictures that matplotlib draws: the same scene gives the same SVG."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, BinaryIO

from schedgen.report.draw.colours import INK, PAPER
from schedgen.util.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FONT = "DejaVu Sans"
LABEL, SMALL, LARGE = 6.5, 7.0, 9.0  # points: labels of bars, other text, headings
DPI = 200
HATCHES = {"": "", "/": "/////", "\\": "\\\\\\\\\\", ".": "....."}  # Look.hatch -> matplotlib's, as dense as used here
HATCH_OPACITY = 0.35


@contextlib.contextmanager
def matplotlib_style() -> Iterator[type[Figure]]:
    """A context with these settings that yields matplotlib's `Figure`; UsageError if it is not installed."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("SVG and PNG need matplotlib: pip install 'schedgen[draw]'") from None
    settings: Any = {
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
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a file's name may have letters that the font lacks
        yield Figure


def save(drawing: Figure, out: BinaryIO, form: str) -> None:
    """Write as svg or png, without the date or anything else that changes from run to run."""
    metadata = {"Date": None, "Creator": None} if form == "svg" else {"Software": None}
    drawing.savefig(out, format=form, dpi=DPI, metadata=metadata, facecolor=PAPER)


@cache
def text_width(text: str, size: float) -> float:
    """The width in points of a text of `size` points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    outline = TextPath((0, 0), text, size=size, prop=FontProperties(family=FONT), usetex=False)
    return float(outline.get_extents().width)
