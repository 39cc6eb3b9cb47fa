"""The microbatches of a pass: the first job that reads one makes it, the last one drops it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mpirun.data.microbatches import Microbatch, MicrobatchSource, digest
from mpirun.data.values import to_device


@dataclass
class Position:
    """The step that a rank is executing."""

    step: int = 0


class MicrobatchReader:
    """Makes the microbatches that the jobs of a rank read, and keeps them for later jobs."""

    def __init__(self, source: MicrobatchSource, device: torch.device, position: Position) -> None:
        self.source, self.device, self.position = source, device, position
        self.kept: dict[int, Microbatch] = {}  # those that a later job still reads
        self.last_reader: dict[int, object] = {}  # by microbatch
        self.digests: dict[int, str] | None = None  # by microbatch; None: not recorded

    def reader(self, mb: int, keep: bool) -> Callable[[], Microbatch]:
        """A function that reads a microbatch for a job; call `reader` in the order of the jobs.

        `keep`: keep the microbatch for later jobs; False for a forward that saves nothing for its backward.
        """
        reader = self.last_reader[mb] = object()

        def read() -> Microbatch:
            batch = self.kept.pop(mb, None)
            if batch is None:
                made = self.source(self.position.step, mb)
                if self.digests is not None:
                    self.digests[mb] = digest(made)
                batch = to_device(made, self.device)
            if keep and self.last_reader[mb] is not reader:
                self.kept[mb] = batch
            return batch

        return read

    def forget(self) -> None:
        """Drop the kept microbatches: the next job that reads one makes it again."""
        self.kept.clear()

    def record_digests(self) -> None:
        """Record a hash of each microbatch that is made from now on."""
        self.digests = {}

    def take_digests(self) -> dict[int, str]:
        """The recorded hashes, by microbatch; recording stops."""
        taken, self.digests = self.digests or {}, None
        return taken
