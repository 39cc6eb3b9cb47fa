"""PipeDream-2BW: 1F1B without a flush; updates of m microbatches use weights that are one update old, in two buffers.
w(s, b, d) = (P(s) + b mod r, the same), and n is that of 1f1b-rr, too   [Narayanan et al. 2021, "2BW", section 3.1]
weights: all jobs of microbatch b use version max(b div m - 1, 0); m is --group, at least the S r that are in flight
"""

from __future__ import annotations

from schedgen.ir.weights import TWO_BUFFERS
from schedgen.schemes import round_robin
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.util.errors import UsageError

PARAMETERS = ("replicas", "group")


def scheme(sizes: Sizes, name: str) -> Scheme:
    """PipeDream-2BW with equally many replicas of all stages, one by default; m >= the microbatches in flight."""
    plain = round_robin.scheme(sizes, name, TWO_BUFFERS)
    replicas = sizes.replicas if isinstance(sizes.replicas, tuple) else (1,)
    if len(set(replicas)) > 1:
        raise UsageError(f"{name} has equally many replicas of each stage, not {','.join(map(str, replicas))}")
    in_flight = sizes.stages * replicas[0]
    m = sizes.group or in_flight
    if m < in_flight:
        raise UsageError(f"{name} needs --group of at least {in_flight}, the microbatches in flight, not {m}")
    return plain._replace(accumulated=m, parameters={**plain.parameters, "group": m})
