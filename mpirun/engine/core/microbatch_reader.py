"""The microbatches of a pass: the first job that reads one makes it, the last one drops it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mpirun.data.microbatches import Microbatch, MicrobatchSource, digest
from mpirun.data.values import to_device


@dataclass
class Position:
    """The step that a rank is executing, and the accumulation pass (one pass through the list) within it."""

    passes: int  # per step
    step: int = 0
    accumulation_pass: int = 0

    @property
    def in_last_pass(self) -> bool:
        """Whether this is the step's last pass, at whose NORM the gradients of all passes are complete."""
        return self.accumulation_pass == self.passes - 1


class MicrobatchReader:
    """Makes the microbatches that the jobs of a rank read, and keeps them for later jobs."""

    def __init__(self, source: MicrobatchSource, device: torch.device, position: Position, count: int) -> None:
        """`count`: microbatches of a pass through the list."""
        self.source, self.device, self.position, self.count = source, device, position, count
        self.kept: dict[int, Microbatch] = {}  # those that a later job still reads
        self.last_reader: dict[int, object] = {}  # by microbatch
        self.digests: dict[int, str] | None = None  # by microbatch; None: not recorded

    def number(self, mb: int) -> int:
        """The number in the step of a microbatch of the current pass."""
        return self.position.accumulation_pass * self.count + mb

    def reader(self, mb: int, keep: bool) -> Callable[[], Microbatch]:
        """A function that reads a microbatch for a job; call `reader` in the order of the jobs.

        `keep`: keep the microbatch for later jobs; False for a forward that saves nothing for its backward.
        """
        reader = self.last_reader[mb] = object()

        def read() -> Microbatch:
            batch = self.kept.pop(mb, None)
            if batch is None:
                made = self.source(self.position.step, self.number(mb))
                if self.digests is not None:
                    self.digests[self.number(mb)] = digest(made)
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
