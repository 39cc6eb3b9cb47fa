"""1F1B-RR: stages with replicas, which take microbatches in turn, forward and backward on the same one; with a flush.
w(s, b, d) = (P(s) + b mod r(s), the same); P(s): how many workers the stages before s have   [PipeDream, section 3.2]
n(s, b, F) = 2 (b div r(s)), n(s, b, B) = 2 (b div r(s)) + 2 N(s) - 1, strict; where all r(s) are 1 that is 1F1B
N(s) = ceil((W - P(s)) / r(s)): microbatches that a replica of s has in flight; for the first stage it is the NOAM
"""

from __future__ import annotations

from typing import Any

import numpy as np

from schedgen.ir.instructions import F
from schedgen.ir.limits import check_workers
from schedgen.ir.weights import FLUSH
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.util.errors import UsageError

PARAMETERS = ("replicas",)


def scheme(sizes: Sizes, name: str, updates: str = FLUSH) -> Scheme:
    """1F1B-RR with r(s) replicas of stage s, 1 by default, W in all; no stage has more replicas than microbatches."""
    check_workers(sizes.stages, sizes.stages)  # every stage has one or more
    replicas = np.array(sizes.replicas or [1] * sizes.stages)
    if len(replicas) != sizes.stages:
        numbers = ",".join(map(str, replicas.tolist()))
        raise UsageError(f"{name} takes a number of replicas for each of {sizes.stages} stages, not {numbers}")
    before = np.concatenate([[0], np.cumsum(replicas)])
    workers = int(before[-1])
    if sizes.workers not in (None, workers):
        raise UsageError(f"{name} with these replicas has {workers} workers, not {sizes.workers}")
    if sizes.microbatches < replicas.max():
        raise UsageError(f"{name}: a stage of {replicas.max()} replicas needs a microbatch for each of them")

    in_flight = -(-(workers - before[:-1]) // replicas)

    def w(s: Any, b: Any, d: Any) -> Any:
        worker = before[s] + b % replicas[s] + 0 * d
        return worker, worker

    def n(s: Any, b: Any, d: Any) -> Any:
        return 2 * (b // replicas[s]) + np.where(d == F, 0, 2 * in_flight[s] - 1)

    return Scheme(name, workers, w, n, "1f1b-rr", "strict", parameters={"replicas": replicas.tolist()}, updates=updates)
