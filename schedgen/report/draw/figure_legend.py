"""Legends of `figure`: kinds of jobs and colours above the scenes, shares of time and messages below."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from schedgen.ir.instructions import Kind, Op
from schedgen.report.draw.colours import HELD, INK, LOOKS, SHARE_COLOURS, TRANSFER_COLOURS, colours
from schedgen.report.draw.figure_style import HATCH_OPACITY, HATCHES, SMALL
from schedgen.report.draw.scene import Scene, colour_count
from schedgen.simulator.time_breakdown import SHARES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINE = 0.17  # inches from one line to the next
COLUMNS = 6  # entries of a line
MOST_SWATCHES = 24  # colours of microbatches or stages that are shown

Entries = list[tuple[Any, str]]  # matplotlib's handle and the text


def legend_entries(
    scenes: Sequence[Scene], by: str, transfers: Collection[str], labels: bool
) -> tuple[Entries, Entries]:
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
    drawn = [name for name in transfers if Kind[name.upper()] in sent]
    return top, bottom + [(_swatch(TRANSFER_COLOURS[name]), f"sends {name}") for name in drawn]


def _swatch(paint: str, hatch: str = "") -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=paint, edgecolor=(INK, HATCH_OPACITY), hatch=HATCHES[hatch], linewidth=0)


def legend_height(entries: Entries) -> float:
    """Inches."""
    return LINE * -(-len(entries) // COLUMNS)


def draw_legend(drawing: Figure, entries: Entries, x: float, y: float) -> None:
    """Draw the entries from `x` inches on, below `y` inches."""
    from matplotlib.legend_handler import HandlerTuple

    width, height = drawing.get_size_inches()
    drawing.legend(
        *zip(*entries, strict=True), loc="upper left", bbox_to_anchor=(x / width, y / height), ncols=COLUMNS,
        fontsize=SMALL, frameon=False, borderpad=0, borderaxespad=0, labelspacing=0.6, handletextpad=0.5,
        columnspacing=1.8, handlelength=2.5, handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )  # fmt: skip
