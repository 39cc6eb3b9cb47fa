"""Legends of `figure`: lines of swatches with text, above and below the scenes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from schedgen.ir.instructions import Kind, Op
from schedgen.report.draw.colours import HELD, INK, LOOKS, SHARE_COLOURS, TRANSFER_COLOURS, colours
from schedgen.report.draw.figure_style import HATCH_OPACITY, HATCHES, SMALL, text_width
from schedgen.report.draw.scene import Scene, colour_count
from schedgen.simulator.time_breakdown import SHARES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINE = 0.17  # inches from one line to the next
MOST_SWATCHES = 24  # colours of microbatches or stages that are shown


class Entry(NamedTuple):
    """A swatch and its text."""

    paints: Sequence[str]  # side by side
    words: str
    hatch: str = ""
    swatch: float = 0.16  # inches

    @property
    def width(self) -> float:
        """Inches, with the space after it."""
        return self.swatch + 0.05 + text_width(self.words, SMALL) / 72 + 0.18


Lines = list[list[Entry]]


def legend_lines(
    scenes: Sequence[Scene], by: str, transfers: Collection[str], labels: bool, width: float
) -> tuple[Lines, Lines]:
    """The lines of the legend on top (kinds of jobs and colours) and of the one at the bottom (shares and messages).

    `labels`: whether bars have labels; `width`: inches of a line.
    """
    count = colour_count(scenes, by)
    looks = [LOOKS[look] for look in sorted({look for scene in scenes for look in scene.looks})]
    top = [Entry(colours(look, count)[:1], f"{look.letter}  {look.words}", look.hatch) for look in looks]
    shown = np.unique(np.linspace(0, count - 1, MOST_SWATCHES).astype(int))
    paints = np.array(colours(LOOKS[0], count))[shown].tolist()
    number = "; number: microbatch" if labels and by == "stage" else ""
    top.append(Entry(paints, f"{by} 0 to {count - 1}{number}", swatch=0.6))
    top.append(Entry([HELD], "bytes held" if scenes[0].sized else "activations held"))
    spent = np.max([scene.breakdown.time.sum(axis=0) for scene in scenes], axis=0) > 0
    bottom = [Entry([paint], SHARES[share]) for share, paint in enumerate(SHARE_COLOURS) if spent[share]]
    programs = [scene.program for scene in scenes]
    sent = {int(kind) for each in programs for kind in np.unique(each.rows.kind[each.rows_of(Op.SEND)])}
    drawn = [name for name in transfers if Kind[name.upper()] in sent]
    bottom += [Entry([TRANSFER_COLOURS[name]], f"sends {name}", swatch=0.1) for name in drawn]
    return _broken(top, width), _broken(bottom, width)


def _broken(entries: Sequence[Entry], width: float) -> Lines:
    """The entries as lines, each with as many as it has room for."""
    lines: Lines = [[]]
    for entry in entries:
        if sum(other.width for other in (*lines[-1], entry)) > width:
            lines.append([])
        lines[-1].append(entry)
    return lines


def draw_legend(drawing: Figure, lines: Lines, x: float, y: float) -> None:
    """Draw the lines from `x` inches on, the first `y` inches above the bottom."""
    from matplotlib.patches import Rectangle

    width, height = drawing.get_size_inches()
    for number, line in enumerate(lines):
        left, middle = x, (y - LINE * number) / height
        for entry in line:
            part = entry.swatch / len(entry.paints) / width
            for k, paint in enumerate(entry.paints):
                box = Rectangle((left / width + k * part, middle - 0.05 / height), part, 0.1 / height)
                box.set(facecolor=paint, linewidth=0)
                drawing.add_artist(box)
                if entry.hatch:
                    hatched = Rectangle(box.get_xy(), part, 0.1 / height, fill=False, hatch=HATCHES[entry.hatch])
                    hatched.set(linewidth=0, edgecolor=INK, alpha=HATCH_OPACITY)
                    drawing.add_artist(hatched)
            drawing.text((left + entry.swatch + 0.05) / width, middle, entry.words, size=SMALL, va="center_baseline")
            left += entry.width
