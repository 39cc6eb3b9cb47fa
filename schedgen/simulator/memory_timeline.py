"""Memory timeline: what every rank holds, instruction by instruction, and the series whose peaks `Memory` has."""

from __future__ import annotations

import numpy as np

from schedgen.analysis import MemoryTimeline, analyse
from schedgen.ir.effects import Buffer
from schedgen.ir.program import Program
from schedgen.simulator.buffer_sizes import BufferSizes


def memory_timeline(program: Program, sizes: BufferSizes | None, *kinds: Buffer) -> MemoryTimeline:
    """Bytes (without `sizes`: numbers) of buffers of these kinds, or of all, by row of a checked, projected program.

    What a stage's owner holds throughout, slots that stand empty and workspaces are not in it.
    """
    lifetimes = analyse(program).lifetimes
    amounts = np.isin(lifetimes.buffer, kinds or tuple(Buffer)).astype(np.int64)
    if sizes is not None:
        amounts *= lifetimes.amounts(sizes.by_kind(program.header))
    return lifetimes.timeline(amounts)
