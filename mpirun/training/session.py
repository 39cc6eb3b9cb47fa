"""One rank's part of a run: a schedule, the watchdog, the interpreter, checkpoints, verification.

`Engine`, for scripts, and the command line both train with it. Methods are collective, except for those that concern
this rank alone, such as `beat` and `position`.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mpirun.comm.device import Device
from mpirun.comm.fail_together import Stop, first_difference, on_rank_0, refuse, together
from mpirun.comm.output import note, say
from mpirun.comm.waiting import RunComm, sleeping_barrier
from mpirun.engine.build import RunInterpreter, Values, build_interpreter, check_same_start
from mpirun.engine.core.optimizer_step import StepResult
from mpirun.engine.memory_tracker import MemoryCount, track_memory
from mpirun.engine.read_schedule import Schedule
from mpirun.engine.running_statistics import buffers_shared
from mpirun.engine.setup import RankPart, Setup
from mpirun.engine.step_trace import StepTrace
from mpirun.model.stage_shape import StageShape
from mpirun.training.errors import Sigterm
from mpirun.verify.microbatch import first_values
from mpirun.verify.verification import Verification
from mpirun.watchdog import BEAT, ENDING, EXPORTING, PHASE, ROW, TRYING
from mpirun.watchdog.rank_side import Watchdog
from schedgen.util.errors import listed
from schedgen.util.files import check_writable
from schedgen.util.option_fields import refuse_overwriting

LEFT = 143  # the exit code of a run that was asked to leave: 128 + SIGTERM


@dataclass(frozen=True)
class Result:
    """What a step did; the same on all ranks.

    loss       the mean over the samples of the step, or over what `loss_weight` counts
    losses     by microbatch
    grad_norm  the norm of the whole gradient, before clipping
    lr         the learning rate of the first parameter group; 0 if it has none, or where nothing is trained
    metrics    what the loss returned besides its value: such means, too, by name
    seconds    that the step took on this rank
    samples    without padding; 0 if the model makes its microbatches itself
    tokens     elements of the targets
    leave      some rank was asked to leave by SIGTERM
    """

    loss: float
    losses: list[float]
    grad_norm: float
    lr: float
    metrics: Mapping[str, float]
    seconds: float
    samples: int
    tokens: int
    leave: bool


def step_numbers(result: Result, device: Device) -> dict[str, float]:
    """What is logged of a step."""
    seconds = result.seconds
    numbers = {"loss": result.loss, "grad_norm": result.grad_norm, "lr": result.lr, "seconds": seconds}
    numbers |= {"samples_per_second": result.samples / seconds, "tokens_per_second": result.tokens / seconds}
    if device.kind == "cuda":
        numbers["peak_bytes"] = torch.cuda.max_memory_allocated(device.torch)
    else:
        numbers["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {**numbers, **result.metrics}


def is_compared(number: int) -> bool:
    """Whether the data of a step are compared: of steps 1, 2, 4, 8, ...; `number`: the step's in this run, from 0."""
    return number & (number + 1) == 0


