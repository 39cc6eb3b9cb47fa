"""`python -m mpirun FILE`: an Engine by the options of the command line, its steps, and what rank 0 prints of them."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from pathlib import Path
from typing import TextIO

import numpy as np
from mpi4py import MPI

from mpirun.checkpoint.reader import newest_checkpoint
from mpirun.cli.optimizer import recipe
from mpirun.cli.options import TrainOptions
from mpirun.comm.fail_together import on_rank_0
from mpirun.comm.output import note, say
from mpirun.comm.waiting import RunComm, sleeping_any
from mpirun.engine.options import RunOptions, values_of
from mpirun.engine.read_schedule import read_schedule
from mpirun.model.load_model import load_model
from mpirun.training.engine import Engine
from mpirun.training.session import Result
from schedgen.ir.header import Header
from schedgen.util.files import check_writable


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


class Run:
    """One rank's part of a run."""

    def __init__(self, comm: MPI.Intracomm, options: TrainOptions) -> None:
        self.comm = comm = RunComm(comm)
        self.options = options
        for option, path in (("--metrics", options.metrics), ("--trace", options.trace)):
            on_rank_0(comm, lambda: check_writable(option, path))
        schedule = read_schedule(comm, options.file)
        checkpoint = newest_checkpoint(comm, options.resume, options.save) if options.resume else None
        seed = (checkpoint.seed if checkpoint else 0) if options.seed is None else options.seed
        self.engine = Engine(
            schedule, lambda stages: load_model(options.model, stages, seed), optimizer=recipe(options), comm=comm,
            **{**values_of(options, RunOptions), "seed": seed},
        )  # fmt: skip
        assert self.engine.session is not None
        self.session = self.engine.session
        self.session.counts_memory = options.memory
        with contextlib.ExitStack() as end:
            end.push(self.engine.__exit__)  # called if the set-up fails, else at the end of the run
            self.engine.resume(checkpoint)
            if options.save:
                self.engine.checkpoints.open(Path(options.save))
            self.progress = on_rank_0(comm, lambda: Progress(self.engine.steps, options.steps, options.metrics))
            self.end = end.pop_all()
        self.saved = self.left = False  # whether the last step is saved, and whether SIGTERM has ended them early

    def position(self) -> str:
        """Where this rank is in its list; empty outside of a step."""
        return self.session.position()

    def execute(self) -> int:
        """Do all steps, and what follows them; returns the exit code. Collective."""
        run, options = self.engine, self.options
        with self.end:
            begun, traced = run.steps, options.trace_steps if options.trace else 0
            self._steps(options.steps - traced)
            with run.trace(options.trace) if options.trace else contextlib.nullcontext():
                self._steps(options.steps)
            if not self.left:
                self.session.sigterm.end()
            if self.progress is not None:
                self.progress.close(self.session.header)
            self._print_memory()
            if self.left:
                if options.verify:
                    note(self.comm, "--verify: nothing is compared, for the run is not done")
                self.session.leave(self.saved)
            verified = not options.verify or run.verify(options.tolerance)
            unsaved = options.save and begun < options.steps and not self.saved
            unwritten = self.progress is not None and self.progress.failed
            return int(not verified or sleeping_any(self.comm, bool(unsaved or unwritten)))

    def _steps(self, steps: int) -> None:
        run, options = self.engine, self.options
        while run.steps < steps and not self.left:
            result = run.step(leave=False)
            if self.progress is not None:
                self.progress.step(run.steps - 1, result)
            last = run.steps == options.steps
            self.left = result.leave and not last
            if options.save and (self.left or last or run.steps % options.every == 0):
                self.saved = run.save(options.save, keep=options.keep)

    def _print_memory(self) -> None:
        if self.session.bytes is not None:
            counts = self.comm.gather((self.session.bytes.peak, self.session.setup.device.reserved()))
            self.session.memory.close()
            if counts is not None:
                peaks, reserved = (" ".join(map(str, column)) for column in zip(*counts, strict=True))
                say(f"memory: most bytes of tensors at once, by rank: {peaks}", sys.stdout)
                if None not in counts[0]:
                    say(f"memory: most bytes that the allocator had at once, by rank: {reserved}", sys.stdout)
