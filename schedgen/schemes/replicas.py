"""Replicas of a scheme: data times pipeline parallelism.

R replicas of a scheme for P workers run side by side on R P workers, and share only the sums of gradients. Microbatches
are dealt out in turn, so microbatch b is number b div R of replica b mod R:

    b                    0    1    2    3    4
    R = 2, P = 2:        ranks 0, 1 run b = 0, 2, 4 as their 0, 1, 2; ranks 2, 3 run b = 1, 3 as their 0, 1
    interleaved:         ranks 0, 2 run b = 0, 2, 4; ranks 1, 3 run b = 1, 3
"""

from __future__ import annotations

from typing import Any

from schedgen.schemes.scheme import Scheme, Sizes, fourth_argument, no_order
from schedgen.util.errors import NeedsOption


def replicated(scheme: Scheme, sizes: Sizes, interleave: bool = False) -> Scheme:
    """`sizes.replicas` replicas of a scheme, which was made for `sizes.per_replica()`.

    A replica has consecutive ranks or, with `interleave`, every R-th rank, so that the replicas of a stage are
    neighbours. Divided weights have one owner for all replicas: shard k is in replica k mod R, k div R workers after
    the one that w names, unless w takes k: then it is what w says of k div R.
    NeedsOption if the number of workers is known only from w.
    """
    R, P = sizes.replicas, scheme.workers
    assert isinstance(R, int)
    if P is None:
        raise NeedsOption(f"{scheme.name} with --replicas needs --workers, those of all replicas")
    takes_shard = fourth_argument(scheme.w) == "k"

    def rank(worker: Any, replica: Any) -> Any:
        return worker * R + replica if interleave else replica * P + worker

    def w(s: Any, b: Any, d: Any, *t: Any) -> Any:
        weights, compute = scheme.w(s, b // R, d, *t)
        return rank(weights, b % R), rank(compute, b % R)

    def w_of_shard(s: Any, b: Any, d: Any, k: Any) -> Any:
        weights, compute = scheme.w(s, b // R, d, *((k // R,) if takes_shard else ()))
        owner = weights if takes_shard else (weights + k // R) % P
        return rank(owner, k % R if divided else b % R), rank(compute, b % R)

    divided = max(sizes.shards or (1,)) > 1
    return scheme._replace(
        workers=R * P,
        w=w_of_shard if divided or takes_shard else w,
        n=scheme.n if scheme.n is no_order else dealt(scheme.n, R),
        unsplit_backward=dealt(scheme.unsplit_backward, R),
        delayed_send=dealt(scheme.delayed_send, R),
        parameters={**scheme.parameters, "replicas": R},
        replicas=R,
    )


def dealt(function: Any, replicas: int) -> Any:
    """A function of (s, b) or (s, b, d) whose b counts the microbatches of one of `replicas`, for b of all of them."""
    return function and (lambda s, b, *d: function(s, b // replicas, *d))
