"""PipeDream: 1F1B-RR without a flush; every backward is followed by a step, which makes a new version of the weights.
w(s, b, d) = (P(s) + b mod r(s), the same), and n is that of 1f1b-rr, too   [PipeDream, sections 3.2 and 3.3]
weights: a forward uses the newest version, its backward the same; with --updates vertical all stages the first's
"""

from __future__ import annotations

from schedgen.schemes import round_robin
from schedgen.schemes.scheme import Scheme, Sizes

PARAMETERS = ("replicas",)


def scheme(sizes: Sizes) -> Scheme:
    return round_robin.scheme(sizes, "pipedream", "stash")