class Session:
    """A run on this rank: set up once, then stepped."""

    def __init__(self, comm: RunComm, schedule: Schedule, timeout: float, verifies: bool) -> None:
        """Nothing is built yet.

        `timeout`: seconds within which some of several ranks has to make progress; 0: there is no watchdog. `verifies`:
        the steps are recorded for the method `verify`.
        """
        self.comm, self.schedule, self.verifies = comm, schedule, verifies
        self.program, self.header = schedule.program, schedule.program.header
        self.instructions = self.program.instructions(comm.rank)
        self.watchdog = Watchdog(comm, schedule.first_line, self.instructions, timeout if comm.size > 1 else 0)
        comm.on_wait = self.watchdog.show_wait
        self.end = contextlib.ExitStack()
        self.end.push(self.watchdog.end)
        self.sigterm = Sigterm()
        self.end.callback(self.sigterm.give_back)
        self.begun = 0  # steps done before this run
        self.steps = 0  # steps done
        self.state: dict[str, Any] = {}  # what the script saves besides
        self.verification: Verification | None = None
        self.start: dict[Values, str] | None = None  # digests of values that are compared before they are used
        self.interpreters: list[RunInterpreter] = []  # for microbatches of one shape each; one is in use
        self.trace: StepTrace | None = None
        self.counts_memory, self.memory = False, contextlib.ExitStack()
        self.bytes: MemoryCount | None = None  # of tensors, from `build` on
        self.at_end = comm.Dup()  # its own: the barrier of an ended rank matches no other collective
        self.at_end.on_wait = comm.on_wait
        atexit.register(self.close_together)  # when the script ends, unless `close` is called before

    def build(self, setup: Setup) -> None:
        """Build the stages, and the interpreter that executes the list. Stop if the model does not fit the schedule."""
        if self.counts_memory:
            self.bytes = self.memory.enter_context(track_memory(setup.device.torch))
        self.setup = setup
        self.start = {}
        start = first_values(setup.unsliced_model, setup.seed) if self.verifies and self.comm.rank == 0 else {}
        with self.watchdog.phase(TRYING):
            together(self.comm, lambda: setup.device.try_messages(self.comm))
        self.interpreter: RunInterpreter = build_interpreter(
            self.comm, self.program, self.instructions, setup, self.watchdog.state, digests=self.start
        )
        self.interpreters.append(self.interpreter)
        self.interpreter.optimizer_step.leave_requested = self.sigterm.asks
        if self.verifies:
            self.verification = Verification(self.comm, self.program, setup, self.interpreter, start)
        if self.comm.rank == 0 and self.setup.device.description:
            say(self.setup.device.description, sys.stdout)
        if not any(shape.parameter_names for shape in setup.shapes):
            note(self.comm, "no parameter is trainable: steps change nothing")
        if left_out := sorted(set().union(*self.comm.allgather(self.interpreter.optimizer.left_out))):
            note(self.comm, f"the optimizer leaves out {listed(left_out)}: this Engine does not train them")
        self.sigterm.take()

    def check_start(self) -> None:
        """Stop if ranks begin with different values, unless those of a checkpoint have replaced them."""
        if self.start is not None:
            check_same_start(self.comm, self.start)
            self.start = None

    def add_interpreter(self, setup: Setup) -> RunInterpreter:
        """Another interpreter, for microbatches of another shape; `setup`: the run's, with that shape."""
        made = build_interpreter(
            self.comm, self.program, self.instructions, setup, self.watchdog.state, self.interpreters[-1]
        )
        made.optimizer_step.on_gradients = self.interpreter.optimizer_step.on_gradients
        made.optimizer_step.leave_requested = self.sigterm.asks
        self.interpreters.append(made)
        return made

    def use(self, interpreter: RunInterpreter) -> None:
        """Do the next steps with this interpreter."""
        self.interpreter = interpreter
        if self.trace is not None:
            self.trace.attach(interpreter)

    def free(self) -> None:
        """Free the MPI resources of the interpreters. Collective."""
        for interpreter in reversed(self.interpreters):
            interpreter.transport.free()
        for interpreter in self.interpreters[:1]:
            interpreter.progress.free()

    def begin_trace(self, path: str, schedule: str | None) -> None:
        """Record from now on when each rank executes which instruction, for a file that is not `schedule`."""
        refuse(self.comm, self.trace is not None, "trace: steps are traced already")
        name = path if path == "-" else str(Path(path).absolute())
        on_rank_0(self.comm, lambda: check_writable("trace", name))
        on_rank_0(self.comm, lambda: refuse_overwriting([schedule], [name]))
        self.trace, self.trace_file = StepTrace(self.instructions, self.setup.device), name
        self.trace.begin(self.interpreter)

    def drop_trace(self) -> None:
        """Stop recording, and write nothing. Not collective."""
        if self.trace is not None:
            self.trace.detach()
            self.trace = None

    def end_trace(self) -> None:
        """Write the trace, if a step has been done since `begin_trace`."""
        trace, self.trace = self.trace, None
        assert trace is not None
        trace.detach()
        if trace.passes:
            trace.write(self.comm, self.schedule.all_ranks, self.trace_file)
        else:
            note(self.comm, f"trace: no step is done, so {self.trace_file} is not written")

    @property
    def part(self) -> RankPart:
        """What checkpoints, exports and statistics need of this rank."""
        return RankPart(self.comm, self.header, self.setup, self.interpreter.stages, self.beat)

    @contextlib.contextmanager
    def model_values(self) -> Iterator[None]:
        """Inside, for exports, ranks have the model's running statistics."""
        self.interpreter.optimizer.take_assigned()
        with self.watchdog.phase(EXPORTING), buffers_shared(self.part):
            yield

    def step(self, weights: list[float], samples: int, tokens: int, compared: bool) -> Result:
        """Do the next step. Stop if a number is not finite.

        `weights`: of the microbatches' losses in the step's loss; `samples`, `tokens`: as in a `Result`; `compared`:
        Stop, too, if ranks make different microbatches.
        """
        begin, step = time.perf_counter(), self.steps
        if compared:
            self.interpreter.microbatches.digests = {}
        result = self.interpreter.run(step)
        if compared:
            self._check_same_data(step)
        if self.interpreter.graphs is not None and self.interpreter.graphs.looked:  # once, as soon as it is known
            lines = self.comm.gather(self.interpreter.graphs.refusals()) or ()
            for line in sorted({line for of_rank in lines for line in of_rank}):
                note(self.comm, line)
        seconds = time.perf_counter() - begin
        self.steps += 1
        if not self.interpreter.optimizer_step.finite:
            raise Stop(f"step {step + 1}: {_first_nonfinite(self.setup.shapes, result)}", 1)
        if self.verification is not None:
            self.verification.record.losses.append(result.losses)
        metrics = means(result.metrics, weights, f"step {step + 1}")
        numbers = mean(result.losses, weights), result.losses, result.grad_norm, result.rate
        return Result(*numbers, metrics, seconds, samples, tokens, result.leave)

    def _check_same_data(self, step: int) -> None:
        """Stop if ranks have different hashes of a microbatch, which were recorded in step `step`, from 0."""
        digests, self.interpreter.microbatches.digests = self.interpreter.microbatches.digests, None
        if (difference := first_difference(self.comm, digests or {})) is not None:
            number, one, other, *_ = difference
            raise Stop(
                f"ranks {one} and {other} have got different data for microbatch {number} of step {step + 1}: data "
                "should depend on the step and the microbatch alone, and be drawn with the generator that is given",
                1,
            )

    def position(self) -> str:
        """The step, and where this rank is in its list; empty outside of a step."""
        row = self.watchdog.state[ROW]
        if row < 0:
            return ""
        return f"step {self.steps + 1}: line {self.schedule.first_line + row}: {self.instructions[row]}: "

    def leave(self, saved: bool) -> None:
        """Stop after SIGTERM, on all ranks together: a nonzero exit code makes launchers end the other ranks."""
        self.sigterm.end()
        sleeping_barrier(self.comm)
        what = "saved" if saved else "nothing is saved"
        raise Stop(f"asked to leave (SIGTERM): {what} after step {self.steps}", LEFT)

    def beat(self) -> None:
        """Show the watchdog that this rank makes progress."""
        self.watchdog.state[BEAT] += 1

    def wait_for_others(self) -> None:
        """Block until all ranks have called this; the watchdog reports ranks that do not."""
        with self.watchdog.calling("close"):
            self.watchdog.state[PHASE] = ENDING
            sleeping_barrier(self.at_end)
            self.at_end.Free()

    def close_together(self) -> None:
        """End the run when the script ends: no rank exits before all have come to the end."""
        self.wait_for_others()
        self.close()

    def close(self) -> None:
        """End the run on this rank."""
        atexit.unregister(self.close_together)
        self.end.close()


