"""A run: set up every rank, walk the list once a step, report, verify."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import time
from dataclasses import replace

from mpi4py import MPI
from torch import Tensor

from mpirun.checkpoint.disk_format import Manifest
from mpirun.checkpoint.reader import newest_checkpoint
from mpirun.checkpoint.run_settings import differing_settings
from mpirun.checkpoint.writer import CheckpointWriter
from mpirun.cli.options import RunOptions
from mpirun.cli.progress_bar import Progress
from mpirun.comm.fail_together import Stop, check_writable, on_rank_0, together
from mpirun.comm.waiting import sleeping_barrier
from mpirun.engine.build import interpreter
from mpirun.engine.interpreter import Result
from mpirun.engine.memory_tracker import measure
from mpirun.engine.nonfinite import origin
from mpirun.engine.read_schedule import schedule
from mpirun.engine.setup import training
from mpirun.engine.trace import Trace
from mpirun.engine.weight_shards import Unit
from mpirun.verify import delayed_updates, one_process
from mpirun.verify.compare import compare, directionless, tolerance
from mpirun.verify.record import Mine, Pieces, Record, gather, named, put_together
from mpirun.watchdog import BEAT, PHASE, ROW, VERIFYING
from mpirun.watchdog.rank_side import Watchdog
from schedgen.util.errors import UsageError, one_line

ASKED_TWICE = 10.0  # seconds after which a second SIGTERM means it
LEFT = 143  # the exit code of a run that was asked to leave: 128 + SIGTERM


class Run:
    """One rank's part of a run."""

    def __init__(self, comm: MPI.Intracomm, options: RunOptions) -> None:
        self.comm, self.options, self.traceback = comm, options, options.traceback
        given = schedule(comm, options.file)
        self.program, self.first_line = given.program, given.first_line
        self.whole = given.whole if options.trace else None
        self.header = self.program.header
        self.instructions = self.program.instructions(comm.rank)
        self.watchdog = Watchdog(comm, self.first_line, self.instructions, options.timeout)
        with contextlib.ExitStack() as end:
            end.push(self.watchdog)  # if this fails; else in the end of the training
            self._set_up(given.sha256)
            self.end = end.pop_all()

    def _set_up(self, sha256: str) -> None:
        comm, options = self.comm, self.options
        found = newest_checkpoint(comm, options.resume, options.save) if options.resume else None
        self.begun = 0 if found is None else found.step  # steps done before this run
        setup = options.setup
        if options.seed is None and found is not None:
            setup = replace(setup, seed=found.seed)
        self.training = training(comm, setup, self.header)
        self.tokens = self.training.batches.tokens
        self.memory = contextlib.ExitStack()
        self.bytes = self.memory.enter_context(measure(self.training.device.torch)) if options.memory else None
        self.interpreter = interpreter(comm, self.program, self.instructions, self.training, self.watchdog.state)
        self.writer = self._writer(found, sha256) if found or options.save else None
        self.progress = on_rank_0(comm, self._progress)
        self.asked: float | None = None  # when this rank was asked to leave
        signal.signal(signal.SIGTERM, self._asked_to_leave)
        if trace := options.trace:
            on_rank_0(comm, lambda: check_writable("--trace", trace))
        if self.training.device.description and comm.rank == 0:
            print(self.training.device.description, flush=True)

    def _writer(self, found: Manifest | None, sha256: str) -> CheckpointWriter:
        comm, options, one, state = self.comm, self.options, self.interpreter, self.watchdog.state
        writer = together(
            comm, lambda: CheckpointWriter(comm, self.header, self.training, one.stages, one.optimizer, state, sha256)
        )
        if found is not None:
            if options.verify:
                settings = found.settings
                differing = lambda: [*settings["changed"], *differing_settings(settings, writer.settings)]  # noqa: E731
                on_rank_0(comm, lambda: _repeatable(differing()))
            writer.resume(found)
        if options.save:
            writer.open(options.save, options.keep, options.resume)
        return writer

    def position(self) -> str:
        """Where this rank is in its list; empty outside of a step."""
        row = self.watchdog.state[ROW]
        return "" if row < 0 else f"line {self.first_line + row}: {self.instructions[row]}: "

    def execute(self) -> int:
        """All steps; the exit code."""
        with self.end:
            return self._train()

    def _progress(self) -> Progress:
        options, loss_weights = self.options, self.training.batches.loss_weights
        return Progress(self.begun, options.setup.steps, self.tokens, loss_weights, options.metrics)

    def _train(self) -> int:
        options, setup, interpreter = self.options, self.options.setup, self.interpreter
        record = Mine([], [], {})
        if options.verify:
            interpreter.observe = lambda totals: record.gradients.append(self._gradients(totals))
        traced = max(self.begun, setup.steps - options.trace_steps) if options.trace else setup.steps
        recorded = max(0, setup.steps - traced) * setup.accumulate
        trace = Trace(interpreter, self.instructions, self.training.device, recorded) if recorded else None
        saved = left = False
        for step in range(self.begun, setup.steps):
            if trace is not None and step == traced:
                trace.begin()
            begin = time.perf_counter()
            result = interpreter.learn(step) if step == self.begun else interpreter.run(step)
            seconds = time.perf_counter() - begin
            if not interpreter.sound:
                self._not_finite(step, result)
            record.losses.append(result.losses)
            if self.progress is not None:
                self.progress.step(step, result, seconds)
            last = step + 1 == setup.steps
            left = result.leave and not last
            if self.writer is not None and options.save and (left or last or (step + 1) % options.every == 0):
                saved = self.writer.save(step + 1)
            if left:
                break
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.progress is not None:
            self.progress.close(self.header)
        if left:
            sleeping_barrier(self.comm)  # an exit code that is not 0 makes launchers end the others
            what = "saved" if saved else "nothing is saved"
            raise Stop(f"asked to leave (SIGTERM): {what} after step {step + 1}", LEFT, speaker=0)
        if trace is not None and options.trace:
            trace.write(self.comm, self.whole, options.trace)
        if self.bytes is not None:
            peaks = self.comm.gather(self.bytes.peak)
            self.memory.close()
            if peaks is not None:
                print(f"memory: most bytes of tensors at once, by rank: {' '.join(map(str, peaks))}", flush=True)
        code = self._verify(record) if options.verify else 0
        sleeping_barrier(self.comm)  # nobody is done before all are
        return code or int(bool(options.save) and self.begun < setup.steps and not saved)

    def _asked_to_leave(self, *_: object) -> None:
        """After this step; when asked again later, at once. Slurm may ask twice in a second."""
        if self.asked is None:
            self.asked = time.monotonic()
            self.interpreter.leave = True
        elif time.monotonic() - self.asked > ASKED_TWICE:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)

    def _not_finite(self, step: int, result: Result) -> None:
        """Stop, or say that the step has changed nothing; the rank speaks on which it began."""
        rank = self.comm.rank
        found = origin(self.header, self.instructions, self.training.shapes, rank, result)
        stop = self.options.setup.on_nan == "stop"
        sentence = ""
        if found is not None:
            row, what = found
            where = f"line {self.first_line + row}: {self.instructions[row]}"
            then = "" if stop else ": the step changes nothing"
            sentence = f"rank {rank} on {socket.gethostname()}: step {step + 1}: {where}: {what}{then}"
        if stop:
            raise Stop(sentence, 1, speaker=rank if sentence else -1)
        if sentence:
            print(f"mpirun: {sentence}", file=sys.stderr, flush=True)

    def _gradients(self, totals: dict[Unit, Tensor]) -> Pieces:
        """The gradients of what this rank is first owner of."""
        mine: Pieces = {}
        for (stage, via), total in totals.items():
            if self.header.weight_shards.holders(stage, via)[0] == self.comm.rank:
                mine |= named(self.interpreter.stages[stage], via, total)
        return mine

    def _beat(self) -> None:
        self.watchdog.state[BEAT] += 1

    def _verify(self, record: Mine) -> int:
        options = self.options
        self.watchdog.state[PHASE] = VERIFYING
        for stage in self.interpreter.optimizer.stages.values():
            for via, part in stage.own.items():
                record.parameters.update(named(stage, via, part))
        ours = gather(self.comm, self.header, self.training.shapes, record)
        of, header = self.training, self.header
        if header.tensor_parallel.degree > 1 and isinstance(ours, Record):
            together = put_together(of, header, ours)
            if (
                isinstance(together, str) or not options.setup.canonical
            ):  # else the reference adds up shards as the ranks do
                ours, (of, header) = together, one_process.without_shards(of, header)
        used = delayed_updates.versions(self.comm, self.program) if self.header.weight_versions.count else None
        code = 0
        if isinstance(ours, str):
            print(f"verify: failed: {ours}")
            code = 1
        elif ours is not None:
            last = max(self.begun, options.setup.steps)  # --resume may find more
            if used is None:
                theirs = one_process.reference(of, header, self.begun, last, self._beat)
            else:
                theirs = delayed_updates.reference(self.training, self.header, used, self.begun, last, self._beat)
            code = self._compared(ours, theirs)
        sleeping_barrier(self.comm)  # rank 0 has done all steps again
        return int(self.comm.bcast(code))

    def _compared(self, ours: Record, theirs: Record) -> int:
        """The exit code, said why."""
        options = self.options
        given = tolerance(self.training) if options.tolerance is None else options.tolerance
        limit = 0.0 if options.setup.canonical else given
        if len(ours.gradients) != len(theirs.gradients):
            print("verify: failed: other steps than in one process changed nothing", flush=True)
            return 1
        left_out = directionless(theirs) if limit and options.setup.optimizer == "adamw" else None
        differences = compare(ours, theirs, limit, left_out)
        for difference in differences:
            where = f" ({difference.where})" if difference.where else ""
            print(f"verify: {difference.what} differ from one process by at most {difference.size:.3g}{where}")
        if left_out is not None and (many := sum(int(mask.sum()) for mask in left_out.values())):
            whole = sum(mask.numel() for mask in left_out.values())
            print(f"verify: {many} of {whole} parameter elements are left out: their gradients are rounding alone")
        code = 0 if all(difference.size <= difference.limit for difference in differences) else 1
        print(f"verify: {'failed' if code else 'passed'}: the limit is {limit:g}", flush=True)
        return code


def _repeatable(others: list[str]) -> None:
    """UsageError where one process would not do again what was done before a checkpoint."""
    if others:
        raise UsageError(
            f"--verify repeats all steps from the first, but the checkpoint was made with {one_line(others[0])}"
        )
