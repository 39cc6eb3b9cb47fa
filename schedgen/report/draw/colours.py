"""The colours of all pictures: hue stands for the microbatch or stage, lightness for the kind of job.

They are made in OKLCH, where equal numbers look equally light and equally strong
[Ottosson 2020, A perceptual color space for image processing].
"""

from __future__ import annotations

import math
from typing import NamedTuple

INK, PAPER = "#1c2430", "#ffffff"
STEP, OVERHEAD = "#b03c82", "#858d99"  # optimizer steps, and instructions that do not compute
TRACK = "#f1f3f6"  # behind bars, where a worker has nothing to do
HELD = "#b5c79a"  # memory that workers hold
TRANSFER_COLOURS = {
    "x": "#2f6db3",
    "g": "#b0483f",
    "w": "#3c8a5b",
    "dw": "#8a5bb0",
    "t": "#8a5bb0",
    "saved": "#7a7a7a",
}  # by kind


class Look(NamedTuple):
    """How a kind of job looks, with and without colour."""

    letter: str
    words: str  # in legends
    lightness: float  # OKLCH
    chroma: float  # OKLCH; 0: it has one colour, whatever its microbatch and stage
    hatch: str  # "": plain; "/": rising lines; "\\": falling; ".": dots
    ink: str  # colour of its label


LOOKS = (
    Look("F", "forward", 0.88, 0.055, "", INK),
    Look("B", "backward", 0.55, 0.100, "", PAPER),
    Look("I", "backward, inputs", 0.73, 0.088, "/", INK),
    Look("W", "backward, weights", 0.44, 0.080, "\\", PAPER),
    Look("R", "recompute", 0.88, 0.055, ".", INK),
    Look("S", "optimizer step", 0.0, 0.0, "", PAPER),
)
# By share of time, as `schedgen.simulator.timeline.SHARES`; contrast to TRACK is at least 3:1 [WCAG 2.1, 1.4.11].
SHARE_COLOURS = (
    "#44546a",  # busy
    "#5b86cf",  # warm-up
    "#cf6a54",  # dependency
    "#9a78c4",  # cool-down
    "#b07d00",  # transfer
    "#7a5a1e",  # send
    "#3f7f99",  # offload
    "#2c9478",  # sum
    STEP,
    OVERHEAD,
)


def hue(index: int, count: int) -> float:
    """OKLCH hue in degrees of entry `index` of `count`: from blue over green and yellow to rose, not a full circle."""
    return (258.0 - 285.0 * index / max(count - 1, 1) * min(1.0, (count - 1) / 5)) % 360


def colours(look: Look, count: int) -> list[str]:
    """One colour for each of `count` microbatches or stages, as #rrggbb."""
    if not look.chroma:
        return [STEP] * count
    return [oklch(look.lightness, look.chroma, hue(index, count)) for index in range(count)]


def oklch(lightness: float, chroma: float, degrees: float) -> str:
    """An OKLCH colour as #rrggbb, with channels that sRGB cannot show cut off [Ottosson 2020]."""
    a, b = chroma * math.cos(math.radians(degrees)), chroma * math.sin(math.radians(degrees))
    l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3  # noqa: E741  the paper's name
    m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    s = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
        -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
        -0.0041960863 * l - 0.7034186147 * m + 1.7076147010 * s,
    )
    channels = [min(max(value, 0.0), 1.0) for value in linear]
    gamma = [12.92 * v if v <= 0.0031308 else 1.055 * v ** (1 / 2.4) - 0.055 for v in channels]
    return "#" + "".join(f"{round(255 * value):02x}" for value in gamma)
