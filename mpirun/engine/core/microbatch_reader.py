"""The microbatches of a pass: the first job that reads one makes it, the last one drops it."""

from __future__ import annotations

from collections.abc import Callable

from mpirun.data.microbatches import Microbatch, digest
from mpirun.data.values import to_device
from mpirun.engine.core.act import Position
from mpirun.engine.setup import Setup


class MicrobatchReader:
    """Makes the microbatches that the jobs of a rank read, and keeps them for later jobs."""

    def __init__(self, setup: Setup, position: Position, count: int) -> None:
        """`count`: microbatches of a pass through the list."""
        self.make, self.device, self.position, self.count = setup.microbatches, setup.device.torch, position, count
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
                number = self.position.accumulation_pass * self.count + mb
                made = self.make(self.position.step, number)
                if self.digests is not None:
                    self.digests[number] = digest(made)
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
