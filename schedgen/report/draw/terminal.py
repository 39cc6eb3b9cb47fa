"""Scenes in the terminal: one line for each worker, in colour if the terminal has colours.

A job is shown as its letter and microbatch, or as much of them as fits, over a width that stands for its duration.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np

from schedgen.report.draw.colours import LOOKS, colours
from schedgen.report.draw.scene import Scene, colour_count, format_time, heading
from schedgen.simulator.timeline import SHARES
from schedgen.util.arrays import Numbers

NARROWEST = 20  # columns that a time axis takes even on the narrowest terminal


class Style(NamedTuple):
    """What colours stand for, and whether there are any."""

    by: str  # microbatch or stage
    paints: list[list[str]]  # by kind of job and number
    colour: bool


class Cell(NamedTuple):
    """Characters of the same colours."""

    text: str
    ink: str | None = None  # #rrggbb; None: the terminal's
    paper: str | None = None


def draw(scenes: Sequence[Scene], width: int, by: str, colour: bool) -> list[list[Cell]]:
    """Lines of cells, at most `width` columns each, or as many as NARROWEST needs; `by`: what colours stand for."""
    ranks = max(scene.program.header.workers for scene in scenes)
    left = len(str(ranks - 1)) + 2  # the rank and " |"
    right = len("| 100%  999")
    columns = max(width - left - right, NARROWEST)
    span = max(scene.makespan for scene in scenes)
    scale = columns / span
    if scale >= 1:  # whole columns per unit, so that jobs of equal length have equal width
        scale = float(int(scale))
    style = Style(by, [colours(look, colour_count(scenes, by)) for look in LOOKS], colour)
    lines: list[list[Cell]] = []
    shown: set[str] = set()  # characters in the rows
    for scene in scenes:
        if lines:
            lines.append([])
        busy, latency = scene.shares()[:, 0].mean(), format_time(scene.latency, scene.seconds)
        sentences = [f"{heading(scene)}.", f"Latency {latency}, busy {busy:.1%}."]
        lines += [[Cell(text)] for text in _wrap(sentences, max(width, NARROWEST))]
        rows = _rows(scene, scale, span, left, style)
        shown |= {character for row in rows for cell in row[1:-1] for character in cell.text}
        lines += rows
    lines.append([])
    sentences = _legend(scenes, by if colour else "", shown, scale)
    lines += [[Cell(text)] for text in _wrap(sentences, max(width, NARROWEST))]
    return lines


def show(scenes: Sequence[Scene], by: str) -> None:
    """Print the scenes to standard output, in colour if that is a terminal with colours and NO_COLOR is not set."""
    width = shutil.get_terminal_size((80, 24)).columns
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") not in (None, "dumb")
    colour = colour and find_spec("rich") is not None  # of the extra `draw`
    lines = draw(scenes, width, by, colour)
    if not colour:
        for line in lines:
            print("".join(cell.text for cell in line).rstrip())
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(width=width, highlight=False)
    for line in lines:
        text = Text(no_wrap=True, overflow="ignore")
        for cell in line:
            style = " ".join(part for part in (cell.ink, cell.paper and f"on {cell.paper}") if part)
            text.append(cell.text, style)
        console.print(text, crop=False)


def _rows(scene: Scene, scale: float, span: float, left: int, style: Style) -> list[list[Cell]]:
    """A title line, then one line for each worker; `scale`: columns a unit of time, `left`: columns before the axis."""
    busy, peak = scene.shares()[:, 0], scene.peak_activations()
    columns, most = (max(1, int(np.ceil(time * scale - 1e-9))) for time in (scene.makespan, span))
    lines = [[Cell(" " * (left + most + 1) + " busy peak")]]
    for rank in range(scene.program.header.workers):
        bars = np.flatnonzero(scene.bars.worker == rank)
        inner = (_mixed if _dense(scene, scale) else _jobs)(scene, bars, scale, columns, style)
        lines.append(
            [Cell(f"{rank:{left - 2}} |"), *inner, Cell(f"|{' ' * (most - columns)}{busy[rank]:5.0%}{peak[rank]:5}")]
        )
    return lines


def _dense(scene: Scene, scale: float) -> bool:
    """Whether most jobs are narrower than a column."""
    return float(np.median(scene.bars.length)) * scale < 1


def _jobs(scene: Scene, numbers: Numbers, scale: float, columns: int, style: Style) -> list[Cell]:
    """The cells of one worker's bars, which have these numbers, each as wide as it is long."""
    bars, cells, column = scene.bars, [], 0
    for k in numbers.tolist():
        first, stop = (round(float(time) * scale) for time in (bars.start[k], bars.start[k] + bars.length[k]))
        first, stop = max(first, column), min(stop, columns)
        if stop <= first:  # it is shorter than a column, or the job before it has that column
            continue
        cells.append(Cell("." * (first - column)))
        look, stage, mb = LOOKS[bars.look[k]], int(bars.stage[k]), int(bars.mb[k])
        index = mb if style.by == "microbatch" else stage
        if style.colour:
            text = _label(look.letter, mb, stop - first, " ")
            cells.append(Cell(text, look.ink, style.paints[bars.look[k]][max(index, 0)]))
        else:
            cells.append(Cell(_label(look.letter, mb, stop - first, "-")))
        column = stop
    return [*cells, Cell("." * (columns - column))]


