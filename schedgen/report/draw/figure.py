"""Scenes as SVG or PNG by matplotlib: one below another on one time axis, with legends above and below.

Large schedules are drawn as pixels inside the SVG.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import BinaryIO

import numpy as np

from schedgen.report.draw import figure_axes
from schedgen.report.draw.figure_legend import draw_legend, legend_entries, legend_height
from schedgen.report.draw.figure_style import LABEL, LARGE, SMALL, matplotlib_style, save, text_width
from schedgen.report.draw.scene import Scene, colour_count, heading, key_figures

# Inches.
NARROWEST, WIDEST, TALLEST = 9.0, 14.0, 100.0  # of the picture
LEFT, RIGHT, BETWEEN = 0.42, 1.70, 0.42  # margins, and the space between two scenes
SHARES_LEFT, SHARES_WIDTH = 1.55, 1.05  # where shares of time begin, from the right edge, and how wide they are


def figure(scenes: Sequence[Scene], out: BinaryIO, form: str, by: str, transfers: Collection[str]) -> None:
    """Write the picture as `form`, svg or png; `by`: what colours stand for, microbatch or stage.

    `transfers`: kinds of messages to draw.
    """
    with matplotlib_style() as Figure:
        span = max(scene.makespan for scene in scenes)
        rows, width = [_row_height(scene) for scene in scenes], _width(scenes, span)
        inner = width - LEFT - RIGHT
        wide = inner * 72 / span  # points of a unit of time
        labels = [figure_axes.fitting_labels(scene, row, wide) for scene, row in zip(scenes, rows, strict=True)]
        above, below = legend_entries(scenes, by, transfers, any(labels))
        heights = [row * scene.program.header.workers for row, scene in zip(rows, scenes, strict=True)]
        top, bottom = 0.45 + legend_height(above), 0.39 + legend_height(below)
        total = sum(heights) + top + bottom + BETWEEN * (len(scenes) - 1)
        drawing = Figure(figsize=(width, total))
        y = total - top
        for scene, height, texts in zip(scenes, heights, labels, strict=True):
            bottom_edge, relative_height = (y - height) / total, height / total
            axes = drawing.add_axes((LEFT / width, bottom_edge, inner / width, relative_height))
            figure_axes.draw_rows(axes, scene, by, colour_count(scenes, by), span, wide, texts)
            figure_axes.draw_transfers(axes, scene, transfers)
            figure_axes.draw_axis(axes, scene, captioned=scene is scenes[-1])
            axes.set_title(heading(scene), size=LARGE, loc="left", pad=5, weight="bold")
            axes.set_title(key_figures(scene), size=SMALL, loc="right", pad=5)
            box = ((width - SHARES_LEFT) / width, bottom_edge, SHARES_WIDTH / width, relative_height)
            figure_axes.draw_shares(drawing.add_axes(box), scene)
            y -= height + BETWEEN
        draw_legend(drawing, above, LEFT, total - 0.08)
        draw_legend(drawing, below, LEFT, legend_height(below) + 0.04)
        save(drawing, out, form)


def _width(scenes: Sequence[Scene], span: float) -> float:
    """Inches of the picture's width: within limits, enough that most jobs have room for letter and number."""
    shortest = min(float(np.median(scene.bars.length[scene.bars.length > 0])) for scene in scenes)
    longest = max(text_width(f"B{int(scene.bars.mb.max())}", LABEL) for scene in scenes)
    return min(max(LEFT + RIGHT + span / shortest * (longest + 2) / 72, NARROWEST), WIDEST)


def _row_height(scene: Scene) -> float:
    """Inches of a worker's row."""
    workers = scene.program.header.workers
    return min(max(5.0 / workers, 0.075), 0.36, TALLEST / workers)
