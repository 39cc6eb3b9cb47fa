"""Traces: when every rank executed every instruction of some steps, how long it waited, and for what.

- The traced loop records the time, and the seconds waited so far, between any two instructions.
- What a wait is for is recorded when the transport begins to wait.
- A GPU executes an instruction after its launch. So each instruction that computes is followed by a wait for the GPU,
  and traced steps are slower than others, the more so the shorter their jobs are.
- The clocks of all ranks are compared with rank 0's before the first traced step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpirun.comm.device import Device
from mpirun.comm.fail_together import on_rank_0
from mpirun.comm.output import write_output
from mpirun.comm.transport import Transport
from mpirun.engine.core.context import Act
from mpirun.engine.core.interpreter import Interpreter
from mpirun.watchdog import ROW
from schedgen.ir.instructions import COMPUTE, KIND_WORDS, Instruction, Kind, Op
from schedgen.ir.program import Program
from schedgen.report.chrome_trace import MEASURED, trace_events, trace_file
from schedgen.simulator.timeline import CAUSES, REDUCTION, SEND_CAUSE, measured_timelines
from schedgen.util.arrays import Small, Times

ROUNDS = 50  # exchanges with each rank, of which the quickest counts
TAG = 98
_ON_DEVICE = (*COMPUTE, Op.ADD, Op.STEP)


class Pass(NamedTuple):
    """What is recorded of one step."""

    times: list[float]  # by row, when the instruction began; one more: when the last one ended
    waited: list[float]  # as `times`: seconds that the transport had waited until then
    causes: Small  # by row, what it waited for: an index into CAUSES; negative: nothing


class StepTrace:
    """One rank's record of the passes between `begin` and `detach`."""

    def __init__(self, instructions: list[Instruction], device: Device) -> None:
        self.instructions, self.device = instructions, device
        self.passes: list[Pass] = []
        self.attached = contextlib.ExitStack()

    def begin(self, interpreter: Interpreter) -> None:
        """Trace all passes from now on. Collective."""
        self.ahead = clock_ahead(interpreter.transport)
        self.attach(interpreter)

    def attach(self, interpreter: Interpreter) -> None:
        """Trace this interpreter's passes."""
        transport, on_wait = interpreter.transport, interpreter.transport.on_wait
        if interpreter.execute_list != interpreter.execute:
            return
        self.attached.callback(setattr, interpreter, "execute_list", interpreter.execute_list)
        self.attached.callback(setattr, transport, "on_wait", on_wait)
        interpreter.execute_list = partial(self._execute, interpreter)
        transport.on_wait = partial(self._note_wait, interpreter.state, on_wait)

    def detach(self) -> None:
        """Stop tracing; the trace can be written afterwards."""
        self.attached.close()

    def _execute(self, interpreter: Interpreter) -> None:
        length, transport, clock = len(self.instructions), interpreter.transport, time.perf_counter
        code, state = self._wait_for_device(interpreter), interpreter.state
        times, waited = [0.0] * (length + 1), [0.0] * (length + 1)
        self.passes.append(Pass(times, waited, np.full(length, -1, np.int8)))
        for row, act in enumerate(code):
            state[ROW] = row
            times[row] = clock()
            waited[row] = transport.waited
            act()
        times[length] = clock()
        waited[length] = transport.waited

    def _wait_for_device(self, interpreter: Interpreter) -> list[Act]:
        """The acts; on a GPU those that compute end only when the GPU has executed them."""
        device, poll = self.device, interpreter.transport.poll
        if device.mark() is None:
            return interpreter.code

        def waits_for_device(act: Act) -> Act:
            def run() -> None:
                act()
                mark = device.mark()
                while mark is not None and not mark.reached():
                    poll()  # messages progress meanwhile, as in steps that are not traced

            return run

        pairs = zip(self.instructions, interpreter.code, strict=True)
        return [waits_for_device(act) if i.op in _ON_DEVICE else act for i, act in pairs]

    def _note_wait(self, state: memoryview, on_wait: Callable[[int | None], None], row: int | None) -> None:
        """Replaces Transport's on_wait. Of several waits in an instruction the last counts."""
        if row is not None and state[ROW] >= 0:
            self.passes[-1].causes[state[ROW]] = self._cause(row)
        on_wait(row)

    def _cause(self, row: int) -> int:
        """An index into CAUSES; `row`: of the instruction that started what is waited for; negative if none did."""
        if row < 0:
            return REDUCTION
        i = self.instructions[row]
        if i.op == Op.SEND and i.kind != Kind.SAVED:
            return SEND_CAUSE
        return CAUSES.index(KIND_WORDS.get(Kind.W if i.op == Op.FETCH_W else Kind(i.kind), "offload"))

    def write(self, comm: MPI.Intracomm, program: Program | None, path: str) -> None:
        """Write the passes of all ranks as a Chrome trace; `program`: that of all ranks, on rank 0. Collective."""
        times, waited, causes = (np.array(column) for column in zip(*self.passes, strict=True))
        by_rank = comm.gather((times + self.ahead, np.diff(waited, axis=1), causes))
        on_rank_0(comm, lambda: write_output("trace", path, _trace(by_rank or [], program)))


def _trace(by_rank: list[tuple[Times, Times, Small]], program: Program | None) -> bytes:
    """A Chrome trace of `by_rank`: times, shape (passes, rows + 1); waited seconds and causes, shape (passes, rows)."""
    assert program is not None
    start = min(times.min() for times, _, _ in by_rank)
    # Whole nanoseconds, so that starts, waits and lengths add up.
    boundaries = [np.rint((times - start) * 1e9) for times, _, _ in by_rank]
    begin = np.concatenate([times[:, :-1] for times in boundaries], axis=1)
    end = np.concatenate([times[:, 1:] for times in boundaries], axis=1)
    wait = np.minimum(np.rint(np.concatenate([waited for _, waited, _ in by_rank], axis=1) * 1e9), end - begin)
    cause = np.concatenate([causes for _, _, causes in by_rank], axis=1)
    timelines = measured_timelines(program, (begin + wait) / 1e3, (end - begin - wait) / 1e3, wait / 1e3, cause)
    return trace_file(trace_events(program, timelines, MEASURED))


def clock_ahead(transport: Transport, clock: Callable[[], float] = time.perf_counter) -> float:
    """By how many seconds rank 0's clock is ahead of this rank's; 0 within the error. Collective.

    Rank 0 asks each rank for its time, and assumes that the rank reads its clock half-way between question and answer.
    """
    comm = transport.comm
    answer, measured = np.zeros(1), np.zeros(2)

    def send(peer: int, values: NDArray[np.float64]) -> None:
        transport.wait(comm.Isend(values, peer, TAG).Test)

    def receive(peer: int, values: NDArray[np.float64]) -> None:
        transport.wait(comm.Irecv(values, peer, TAG).Test)

    if comm.rank == 0:
        for peer in range(1, comm.size):
            best = (float("inf"), 0.0)
            for _ in range(ROUNDS):
                begin = clock()
                send(peer, np.zeros(1))
                receive(peer, answer)
                end = clock()
                best = min(best, (end - begin, (begin + end) / 2 - float(answer[0])))
            send(peer, np.array(best))
    else:
        for _ in range(ROUNDS):
            receive(0, answer)
            send(0, np.array([clock()]))
        receive(0, measured)
    transport.wait(comm.Ibarrier().Test)
    took, ahead = measured.tolist()
    return ahead if abs(ahead) > took / 2 else 0.0
