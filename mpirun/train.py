"""A run: set up every rank, walk the list once a step, report, verify."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from tqdm import tqdm

import mpirun.data
import mpirun.model
from mpirun import verify
from mpirun.device import device
from mpirun.errors import Stop, on_rank_0, together
from mpirun.interpreter import Interpreter, Result
from mpirun.memory import Memory
from mpirun.model import Shape
from mpirun.optimizer import Optimizer, Recipe
from mpirun.pump import Pump
from mpirun.stage import Stage
from mpirun.ties import check_ties
from mpirun.trace import Trace, writable
from mpirun.transport import transport
from schedgen.check import check
from schedgen.errors import RefusedFile, UsageError
from schedgen.file import line_of, read
from schedgen.program import COMPUTE, Header, Kind, Program


class Run:
    """One rank's part of a run."""

    def __init__(self, comm: MPI.Intracomm, options: argparse.Namespace) -> None:
        self.comm, self.options = comm, options
        self.program, self.first_line, whole = _schedule(comm, options.file)
        self.whole = whole if options.trace else None
        self.header = self.program.header
        self.instructions = self.program.instructions(comm.rank)
        torch.set_num_threads(options.threads or _threads(comm))
        self.device = device(comm, options.device)
        self.mixed = torch.bfloat16 if options.autocast else None
        self.model = together(comm, lambda: mpirun.model.load(options.model, self.header.stages, options.seed))
        self.text = mpirun.data.load(comm, options.text, self.model.length)
        self.recipe = Recipe(
            options.optimizer, options.lr, options.momentum, options.weight_decay, options.lr_schedule, options.warmup,
            options.steps, options.clip,
        )  # fmt: skip
        self.tokens, shapes = together(comm, self._shapes)
        self.interpreter = self._interpreter(shapes)
        self.metrics = on_rank_0(comm, lambda: _open(options.metrics))
        if options.trace:
            on_rank_0(comm, lambda: writable(options.trace))
        if self.device.said and comm.rank == 0:
            print(self.device.said, flush=True)

    def _shapes(self) -> tuple[int, list[Shape]]:
        """Tokens of a step, and what every stage gives."""
        check_ties(self.model, self.header)
        shapes = mpirun.model.shapes(self.model, self.header.producers, self.text, self.mixed)
        tokens = mpirun.model.microbatch(self.model, self.text, 0, 0, 0)[1].numel()
        return tokens * self.header.microbatches * self.options.accumulate, shapes

    def _interpreter(self, shapes: list[Shape]) -> Interpreter:
        options = self.options
        memory = Memory(self.comm, self.program, self.instructions, shapes, self.device, options.canonical)
        stages = together(self.comm, lambda: self._stages(shapes, memory))
        owned = {stage: one for stage, one in stages.items() if self.comm.rank in self.header.owners[stage]}
        return Interpreter(
            self.header,
            self.instructions,
            stages,
            memory,
            transport(self.comm, self.header.groups, self.device),
            Pump(self.comm),
            self.model,
            self.text,
            options.seed,
            Optimizer(self.recipe, owned),
            options.accumulate,
        )

    def _stages(self, shapes: list[Shape], memory: Memory) -> dict[int, Stage]:
        """The stages this rank owns, computes or adds gradients of."""
        owned = {stage for stage, owners in enumerate(self.header.owners) if self.comm.rank in owners}
        needed = owned | {i.stage for i in self.instructions if i.op in COMPUTE or i.kind in (Kind.W, Kind.DW)}
        stages = {}
        for stage in sorted(needed):
            module = mpirun.model.build(self.model, stage, self.options.seed)
            place = None if stage in owned else memory.weights(stage)
            stages[stage] = Stage(module, stage, shapes[stage], self.device, stage in owned, place, self.mixed)
            stages[stage].shared = mpirun.model.shared_before(self.model, stage)
        return stages

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
        recorder = Trace(interpreter, self.instructions, self.device, recorded) if recorded else None
        for step in range(options.steps):
            if recorder is not None and step == traced:
                recorder.begin()
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
        if recorder is not None:
            recorder.write(self.comm, self.whole, options.trace)
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
            theirs = verify.reference(
                verify.Plan(
                    self.model, self.header, self.interpreter.memory.shapes, self.text, options.seed, options.steps,
                    self.recipe, options.accumulate, self.device, self.mixed,
                )
            )  # fmt: skip
            limit = 0.0 if options.canonical else options.tolerance
            differences = verify.compare(ours, theirs)
            for difference in differences:
                where = f" ({difference.where})" if difference.where else ""
                print(f"verify: {difference.what} differ from one process by at most {difference.size:.3g}{where}")
            code = 0 if all(difference.size <= limit for difference in differences) else 1
            print(f"verify: {'failed' if code else 'passed'}: the limit is {limit:g}", flush=True)
        return int(_patient_bcast(self.comm, code))


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


def _threads(comm: MPI.Comm) -> int:
    """Threads a rank may use: this host's cores shared out over its ranks."""
    here = comm.Split_type(MPI.COMM_TYPE_SHARED)
    ranks = here.size
    here.Free()
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def _open(path: str | None) -> TextIO | None:
    try:
        return Path(path).open("w") if path else None
    except OSError as error:
        raise UsageError(f"--metrics {path}: {error.strerror}") from None


def _patient_bcast(comm: MPI.Intracomm, value: Any) -> Any:
    """Broadcast from rank 0, which may take long: the others leave it the cores."""
    request = comm.Ibarrier()
    while not request.Test():
        if comm.rank:
            time.sleep(0.02)
    return comm.bcast(value)
