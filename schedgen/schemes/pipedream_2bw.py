"""PipeDream-2BW: 1F1B without a flush and two buffers of weights: an update takes m microbatches and comes one late.
w(s, b, d) = (P(s) + b mod r(s), the same), and n is that of 1f1b-rr, too   [Narayanan et al. 2021, sections 3.1 and 3.2]
weights: microbatch b uses version max(b div m - 1, 0) at all stages, forward and backward; --group is m, at least r(0) N(0)
"""

from __future__ import annotations

from schedgen.ir.weight_versions import TWO_BUFFERS
from schedgen.schemes import round_robin
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.util.errors import UsageError

PARAMETERS = ("replicas", "group")


def scheme(sizes: Sizes, name: str) -> Scheme:
    """Every stage has equally many replicas, by default one; m is as many microbatches as are in flight, or more."""
    plain = round_robin.scheme(sizes, name, TWO_BUFFERS)
    replicas = sizes.replicas or (1,)
    if len(set(replicas)) > 1:
        raise UsageError(f"{name} has equally many replicas of each stage, not {','.join(map(str, replicas))}")
    in_flight = sizes.stages * replicas[0]
    m = sizes.group or in_flight
    if m < in_flight:
        raise UsageError(f"{name} with --group {m}: {in_flight} microbatches are in flight, and an update needs as many")
    return plain._replace(accumulated=m, parameters={**plain.parameters, "group": m})
