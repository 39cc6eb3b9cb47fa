"""--trace: when every rank executed every instruction of the last steps, and how long it waited for what.

- The traced loop notes the time, and the seconds waited so far, between any two instructions.
- What a wait is for is noted where the transport begins to wait.
- A GPU executes an instruction after it was launched. So an instruction that computes is followed by a wait for the
  GPU, and a traced step is slower than others, the more so the shorter its jobs are.
- The clocks of all ranks are compared with rank 0's before the first traced step and after the last.
"""

from __future__ import annotations

import time

import numpy as np
from mpi4py import MPI

from mpirun.comm.clocks import as_rank_0_times, read_clocks
from mpirun.comm.device import Device
from mpirun.comm.fail_together import on_rank_0, write_output
from mpirun.engine.act import Act
from mpirun.engine.interpreter import Interpreter
from mpirun.watchdog import ROW
from schedgen.ir.instructions import COMPUTE, KIND_WORDS, Instruction, Kind, Op, Small, Times
from schedgen.ir.program import Program
from schedgen.report.chrome_trace import MEASURED, trace_events, trace_file
from schedgen.simulator.timeline import CAUSES, REDUCTION, SEND_CAUSE, measured_timelines

_ON_DEVICE = (*COMPUTE, Op.ADD, Op.STEP)


class StepTrace:
    """One rank's record of the last accumulation passes of a run; a step without accumulation is one pass."""

    def __init__(self, interpreter: Interpreter, instructions: list[Instruction], device: Device, passes: int) -> None:
        """`passes`: how many will be traced. Nothing is traced before `begin`."""
        self.interpreter, self.instructions, self.device = interpreter, instructions, device
        self.transport, self.passes, self.done = interpreter.transport, passes, 0
        length = len(instructions) + 1
        self.times, self.waited = [0.0] * (passes * length), [0.0] * (passes * length)
        self.cause = np.full((passes, len(instructions)), -1, np.int8)
        self.code: list[Act] = []
        self.made_from: list[Act] | None = None

    def begin(self) -> None:
        """Trace all passes from now on. Collective."""
        self.before = read_clocks(self.transport)
        self.interpreter.execute_list = self.execute_list
        self.on_wait, self.transport.on_wait = self.transport.on_wait, self.note_wait

    def execute_list(self) -> None:
        """As Interpreter.execute, with the time between any two instructions."""
        interpreter, transport, clock = self.interpreter, self.transport, time.perf_counter
        if self.made_from is not interpreter.code:
            self.made_from, self.code = interpreter.code, self._wait_for_device(interpreter.code)
        times, waited = self.times, self.waited
        at, state = self.done * (len(self.code) + 1), interpreter.state
        for row, act in enumerate(self.code):
            state[ROW] = row
            times[at] = clock()
            waited[at] = transport.waited
            act()
            at += 1
        times[at] = clock()
        waited[at] = transport.waited
        self.done += 1

    def _wait_for_device(self, code: list[Act]) -> list[Act]:
        """On a GPU: instructions that end when the GPU has executed them."""
        if self.device.mark() is None:
            return code
        device, poll = self.device, self.transport.poll

        def waits_for_device(act: Act) -> Act:
            def run() -> None:
                act()
                mark = device.mark()
                while mark is not None and not mark.reached():
                    poll()  # messages move on meanwhile, as they do in steps that are not traced

            return run

        return [
            waits_for_device(act) if i.op in _ON_DEVICE else act for i, act in zip(self.instructions, code, strict=True)
        ]

    def note_wait(self, row: int | None) -> None:
        """Called as Transport's on_wait is. Of several waits in an instruction the last counts."""
        at = self.interpreter.state[ROW]
        if row is not None and at >= 0 and self.done < self.passes:
            self.cause[self.done, at] = self._cause(row)
        self.on_wait(row)

    def _cause(self, row: int) -> int:
        """An index of CAUSES; `row`: of the instruction that started what is waited for, negative where none did."""
        if row < 0:
            return REDUCTION
        i = self.instructions[row]
        if i.op == Op.SEND:
            return SEND_CAUSE
        return CAUSES.index(KIND_WORDS[Kind.W if i.op == Op.FETCH_W else Kind(i.kind)])

    def write(self, comm: MPI.Intracomm, program: Program | None, path: str) -> None:
        """Write what is done of all ranks as a Chrome trace; `program`: that of all ranks, on rank 0. Collective."""
        after = read_clocks(self.transport)
        shape = (self.passes, len(self.instructions) + 1)
        times = as_rank_0_times(np.array(self.times).reshape(shape)[: self.done], self.before, after)
        waited = np.diff(np.array(self.waited).reshape(shape)[: self.done], axis=1)
        by_rank = comm.gather((times, waited, self.cause[: self.done]))
        on_rank_0(comm, lambda: _write(by_rank or [], program, path))


def _write(by_rank: list[tuple[Times, Times, Small]], program: Program | None, path: str) -> None:
    """`by_rank`: times between instructions and seconds waited, shape (passes, rows + 1) and (passes, rows); causes."""
    assert program is not None
    start = min(times.min() for times, _, _ in by_rank)
    # Whole nanoseconds, so that starts, waits and lengths add up.
    boundaries = [np.rint((times - start) * 1e9) for times, _, _ in by_rank]
    begin = np.concatenate([times[:, :-1] for times in boundaries], axis=1)
    end = np.concatenate([times[:, 1:] for times in boundaries], axis=1)
    wait = np.minimum(np.rint(np.concatenate([waited for _, waited, _ in by_rank], axis=1) * 1e9), end - begin)
    cause = np.concatenate([causes for _, _, causes in by_rank], axis=1)
    timelines = measured_timelines(program, (begin + wait) / 1e3, (end - begin - wait) / 1e3, wait / 1e3, cause)
    write_output("--trace", path, trace_file(trace_events(program, timelines, MEASURED)))
