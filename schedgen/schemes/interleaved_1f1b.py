"""Interleaved 1F1B: v stages a worker, the pipeline goes round v times; a bubble v times smaller than 1F1B's.
w(s, b, d) = (s mod W, s mod W)   [Narayanan et al. 2021, "Efficient large-scale training", section 2.2; S = vW]
n: forwards and backwards in rounds of microbatches, alternating after a warm-up, strict
"""

from __future__ import annotations

from typing import Any

import numpy as np

from schedgen.ir.instructions import F
from schedgen.schemes.looped import chunked
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.util.errors import UsageError

PARAMETERS = ("workers", "chunks", "group")


def scheme(sizes: Sizes, name: str) -> Scheme:
    """Interleaved 1F1B for S = v W; microbatches form equal groups, or groups of `sizes.group` and a rest."""
    W, v = chunked(name, sizes)
    parameters = {"chunks": v}
    if sizes.group is not None:
        parameters["group"] = sizes.group
    batches, group = sizes.microbatches, group_size(name, W, sizes)

    def n(s: Any, b: Any, d: Any) -> Any:
        # The k-th forward of worker r has n = 2 (k - warm-up), the k-th backward 2k + 1; warm-up is v - 1 groups and
        # 2 (W - 1 - r) more.
        k = turn(s, b, d, W, v, batches, group)
        warm_up = 2 * (W - 1 - s % W) + (v - 1) * group
        return np.where(d == F, 2 * (k - warm_up), 2 * k + 1)

    return Scheme(name, W, lambda s, b, d: (s % W, s % W), n, name, "strict", parameters=parameters)


def group_size(name: str, W: int, sizes: Sizes) -> int:
    """How many microbatches a worker runs on a stage before its next stage: W, or B / (B div W), or as given.

    A group of fewer than W leaves workers without input. So Megatron-LM refuses a microbatch-group-size-per-vp-stage
    below W, or one that leaves fewer than W for the last group.
    """
    batches, group = sizes.microbatches, sizes.group
    if group is None:
        rounds = max(1, batches // W)
        if batches % rounds:
            raise UsageError(f"{name} runs in {rounds} rounds of equally many microbatches: {batches} do not divide")
        return batches // rounds
    if not W <= group <= batches or 0 < batches % group < W:
        raise UsageError(
            f"{name} with --group {group}: each of its groups, the last too, needs {W} microbatches or more"
        )
    return group


def turn(s: Any, b: Any, d: Any, W: int, v: int, batches: int, group: int) -> Any:
    """The index of a job among its worker's jobs of that direction: groups of microbatches pass stage after stage."""
    begin = b // group * group
    chunk = np.where(d == F, s // W, v - 1 - s // W)
    return begin * v + chunk * np.minimum(group, batches - begin) + b - begin
