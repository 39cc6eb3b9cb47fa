"""How large a schedule may be: anything larger is refused before memory is allocated for it.

The MOST_ numbers hold for every schedule, `Limits` for one file.
"""

from __future__ import annotations

from typing import NamedTuple

from schedgen.util.errors import UsageError

MOST_JOBS = 2**27  # of a schedule, about a hundred bytes each
MOST_WORKERS = 2**20
MOST_STAGES = 2**20  # of a model's graph file
MOST_LAYERS = 2**31  # of one of its stages
MOST_PAIRS = 2**25  # pairs of a worker and a stage: tables have an entry for each
MOST_RATIO = 1e6  # of the longest job's duration to the shortest's


class Limits(NamedTuple):
    """The exclusive upper bounds of the numbers in a file."""

    workers: int
    stages: int
    microbatches: int
    groups: int
    ties: int
    versions: int  # 0: weights have none
    shards: tuple[int, ...] = ()  # of the weights of each stage; empty: none are divided
    parts: tuple[int, ...] = ()  # of the gradient of each stage; empty: as the weights


def check_jobs(stages: int, microbatches: int, per_pair: int) -> None:
    """UsageError if there are too many jobs; `per_pair`: jobs per stage and microbatch."""
    if stages * microbatches * per_pair > MOST_JOBS:
        raise UsageError(f"{stages} stages x {microbatches} microbatches are more than {MOST_JOBS} jobs: too many")


def check_workers(workers: int, stages: int, what: str = "stages") -> None:
    """UsageError if there are too many workers, or too many pairs of a worker and a stage (in errors: `what`)."""
    if workers > MOST_WORKERS:
        raise UsageError(f"{workers} workers are too many: {MOST_WORKERS} at the most")
    if workers * stages > MOST_PAIRS:
        raise UsageError(f"{workers} workers x {stages} {what} are too many: {MOST_PAIRS} at the most")
