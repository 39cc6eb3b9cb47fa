"""1F1B: GPipe's placement; a worker starts backwards as soon as it can, so few activations are alive.
w(s, b, d) = (s mod W, s mod W)   [PipeDream, section 3.2, with a flush: PipeDream-Flush; W <= S]
n(s, b, F) = s + 2b, n(s, b, B) = 2S - 1 - s + 2b, strict
"""

from __future__ import annotations

from schedgen.schemes.orders import ORDERS
from schedgen.schemes.scheme import Scheme, Sizes

PARAMETERS = ("workers",)


def scheme(sizes: Sizes, name: str, order: str = "1f1b") -> Scheme:
    """1F1B on W <= S workers, or a pipeline in another of ORDERS; W = S if `sizes` gives none."""
    W = sizes.spread(name, "stages")
    return Scheme(name, W, lambda s, b, d: (s % W, s % W), ORDERS[order](sizes), order, "strict")
