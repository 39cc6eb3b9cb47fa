"""Sizes at which a built-in scheme is tested."""

from __future__ import annotations

from schedgen.schemes.scheme import Sizes

ONE_STAGE_A_WORKER = (
    "ddp", "fsdp", "gpipe", "1f1b", "lpp", "fslpp", "zb-h1", "zb-h2", "chimera", "1f1b-rr", "pipedream",
    "pipedream-2bw",
)  # fmt: skip


def sizes_of(scheme: str, workers: int = 4, microbatches: int = 8) -> Sizes:
    """Sizes of one stage a worker, or of two for schemes that are made for two."""
    stages = workers if scheme in ONE_STAGE_A_WORKER else 2 * workers
    return Sizes(stages, microbatches, workers, 2 if "lpp" in scheme else None)
