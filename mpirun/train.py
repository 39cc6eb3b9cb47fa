"""A run: set up every rank, walk the list once a step, report, verify."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import TextIO

import numpy as np
from mpi4py import MPI
from torch import Tensor
from tqdm import tqdm

from mpirun import verify
from mpirun.assemble import interpreter
from mpirun.errors import Stop, meet, on_rank_0, writable
from mpirun.interpreter import Result
from mpirun.trace import Trace
from mpirun.tracker import measure
from mpirun.training import training
from schedgen.check import check
from schedgen.errors import RefusedFile, UsageError
from schedgen.file import line_of, read
from schedgen.program import Header, Program


class Run:
    """One rank's part of a run."""

    def __init__(self, comm: MPI.Intracomm, options: argparse.Namespace) -> None:
        self.comm, self.options = comm, options
        self.program, self.first_line, whole = _schedule(comm, options.file)
        self.whole = whole if options.trace else None
        self.header = self.program.header
        self.instructions = self.program.instructions(comm.rank)
        self.training = training(comm, options, self.header)
        self.tokens = self.training.tokens * self.header.microbatches * options.accumulate
        self.memory = contextlib.ExitStack()
        self.bytes = self.memory.enter_context(measure(self.training.device.torch)) if options.memory else None
        self.interpreter = interpreter(comm, self.program, self.instructions, self.training)
        self.metrics = on_rank_0(comm, lambda: _open(options.metrics))
        if options.trace:
            on_rank_0(comm, lambda: writable("--trace", options.trace))
        if self.training.device.said and comm.rank == 0:
            print(self.training.device.said, flush=True)

    def place(self) -> str:
        """Where this rank is in its list; empty outside of a step."""
        at = self.interpreter.at
        if at < 0:
            return ""
        return f"line {self.first_line + at}: {self.instructions[at]}: "

    def train(self) -> int:
        """All steps; the exit code."""
        options, interpreter = self.options, self.interpreter
        record = verify.Record([], [], {})
        if options.verify:
            interpreter.observe = lambda totals: record.gradients.append(self._gradients(totals))
        progress = Progress(options.steps, self.tokens) if self.comm.rank == 0 else None
        traced = max(0, options.steps - options.trace_steps) if options.trace else options.steps
        recorded = (options.steps - traced) * options.accumulate
        trace = Trace(interpreter, self.instructions, self.training.device, recorded) if recorded else None
        for step in range(options.steps):
            if trace is not None and step == traced:
                trace.begin()
            begin = time.perf_counter()
            result = interpreter.learn(step) if step == 0 else interpreter.run(step)
            seconds = time.perf_counter() - begin
            if not np.isfinite([*result.losses, result.grad_norm]).all():
                what = f"the loss is {mean(result.losses)} and the gradient's norm {result.grad_norm}"
                raise Stop(f"step {step + 1}: {what}", 1, speaker=0)
            record.losses.append(result.losses)
            if progress is not None:
                progress.step(step, result, seconds)
                self._write_metrics(step, result, seconds)
        if progress is not None:
            progress.close(self.header)
        if trace is not None:
            trace.write(self.comm, self.whole, options.trace)
        if self.bytes is not None:
            peaks = self.comm.gather(self.bytes.peak)
            self.memory.close()
            if peaks is not None:
                print(f"memory: most bytes of tensors at once, by rank: {' '.join(map(str, peaks))}", flush=True)
        return self._verify(record) if options.verify else 0

    def _write_metrics(self, step: int, result: Result, seconds: float) -> None:
        if self.metrics is not None:
            row = {"step": step, "loss": mean(result.losses), "grad_norm": result.grad_norm}
            print(
                json.dumps({**row, "seconds": round(seconds, 6), "tokens": self.tokens}), file=self.metrics, flush=True
            )

    def _gradients(self, totals: dict[int, Tensor]) -> verify.Parameters:
        """The gradients of the stages this rank is first owner of."""
        mine: verify.Parameters = {}
        for stage, total in totals.items():
            if self.header.owners[stage][0] == self.comm.rank:
                mine |= verify.named(self.interpreter.stages[stage], total)
        return mine

    def _verify(self, record: verify.Record) -> int:
        options = self.options
        for stage in self.interpreter.optimizer.stages.values():
            record.parameters.update(verify.named(stage, stage.weights))
        ours = verify.gather(self.comm, self.header, record)
        code = 0
        if isinstance(ours, str):
            print(f"verify: failed: {ours}")
            code = 1
        elif ours is not None:
            theirs = verify.reference(self.training, self.header, options.steps)
            limit = 0.0 if options.canonical else options.tolerance
            differences = verify.compare(ours, theirs)
            for difference in differences:
                where = f" ({difference.where})" if difference.where else ""
                print(f"verify: {difference.what} differ from one process by at most {difference.size:.3g}{where}")
            code = 0 if all(difference.size <= limit for difference in differences) else 1
            print(f"verify: {'failed' if code else 'passed'}: the limit is {limit:g}", flush=True)
        meet(self.comm)  # rank 0 has done all steps again
        return int(self.comm.bcast(code))


