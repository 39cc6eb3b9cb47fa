"""Built-in schemes, compiled."""

from __future__ import annotations

from typing import Any

from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.ir.program import Program
from schedgen.schemes import load
from schedgen.schemes.scheme import Sizes

ONE_STAGE_A_WORKER = (
    "ddp", "fsdp", "gpipe", "1f1b", "lpp", "fslpp", "zb-h1", "zb-h2", "chimera", "1f1b-rr", "pipedream",
    "pipedream-2bw",
)  # fmt: skip


def sizes_of(scheme: str, workers: int = 4, microbatches: int = 8) -> Sizes:
    """Sizes of one stage a worker, or of two for schemes that are made for two."""
    stages = workers if scheme in ONE_STAGE_A_WORKER else 2 * workers
    return Sizes(stages, microbatches, workers, 2 if "lpp" in scheme else None)


def compiled(scheme: str, *sizes: Any, **options: Any) -> Program:
    """A built-in scheme, or that of a file, compiled with these options. `sizes`: Sizes or its fields; none: any."""
    found = sizes[0] if sizes and isinstance(sizes[0], Sizes) else Sizes(*sizes) if sizes else sizes_of(scheme)
    return compile(load(scheme, found, options.get("tensor", 1)), found, Options(**options))
