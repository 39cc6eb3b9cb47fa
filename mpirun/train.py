"""A run: set up every rank, walk the list once a step, report, verify."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
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
from mpirun.errors import Stop, on_rank_0, together
from mpirun.interpreter import Interpreter, Result
from mpirun.model import Shape
from mpirun.optimizer import Optimizer, maker
from mpirun.stage import Stage
from mpirun.transport import Transport
from schedgen.check import check
from schedgen.errors import RefusedFile, UsageError
from schedgen.file import line_of, read
from schedgen.program import COMPUTE, Header, Instruction, Kind, Program


class Run:
    """One rank's part of a run."""

    def __init__(self, comm: MPI.Intracomm, options: argparse.Namespace) -> None:
        self.comm, self.options = comm, options
        self.header, self.instructions, self.first_line = _schedule(comm, options.file)
        torch.set_num_threads(options.threads or threads(comm))
        self.model = together(comm, lambda: mpirun.model.load(options.model, self.header.stages, options.seed))
        self.text = mpirun.data.load(comm, options.text, self.model.length)
        self.make = maker(options.optimizer, options.lr, options.momentum, options.weight_decay)
        self.tokens, shapes, stages = together(comm, self._stages)
        self.interpreter = self._interpreter(shapes, stages)
        self.metrics = on_rank_0(comm, lambda: _open(options.metrics))

    def _stages(self) -> tuple[int, list[Shape], dict[int, Stage]]:
        """Tokens of a step, what every stage gives, and the stages this rank owns or computes."""
        shapes = mpirun.model.shapes(self.model, self.header.producers, self.text)
        tokens = mpirun.model.microbatch(self.model, self.text, 0, 0, 0)[1].numel()
        owned = {stage for stage, owners in enumerate(self.header.owners) if self.comm.rank in owners}
        needed = owned | {i.stage for i in self.instructions if i.op in COMPUTE or i.kind in (Kind.W, Kind.DW)}
        seed = self.options.seed
        stages = {
            stage: Stage(mpirun.model.build(self.model, stage, seed), stage, stage in owned, shapes[stage])
            for stage in sorted(needed)
        }
        return tokens * self.header.microbatches, shapes, stages

    def _interpreter(self, shapes: list[Shape], stages: dict[int, Stage]) -> Interpreter:
        owned = {stage: one for stage, one in stages.items() if self.comm.rank in self.header.owners[stage]}
        return Interpreter(
            self.header,
            self.instructions,
            stages,
            shapes,
            Transport(self.comm, self.header.groups),
            self.model,
            self.text,
            self.options.seed,
            Optimizer(self.make, owned, self.options.clip),
            self.options.canonical,
        )

    def place(self) -> str:
        """Where this rank is in its list; empty outside of a step."""
        if not self.interpreter.running:
            return ""
        at = self.interpreter.at
        return f"line {self.first_line + at}: {self.instructions[at]}: "

    def train(self) -> int:
        """All steps; the exit code."""
        options, interpreter = self.options, self.interpreter
        record = verify.Record([], [], {})
        if options.verify:
            interpreter.observe = lambda totals: record.gradients.append(self._gradients(totals))
        progress = Progress(options.steps, self.tokens) if self.comm.rank == 0 else None
        for step in range(options.steps):
            begin = time.perf_counter()
            result = interpreter.run(step)
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
                self.model, self.header, self.text, options.seed, options.steps, self.make, options.clip
            )
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


def _schedule(comm: MPI.Intracomm, name: str) -> tuple[Header, list[Instruction], int]:
    """This rank's part of the file, which rank 0 reads and proves: header, instructions, line of the first."""
    program = on_rank_0(comm, lambda: _checked(comm, name))
    header: Header = comm.bcast(None if program is None else program.header)
    parts = None
    if program is not None:
        starts = program.bounds[:-1].tolist()
        parts = [(program.instructions(rank), line_of(program, start, rank)) for rank, start in enumerate(starts)]
    instructions, line = comm.scatter(parts)
    return header, instructions, line


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


def threads(comm: MPI.Comm) -> int:
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
