"""What rank 0 prints of the steps: a bar on a terminal, a line now and then elsewhere, --metrics, a summary."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TextIO

import numpy as np
from tqdm import tqdm

from mpirun.training.session import Result
from schedgen.ir.header import Header
from schedgen.util.errors import UsageError


class Progress:
    """The steps of a run so far, as its user sees them."""

    def __init__(self, begun: int, steps: int, metrics: str | None) -> None:
        """`begun`: steps done by an earlier run; `metrics`: a file. UsageError if it cannot be."""
        self.begun, self.steps = begun, steps
        self.metrics = _metrics(metrics, begun) if metrics else None
        self.bar = tqdm(total=steps, initial=begun, unit="step") if sys.stderr.isatty() else None
        self.every = max(1, (steps - begun) // 20)
        self.losses: list[float] = []
        self.rates: list[float] = []  # tokens a second
        self.total = 0.0  # seconds

    def step(self, step: int, result: Result) -> None:
        """Show a step, counted from 0, that is done."""
        loss = result.loss
        self.losses.append(loss)
        self.rates.append(result.tokens / result.seconds)
        self.total += result.seconds
        rate = self.rates[-1]
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {loss:.4f}, {rate:.0f} tokens/s")
            self.bar.update()
        elif (step - self.begun) % self.every == 0 or step + 1 == self.steps:
            print(
                f"step {step + 1}/{self.steps}  loss {loss:.4f}  grad {result.grad_norm:.3f}  {rate:.0f} tokens/s",
                flush=True,
            )
        if self.metrics is not None:
            numbers = {"loss": loss, "grad_norm": result.grad_norm, **result.metrics}
            finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
            row = {"step": step, **finite, "seconds": round(result.seconds, 6), "tokens": result.tokens}
            print(json.dumps(row), file=self.metrics, flush=True)

    def close(self, header: Header) -> None:
        """Print the summary."""
        if self.bar is not None:
            self.bar.close()
        if self.losses:
            rate = float(np.median(self.rates))
            print(
                f"{header.scheme['name']}: {len(self.losses)} steps on {header.workers} ranks, "
                f"loss {self.losses[0]:.4f} -> {self.losses[-1]:.4f}, {rate:.0f} tokens/s, {self.total:.1f} s",
                flush=True,
            )
        else:
            print(f"{self.begun} of {self.steps} steps are done", flush=True)


def _metrics(path: str, begun: int) -> TextIO:
    """The file, opened, with the rows of steps that an earlier run has done."""
    try:
        rows = Path(path).read_text().splitlines(keepends=True) if begun and Path(path).exists() else []
        file = Path(path).open("w")  # noqa: SIM115 -- open as long as the run lasts
        file.writelines(row for row in rows if _step(row) < begun)
    except OSError as error:
        raise UsageError(f"--metrics {path}: {error.strerror}") from None
    return file


def _step(row: str) -> float:
    """The step that a row is of; infinite where it is of none."""
    try:
        return int(json.loads(row)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf
