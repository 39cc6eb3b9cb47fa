"""Scenes as SVG or PNG by matplotlib: one below another on one time axis, with legends above and below.

Large schedules are drawn as pixels inside the SVG. The same scenes give the same SVG.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from typing import Any, BinaryIO

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch

from schedgen.ir.instructions import Kind, Op
from schedgen.report.draw import figure_axes
from schedgen.report.draw.colours import HELD, INK, LOOKS, PAPER, SHARE_COLOURS, TRANSFER_COLOURS, colours
from schedgen.report.draw.figure_axes import FONT, HATCH_OPACITY, HATCHES, LABEL, LARGE, SMALL, text_width
from schedgen.report.draw.scene import Scene, colour_count, heading, key_figures
from schedgen.simulator.timeline import SHARES

# Inches.
NARROWEST, WIDEST, TALLEST = 9.0, 14.0, 100.0  # of the picture
LEFT, RIGHT, BETWEEN = 0.42, 1.70, 0.42  # margins, and the space between two scenes
SHARES_LEFT, SHARES_WIDTH = 1.55, 1.05  # where shares of time begin, from the right edge, and how wide they are

LINE = 0.17  # inches from one line of a legend to the next
COLUMNS = 6  # entries of a line
MOST_SWATCHES = 24  # colours of microbatches or stages that are shown
DPI = 200

# Of matplotlib.
SETTINGS: Any = {
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

Entries = list[tuple[Any, str]]  # matplotlib's handle and the text


def figure(scenes: Sequence[Scene], out: BinaryIO, form: str, by: str, transfers: Collection[str]) -> None:
    """Write the picture as `form`, svg or png; `by`: what colours stand for, microbatch or stage.

    `transfers`: kinds of messages to draw.
    """
    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a file's name may have letters that the font lacks
        span = max(scene.makespan for scene in scenes)
        heights = [figure_axes.rows(scene) for scene in scenes]  # links have names
        rows = [
            min(max(5.0 / high, 0.22 if scene.links else 0.075), 0.36, TALLEST / high)
            for scene, high in zip(scenes, heights, strict=True)
        ]
        # Within limits, most jobs have room for letter and number.
        shortest = min(float(np.median(scene.bars.length[scene.bars.length > 0])) for scene in scenes)
        longest = max(text_width(f"B{int(scene.bars.mb.max())}", LABEL) for scene in scenes)
        width = min(max(LEFT + RIGHT + span / shortest * (longest + 2) / 72, NARROWEST), WIDEST)
        names = [name for scene in scenes if scene.links for name in scene.links.names]
        left = max(LEFT, *(text_width(name, SMALL) / 72 + 0.12 for name in names), 0)
        inner = width - left - RIGHT
        wide = inner * 72 / span  # points of a unit of time
        labels = [figure_axes.fitting_labels(scene, row, wide) for scene, row in zip(scenes, rows, strict=True)]
        above, below = _legends(scenes, by, transfers, any(labels))
        heights = [row * high for row, high in zip(rows, heights, strict=True)]
        legends = [LINE * -(-len(entries) // COLUMNS) for entries in (above, below)]  # inches
        top, bottom = 0.45 + legends[0], 0.39 + legends[1]
        total = sum(heights) + top + bottom + BETWEEN * (len(scenes) - 1)
        drawing = Figure(figsize=(width, total))
        y = total - top
        for scene, height, texts in zip(scenes, heights, labels, strict=True):
            bottom_edge, relative_height = (y - height) / total, height / total
            axes = drawing.add_axes((left / width, bottom_edge, inner / width, relative_height))
            figure_axes.draw_rows(axes, scene, by, colour_count(scenes, by), span, wide, texts)
            figure_axes.draw_links(axes, scene)
            figure_axes.draw_transfers(axes, scene, transfers)
            figure_axes.draw_axis(axes, scene, captioned=scene is scenes[-1])
            axes.set_title(heading(scene), size=LARGE, loc="left", pad=5, weight="bold")
            axes.set_title(key_figures(scene), size=SMALL, loc="right", pad=5)
            box = ((width - SHARES_LEFT) / width, bottom_edge, SHARES_WIDTH / width, relative_height)
            figure_axes.draw_shares(drawing.add_axes(box), scene)
            y -= height + BETWEEN
        _draw_legend(drawing, above, LEFT, total - 0.08)
        _draw_legend(drawing, below, LEFT, legends[1] + 0.04)
        # Without the date or anything else that changes from run to run.
        metadata = {"Date": None, "Creator": None} if form == "svg" else {"Software": None}
        drawing.savefig(out, format=form, dpi=DPI, metadata=metadata, facecolor=PAPER)


def _legends(scenes: Sequence[Scene], by: str, transfers: Collection[str], labels: bool) -> tuple[Entries, Entries]:
    """The entries on top (kinds of jobs and colours) and at the bottom (shares of time and messages).

    `labels`: whether bars have labels.
    """
    count = colour_count(scenes, by)
    looks = [LOOKS[look] for look in sorted({look for scene in scenes for look in scene.looks})]
    top = [(_swatch(colours(look, count)[0], look.hatch), f"{look.letter}  {look.words}") for look in looks]
    shown = np.unique(np.linspace(0, count - 1, MOST_SWATCHES).astype(int))
    paints = np.array(colours(LOOKS[0], count))[shown].tolist()
    number = "; number: microbatch" if labels and by == "stage" else ""
    top.append((tuple(map(_swatch, paints)), f"{by} 0 to {count - 1}{number}"))
    top.append((_swatch(HELD), "bytes held" if scenes[0].sized else "activations held"))
    spent = np.max([scene.breakdown.time.sum(axis=0) for scene in scenes], axis=0) > 0
    bottom = [(_swatch(paint), SHARES[share]) for share, paint in enumerate(SHARE_COLOURS) if spent[share]]
    programs = [scene.program for scene in scenes]
    sent = {int(kind) for each in programs for kind in np.unique(each.rows.kind[each.rows_of(Op.SEND)])}
    sent &= {int(Kind[name.upper()]) for name in transfers}
    for each in scenes:
        sent |= {*each.program.rows.kind[each.links.row].tolist()} if each.links else set()
    drawn = [name for name in TRANSFER_COLOURS if Kind[name.upper()] in sent]
    return top, bottom + [(_swatch(TRANSFER_COLOURS[name]), f"sends {name}") for name in drawn]


def _swatch(paint: str, hatch: str = "") -> Any:
    return Patch(facecolor=paint, edgecolor=(INK, HATCH_OPACITY), hatch=HATCHES[hatch], linewidth=0)


def _draw_legend(drawing: Figure, entries: Entries, x: float, y: float) -> None:
    width, height = drawing.get_size_inches()
    drawing.legend(
        *zip(*entries, strict=True), loc="upper left", bbox_to_anchor=(x / width, y / height), ncols=COLUMNS,
        fontsize=SMALL, frameon=False, borderpad=0, borderaxespad=0, labelspacing=0.6, handletextpad=0.5,
        columnspacing=1.8, handlelength=2.5, handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )  # fmt: skip
