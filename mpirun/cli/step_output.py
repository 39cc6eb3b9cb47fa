"""What rank 0 prints of the steps: a line now and then; --metrics; a summary."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TextIO

import numpy as np

from mpirun.comm.output import say
from mpirun.training.session import Result
from schedgen.ir.header import Header


class Progress:
    """Shows the user the steps of a run so far."""

    def __init__(self, begun: int, steps: int, metrics: str | None) -> None:
        """`begun`: steps done by an earlier run; `metrics`: a file."""
        self.begun, self.steps, self.path = begun, steps, metrics
        self.failed = False  # whether a row could not be written
        self.metrics = _metrics(metrics, begun) if metrics else None
        self.every = max(1, (steps - begun) // 20)
        self.losses: list[float] = []
        self.rates: list[float] = []  # tokens a second
        self.total = 0.0  # seconds

    def step(self, step: int, result: Result) -> None:
        """Show a step that is done; `step` counts from 0."""
        loss = result.loss
        self.losses.append(loss)
        self.rates.append(result.tokens / result.seconds)
        self.total += result.seconds
        rate = self.rates[-1]
        if (step - self.begun) % self.every == 0 or step + 1 == self.steps:
            shown = f"loss {loss:.4f}  grad {result.grad_norm:.3f}  {rate:.0f} tokens/s"
            say(f"step {step + 1}/{self.steps}  {shown}", sys.stdout)
        if self.metrics is not None:
            numbers = {"loss": loss, "grad_norm": result.grad_norm, **result.metrics}
            finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
            row = {"step": step, **finite, "seconds": round(result.seconds, 6), "tokens": result.tokens}
            try:
                self.metrics.write(f"{json.dumps(row)}\n")
                self.metrics.flush()
            except OSError as error:
                say(f"mpirun: note: --metrics {self.path}: {error.strerror}: no more is written to it", sys.stderr)
                self.metrics, self.failed = None, True

    def close(self, header: Header) -> None:
        """Print the summary."""
        if self.losses:
            rate = float(np.median(self.rates))
            say(
                f"{header.scheme['name']}: {len(self.losses)} steps on {header.workers} ranks, "
                f"loss {self.losses[0]:.4f} -> {self.losses[-1]:.4f}, {rate:.0f} tokens/s, {self.total:.1f} s",
                sys.stdout,
            )
        else:
            say(f"{self.begun} of {self.steps} steps are done", sys.stdout)


def _metrics(path: str, begun: int) -> TextIO:
    """The file that takes rows; rows of steps before `begun` stay in it, but for one that a kill has cut."""
    if path == "-":
        return sys.stdout
    file = Path(path)
    if file.is_file():
        rows = [row for row in file.read_text().splitlines(keepends=True) if begun and row.endswith("\n")]
        file.write_text("".join(row for row in rows if json.loads(row)["step"] < begun))
    return file.open("a")
