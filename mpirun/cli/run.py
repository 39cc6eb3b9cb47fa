"""`python -m mpirun FILE`: sets up a rank, executes the schedule once a step, saves, reports and verifies."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import time
from dataclasses import replace

from mpi4py import MPI

from mpirun.checkpoint.disk_format import Manifest
from mpirun.checkpoint.reader import newest_checkpoint
from mpirun.checkpoint.run_settings import differing_settings
from mpirun.checkpoint.writer import CheckpointWriter
from mpirun.cli.options import RunOptions
from mpirun.cli.progress_bar import Progress
from mpirun.comm.fail_together import Stop, check_writable, on_rank_0, together
from mpirun.comm.waiting import sleeping_barrier
from mpirun.engine.build import build_interpreter
from mpirun.engine.memory_tracker import track_memory
from mpirun.engine.nonfinite import find_nonfinite
from mpirun.engine.optimizer_step import StepResult
from mpirun.engine.read_schedule import read_schedule
from mpirun.engine.setup import set_up_command
from mpirun.engine.step_trace import StepTrace
from mpirun.verify.verification import Verification, check_repeatable
from mpirun.watchdog import BEAT, PHASE, ROW, VERIFYING
from mpirun.watchdog.rank_side import Watchdog

ASKED_TWICE = 10.0  # seconds after which a second SIGTERM means it
LEFT = 143  # the exit code of a run that was asked to leave: 128 + SIGTERM


class Run:
    """One rank's part of a run."""

    def __init__(self, comm: MPI.Intracomm, options: RunOptions) -> None:
        """Set up: read the schedule, start the watchdog, build the stages, resume. Collective."""
        self.comm, self.options, self.traceback = comm, options, options.traceback
        file = read_schedule(comm, options.file)
        self.program, self.first_line, self.header = file.program, file.first_line, file.program.header
        self.all_ranks = file.all_ranks if options.trace else None  # on rank 0
        self.instructions = self.program.instructions(comm.rank)
        self.watchdog = Watchdog(comm, self.first_line, self.instructions, options.timeout)
        with contextlib.ExitStack() as end:
            end.push(self.watchdog.end)  # if the set-up fails; else in the end of the run
            self._set_up(file.sha256)
            self.end = end.pop_all()

    def _set_up(self, sha256: str) -> None:
        comm, options, setup = self.comm, self.options, self.options.setup
        checkpoint = newest_checkpoint(comm, options.resume, options.save) if options.resume else None
        self.begun = 0 if checkpoint is None else checkpoint.step  # steps done before this run
        if options.seed is None and checkpoint is not None:
            setup = replace(setup, seed=checkpoint.seed)
        self.setup = set_up_command(comm, setup, self.header)
        self.memory = contextlib.ExitStack()
        self.bytes = self.memory.enter_context(track_memory(self.setup.device.torch)) if options.memory else None
        self.interpreter = build_interpreter(comm, self.program, self.instructions, self.setup, self.watchdog.state)
        self.writer = self._writer(checkpoint, sha256) if checkpoint or options.save else None
        self.progress = on_rank_0(comm, self._progress)
        self.verification: Verification | None = None
        if options.verify:
            self.verification = Verification(comm, self.program, self.setup, self.interpreter, options.tolerance)
        self.asked: float | None = None  # when this rank was asked to leave
        signal.signal(signal.SIGTERM, self._asked_to_leave)
        if trace := options.trace:
            on_rank_0(comm, lambda: check_writable("--trace", trace))
        if self.setup.device.description and comm.rank == 0:
            print(self.setup.device.description, flush=True)

    def _writer(self, checkpoint: Manifest | None, sha256: str) -> CheckpointWriter:
        comm, options, state = self.comm, self.options, self.watchdog.state
        stages, optimizer = self.interpreter.stages, self.interpreter.optimizer
        writer = together(
            comm, lambda: CheckpointWriter(comm, self.header, self.setup, stages, optimizer, state, sha256)
        )
        if checkpoint is not None:
            saved = checkpoint.settings
            if options.verify:
                on_rank_0(
                    comm, lambda: check_repeatable([*saved["changed"], *differing_settings(saved, writer.settings)])
                )
            writer.resume(checkpoint)
        if options.save:
            writer.open(options.save, options.keep, options.resume)
        return writer

    def _progress(self) -> Progress:
        batches, options = self.setup.microbatches, self.options
        return Progress(self.begun, options.setup.steps, batches.tokens, batches.loss_weights, options.metrics)

    def position(self) -> str:
        """Where this rank is in its list; empty outside of a step."""
        row = self.watchdog.state[ROW]
        return "" if row < 0 else f"{self._line(row)}: "

    def _line(self, row: int) -> str:
        return f"line {self.first_line + row}: {self.instructions[row]}"

    def execute(self) -> int:
        """All steps, and what follows them; the exit code. Collective."""
        with self.end:
            traced = self.options.trace_steps if self.options.trace else 0
            traced = min(traced, max(0, self.options.setup.steps - self.begun))
            trace = None
            if traced:
                walks = traced * self.setup.passes
                trace = StepTrace(self.interpreter, self.instructions, self.setup.device, walks)
            saved = self._steps(trace, traced)
            if trace is not None and self.options.trace:
                trace.write(self.comm, self.all_ranks, self.options.trace)
            self._print_memory()
            code = self._verify()
            sleeping_barrier(self.comm)  # nobody is done before all are
            unsaved = self.options.save and self.begun < self.options.setup.steps and not saved
            return code or int(bool(unsaved))

    def _steps(self, trace: StepTrace | None, traced: int) -> bool:
        """All steps, of which the last `traced` are traced; whether the end is saved. A Stop if asked to leave."""
        steps, saved = self.options.setup.steps, False
        for step in range(self.begun, steps):
            if trace is not None and step == steps - traced:
                trace.begin()
            begin = time.perf_counter()
            result = self.interpreter.run_first(step) if step == self.begun else self.interpreter.run(step)
            seconds = time.perf_counter() - begin
            if not self.interpreter.optimizer_step.finite:
                self._not_finite(step, result)
            if self.verification is not None:
                self.verification.add_losses(result.losses)
            if self.progress is not None:
                self.progress.step(step, result, seconds)
            last = step + 1 == steps
            left = result.leave and not last
            if self.writer is not None and self.options.save and (left or last or (step + 1) % self.options.every == 0):
                saved = self.writer.save(step + 1)
            if left:
                self._leave(step + 1, saved)
        self._stop_reporting()
        return saved

    def _stop_reporting(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.progress is not None:
            self.progress.close(self.header)

    def _asked_to_leave(self, *_: object) -> None:
        """After this step; when asked again later, at once. Slurm may ask twice in a second."""
        if self.asked is None:
            self.asked = time.monotonic()
            self.interpreter.optimizer_step.leave_requested = True
        elif time.monotonic() - self.asked > ASKED_TWICE:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)

    def _leave(self, steps: int, saved: bool) -> None:
        """Stop after so many steps, together: an exit code that is not 0 makes launchers end the other ranks."""
        self._stop_reporting()
        sleeping_barrier(self.comm)
        what = "saved" if saved else "nothing is saved"
        raise Stop(f"asked to leave (SIGTERM): {what} after step {steps}", LEFT, speaker=0)

    def _not_finite(self, step: int, result: StepResult) -> None:
        """Stop, or say that the step has changed nothing; the rank speaks on which it began."""
        rank, stop = self.comm.rank, self.options.setup.on_nan == "stop"
        first = find_nonfinite(self.header, self.instructions, self.setup.shapes, rank, result)
        sentence = ""
        if first is not None:
            row, what = first
            then = "" if stop else ": the step changes nothing"
            sentence = f"rank {rank} on {socket.gethostname()}: step {step + 1}: {self._line(row)}: {what}{then}"
        if stop:
            raise Stop(sentence, 1, speaker=rank if sentence else -1)
        if sentence:
            print(f"mpirun: {sentence}", file=sys.stderr, flush=True)

    def _print_memory(self) -> None:
        if self.bytes is not None:
            peaks = self.comm.gather(self.bytes.peak)
            self.memory.close()
            if peaks is not None:
                print(f"memory: most bytes of tensors at once, by rank: {' '.join(map(str, peaks))}", flush=True)

    def _verify(self) -> int:
        """The exit code, 0 without --verify."""
        if self.verification is None:
            return 0
        self.watchdog.state[PHASE] = VERIFYING
        last = max(self.begun, self.options.setup.steps)  # --resume may find more
        return self.verification.compare(self.begun, last, self._beat)

    def _beat(self) -> None:
        self.watchdog.state[BEAT] += 1