def _mixed(scene: Scene, numbers: Numbers, scale: float, columns: int, style: Style) -> list[Cell]:
    """One worker's columns: the kind of job that takes most of each, in the colour of the job in its middle."""
    bars = scene.bars
    edges = np.arange(columns + 1) / scale
    time = np.zeros((len(LOOKS), columns))
    for look in range(len(LOOKS)):
        chosen = numbers[bars.look[numbers] == look]
        ends = np.stack([bars.start[chosen], bars.start[chosen] + bars.length[chosen]], axis=1).ravel()
        worked = np.stack([0 * bars.length[chosen], bars.length[chosen]], axis=1).ravel().cumsum()
        if len(chosen):
            time[look] = np.diff(np.interp(edges, ends, worked))
    idle = np.minimum(edges[1:], scene.makespan) - edges[:-1] - time.sum(axis=0)
    middle = np.searchsorted(bars.start[numbers], (edges[1:] + edges[:-1]) / 2, side="right") - 1
    index_of = bars.mb if style.by == "microbatch" else bars.stage
    cells = []
    for column in range(columns):
        kind = int(time[:, column].argmax())
        if idle[column] > time[:, column].sum():
            cells.append(Cell("."))
        elif style.colour:
            index = int(index_of[numbers[max(middle[column], 0)]])
            cells.append(Cell(LOOKS[kind].letter, LOOKS[kind].ink, style.paints[kind][max(index, 0)]))
        else:
            cells.append(Cell(LOOKS[kind].letter))
    return cells


def _label(letter: str, number: int, width: int, filling: str) -> str:
    text = f"{letter}{number}" if number >= 0 and width > len(str(number)) else letter
    return text.ljust(width, filling)


def _legend(scenes: Sequence[Scene], by: str, shown: set[str], scale: float) -> list[str]:
    """Sentences that explain the rows; `by`: what colours stand for, "" without; `shown`: characters in the rows."""
    looks, all_bars = [look for look in LOOKS if look.letter in shown], [scene.bars for scene in scenes]
    parts = [f"{'; '.join(f'{look.letter} {look.words}' for look in looks)}."] if looks else []
    if any(_dense(scene, scale) for scene in scenes):
        parts.append("A column shows the kind of job that takes most of it.")
    elif any((np.rint(bars.start * scale) >= np.rint((bars.start + bars.length) * scale)).any() for bars in all_bars):
        parts.append("Jobs too short for a column are not shown.")
    signs = ["number: microbatch"] if shown & set("0123456789") else []
    signs += [f"colour: {by}"] if by else []
    signs += ["dots: idle"] if "." in shown else []
    signs += ["dashes: the job goes on"] if "-" in shown else []
    parts += [f"{'; '.join(signs).capitalize()}."] if signs else []
    parts.append("Peak: activations held.")
    for scene in scenes:
        mean = scene.shares().mean(axis=0)
        spent = [f"{name} {share:.1%}" for name, share in zip(SHARES, mean, strict=True) if share > 0]
        which = f" ({scene.name})" if len(scenes) > 1 else ""
        parts.append(f"Time{which}: {', '.join(spent)}.")
    return parts


def _wrap(parts: Sequence[str], width: int) -> list[str]:
    return textwrap.wrap(" ".join(parts), width, break_long_words=False, break_on_hyphens=False)