class Progress:
    """A bar on a terminal, a line now and then elsewhere; a summary in the end."""

    def __init__(self, steps: int, tokens: int) -> None:
        self.steps, self.tokens = steps, tokens
        self.bar = tqdm(total=steps, unit="step") if sys.stderr.isatty() else None
        self.every = max(1, steps // 20)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, step: int, result: Result, seconds: float) -> None:
        loss = mean(result.losses)
        self.losses.append(loss)
        self.seconds.append(seconds)
        rate = self.tokens / seconds
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {loss:.4f}, {rate:.0f} tokens/s")
            self.bar.update()
        elif step % self.every == 0 or step + 1 == self.steps:
            print(
                f"step {step + 1}/{self.steps}  loss {loss:.4f}  grad {result.grad_norm:.3f}  {rate:.0f} tokens/s",
                flush=True,
            )

    def close(self, header: Header) -> None:
        if self.bar is not None:
            self.bar.close()
        if self.steps:
            rate = self.tokens / float(np.median(self.seconds))
            print(
                f"{header.scheme['name']}: {self.steps} steps on {header.workers} ranks, "
                f"loss {self.losses[0]:.4f} -> {self.losses[-1]:.4f}, {rate:.0f} tokens/s, {sum(self.seconds):.1f} s",
                flush=True,
            )


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _schedule(comm: MPI.Intracomm, name: str) -> tuple[Program, int, Program | None]:
    """This rank's part of the file, the line of its first instruction and, on rank 0, which proves it, the whole."""
    program = on_rank_0(comm, lambda: _checked(comm, name))
    header: Header = comm.bcast(None if program is None else program.header)
    parts = None
    if program is not None:
        ends = program.bounds.tolist()
        parts = [
            (program.rows.take(slice(a, b)), line_of(program, a, rank)) for rank, (a, b) in enumerate(pairwise(ends))
        ]
    rows, line = comm.scatter(parts)
    return Program(header, rows), line, program


def _checked(comm: MPI.Comm, name: str) -> Program:
    try:
        with Path(name).open("rb") as source:
            program, fault = read(source, name)
    except OSError as error:
        raise RefusedFile(f"{name}: {error.strerror}") from None
    workers = program.header.workers
    if workers != comm.size:
        hint = " (if mpiexec started more, it belongs to another MPI than mpi4py does)" if comm.size == 1 else ""
        raise UsageError(f"{name} is for {workers} ranks, mpiexec -n {workers}, but this run has {comm.size}{hint}")
    check(program, name)
    if fault:
        raise RefusedFile(fault)
    return program


def _open(path: str | None) -> TextIO | None:
    try:
        return Path(path).open("w") if path else None
    except OSError as error:
        raise UsageError(f"--metrics {path}: {error.strerror}") from None