def _first_nonfinite(shapes: Sequence[StageShape], result: StepResult) -> str:
    """A sentence: the first loss that is not finite, or the last such norm of a gradient: backwards reach it first."""
    for number, loss in enumerate(result.losses):
        if not math.isfinite(loss):
            return f"the loss of microbatch {number} is {loss}"
    names = [f"{name}, stage {stage}" for stage, shape in enumerate(shapes) for name in shape.parameter_names]
    for name, norm in reversed([*zip(names, result.parameter_norms, strict=True)]):
        if not math.isfinite(norm):
            return f"the norm of the gradient of {name}, is {norm}"
    return "a gradient is not finite"


def means(metrics: list[dict[str, float]], weights: list[float], where: str) -> dict[str, float]:
    """The weighted mean of each metric; `metrics`: by microbatch. Stop if those that count have different names."""
    counted = [of_mb for of_mb, weight in zip(metrics, weights, strict=True) if weight] or [{}]
    names = counted[0].keys()
    for of_mb in counted:
        if of_mb.keys() != names:
            others = f"{sorted(of_mb)} for a microbatch of {where}, but {sorted(names)} for another"
            raise Stop(f"the loss returned the metrics {others}", 1)
    return {name: mean([of_mb.get(name, 0.0) for of_mb in metrics], weights) for name in names}


def mean(values: list[float], weights: list[float]) -> float:
    """The weighted mean; `weights` add up to 1. A value of weight 0 does not count, even if it is not finite."""
    if len(set(weights)) == 1:
        return sum(values) / len(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True) if weight)
