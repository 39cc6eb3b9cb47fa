"""`python -m mpirun FILE`: a run by the options of the command line: steps, checkpoints, output, traces, --verify."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace

from mpi4py import MPI

from mpirun.checkpoint.reader import newest_checkpoint
from mpirun.cli.options import RunOptions
from mpirun.cli.progress_bar import Progress
from mpirun.comm.fail_together import on_rank_0
from mpirun.comm.output import all_said, note, say
from mpirun.comm.run_comm import RunComm
from mpirun.comm.waiting import sleeping_any
from mpirun.engine.memory_tracker import track_memory
from mpirun.engine.read_schedule import read_schedule
from mpirun.engine.setup import set_up_command
from mpirun.training.session import Session
from schedgen.util.files import check_writable


class Run:
    """One rank's part of a run."""

    def __init__(self, comm: MPI.Intracomm, options: RunOptions) -> None:
        """Set up: read the schedule, start the watchdog, build the stages, resume. Collective."""
        self.comm = comm = RunComm(comm)
        self.options, self.traceback = options, options.traceback
        for option, path in (("--metrics", options.metrics), ("--trace", options.trace)):
            on_rank_0(comm, lambda: check_writable(option, path))
        file = read_schedule(comm, options.file)
        if not options.trace:
            file = file._replace(all_ranks=None)  # now the rows of other ranks can be freed
        self.session = Session(comm, file, options.timeout, options.verify)
        with contextlib.ExitStack() as end:
            end.push(self.session.end)  # called if the setup fails, else at the end of the run
            self._set_up()
            self.end = end.pop_all()

    def _set_up(self) -> None:
        comm, options, session, setup = self.comm, self.options, self.session, self.options.setup
        checkpoint = newest_checkpoint(comm, options.resume, options.save) if options.resume else None
        if options.seed is None and checkpoint is not None:
            setup = replace(setup, seed=checkpoint.seed)
        made = set_up_command(comm, setup, session.header)
        self.memory = contextlib.ExitStack()
        self.bytes = self.memory.enter_context(track_memory(made.device.torch)) if options.memory else None
        session.build(made)
        if options.save:
            session.checkpoint_writer().open(options.save, options.resume)
        if checkpoint is not None:
            session.resume(checkpoint)
        session.check_start()
        self.progress = on_rank_0(comm, lambda: Progress(session.begun, setup.steps, options.metrics))

    def position(self) -> str:
        """Where this rank is in its list; empty outside of a step."""
        return self.session.position()

    def execute(self) -> int:
        """Do all steps, and what follows them; returns the exit code. Collective."""
        session, options = self.session, self.options
        with self.end:
            begun, steps = session.begun, options.setup.steps
            traced = min(options.trace_steps if options.trace else 0, max(0, steps - begun))
            saved, left = self._steps(traced)
            if options.trace and not session.end_trace("--trace", options.trace):
                why = "none of its steps is done" if left else "no step is left"
                note(self.comm, f"--trace: {why}, so {options.trace} is not written")
            self._print_memory()
            if left:
                if options.verify:
                    note(self.comm, "--verify: nothing is compared, for the run is not done")
                session.leave(saved)
            code = session.verify(options.tolerance)
            unsaved = options.save and begun < steps and not saved
            unwritten = not all_said() or (self.progress is not None and self.progress.failed)
            return code or int(sleeping_any(self.comm, bool(unsaved or unwritten)))  # no rank is done before all are

    def _steps(self, traced: int) -> tuple[bool, bool]:
        """Do all steps, tracing the last `traced`; returns (the last one is saved, SIGTERM ended them early)."""
        session, options, saved, left = self.session, self.options, False, False
        steps, source = options.setup.steps, session.setup.microbatches
        weights, tokens = source.loss_weights, source.tokens
        while session.steps < steps and not left:
            if traced and session.steps == steps - traced:
                session.begin_trace()
            result = session.step(weights, tokens)
            if self.progress is not None:
                self.progress.step(session.steps - 1, result)
            last = session.steps == steps
            left = result.leave and not last
            if options.save and (left or last or session.steps % options.every == 0):
                saved = session.save(options.keep)
        if not left:
            session.sigterm.end()
        if self.progress is not None:
            self.progress.close(session.header)
        return saved, left

    def _print_memory(self) -> None:
        if self.bytes is not None:
            counts = self.comm.gather((self.bytes.peak, self.session.setup.device.reserved()))
            self.memory.close()
            if counts is not None:
                peaks, reserved = (" ".join(map(str, column)) for column in zip(*counts, strict=True))
                say(f"memory: most bytes of tensors at once, by rank: {peaks}", sys.stdout)
                if None not in counts[0]:
                    say(f"memory: most bytes that the allocator had at once, by rank: {reserved}", sys.stdout)
