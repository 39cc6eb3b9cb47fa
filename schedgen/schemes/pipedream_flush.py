"""PipeDream's order with a flush: 1F1B by the name it has there.
w(s, b, d) = (s mod W, s mod W)   [Narayanan et al. 2021, "Memory-efficient pipeline-parallel training"; W <= S]
n(s, b, F) = s + 2b, n(s, b, B) = 2S - 1 - s + 2b, strict
"""

from __future__ import annotations

from schedgen.schemes import one_f_one_b
from schedgen.schemes.scheme import Scheme, Sizes

PARAMETERS = ("workers",)


def scheme(sizes: Sizes) -> Scheme:
    return one_f_one_b.scheme(sizes, "pipedream-flush")
