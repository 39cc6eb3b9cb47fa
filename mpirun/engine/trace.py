"""--trace: when every rank executed every instruction of the last steps, and how long it waited.

The traced loop notes the time and the seconds waited so far between two
instructions, in lists taken before. What a rank waited for is noted where it
has to wait anyway. A GPU works behind the list's back: there every instruction
that computes is followed by a wait until the GPU is done with it, so a traced
step is slower than others, and the more the shorter its jobs are.

Clocks of other ranks are read off those of rank 0 before the first traced step
and after the last; between the two a difference changes linearly.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpirun.comm.device import Device
from mpirun.comm.fail_together import on_rank_0
from mpirun.comm.transport import Transport
from mpirun.engine.forward_backward import Act
from mpirun.engine.interpreter import Interpreter
from mpirun.watchdog import ROW
from schedgen.ir.instructions import COMPUTE, Instruction, Kind, Op, Small
from schedgen.ir.program import Program
from schedgen.report.chrome_trace import trace_events, trace_file
from schedgen.simulator.simulate import REDUCTION, SEND_CAUSE, Times
from schedgen.simulator.timeline import MEASURED, measured
from schedgen.util.errors import RefusedFile
from schedgen.util.files import open_output

ROUNDS = 50  # exchanges with each rank, of which the quickest counts
CLOCK = 98  # the tag of their messages
_ON_DEVICE = (*COMPUTE, Op.ADD, Op.STEP)


class Reading(NamedTuple):
    """What this rank's clock shows and what rank 0's shows at the same moment."""

    here: float  # seconds
    ahead: float  # seconds, what rank 0's shows more
    within: float  # seconds by which that may be wrong


def reading(transport: Transport, clock: Callable[[], float] = time.perf_counter) -> Reading:
    """Compare this rank's clock with rank 0's. Collective; all ranks return at about the same moment.

    Rank 0 asks each rank what its clock shows, and takes it for shown half-way
    between question and answer. A difference smaller than what the quickest
    exchange can tell counts as none, so that ranks of one host stay exact.
    """
    comm = transport.comm
    word, known = np.zeros(1), np.zeros(2)

    def exchange(peer: int, said: float | None) -> None:
        """Say something or wait for it."""
        if said is None:
            transport.wait(comm.Irecv(word, peer, CLOCK).Test)
        else:
            transport.wait(comm.Isend(np.array([said]), peer, CLOCK).Test)

    if comm.rank == 0:
        for peer in range(1, comm.size):
            best = (float("inf"), 0.0)
            for _ in range(ROUNDS):
                begin = clock()
                exchange(peer, 0.0)
                exchange(peer, None)
                end = clock()
                best = min(best, (end - begin, (begin + end) / 2 - float(word[0])))
            transport.wait(comm.Isend(np.array(best), peer, CLOCK).Test)
    else:
        for _ in range(ROUNDS):
            exchange(0, None)
            exchange(0, clock())
        transport.wait(comm.Irecv(known, 0, CLOCK).Test)
    transport.wait(comm.Ibarrier().Test)
    return Reading(clock(), float(known[1]), float(known[0]) / 2)


def aligned(times: Times, before: Reading, after: Reading) -> Times:
    """Times of this rank's clock as rank 0's, in seconds."""
    first, last = (0.0 if abs(one.ahead) <= one.within else one.ahead for one in (before, after))
    share = (times - before.here) / max(after.here - before.here, 1e-9)
    shifted: Times = times + (first + (last - first) * share)
    return shifted


class Trace:
    """One rank's record of the last walks through its list."""

    def __init__(self, interpreter: Interpreter, instructions: list[Instruction], device: Device, walks: int) -> None:
        """`walks`: how many will be traced. Nothing is until `begin`."""
        self.interpreter, self.instructions, self.device = interpreter, instructions, device
        self.transport, self.walks, self.at = interpreter.transport, walks, 0
        each = len(instructions) + 1
        self.times, self.waited = [0.0] * (walks * each), [0.0] * (walks * each)
        self.cause = np.full((walks, len(instructions)), -1, np.int8)
        self.code: list[Act] = []
        self.made_from: list[Act] | None = None

    def begin(self) -> None:
        """Trace all walks from now on. Collective."""
        self.before = reading(self.transport)
        self.interpreter.walk_list = self.walk
        self.on_wait, self.transport.on_wait = self.transport.on_wait, self.note_cause

    def walk(self) -> None:
        """As Interpreter.walk, with the time between any two instructions."""
        interpreter, transport, clock = self.interpreter, self.transport, time.perf_counter
        if self.made_from is not interpreter.code:
            self.made_from, self.code = interpreter.code, self._finished(interpreter.code)
        times, waited = self.times, self.waited
        at, state = self.at * (len(self.code) + 1), interpreter.state
        for state[ROW], act in enumerate(self.code):
            times[at] = clock()
            waited[at] = transport.waited
            act()
            at += 1
        times[at] = clock()
        waited[at] = transport.waited
        self.at += 1

    def _finished(self, code: list[Act]) -> list[Act]:
        """On a GPU: acts that end when the GPU has done them."""
        if self.device.mark() is None:
            return code
        device, poll = self.device, self.transport.poll

        def finished(act: Act) -> Act:
            def run() -> None:
                act()
                mark = device.mark()
                while mark is not None and not mark.reached():
                    poll()  # messages move on meanwhile, as they do in other steps

            return run

        return [finished(act) if i.op in _ON_DEVICE else act for i, act in zip(self.instructions, code, strict=True)]

    def note_cause(self, row: int | None) -> None:
        """Called when a wait begins and ends: notes what for. Of several waits of an instruction the last counts."""
        at = self.interpreter.state[ROW]
        if row is not None and at >= 0 and self.at < self.walks:
            self.cause[self.at, at] = self._cause(row)
        self.on_wait(row)

    def _cause(self, row: int) -> int:
        """An index of CAUSES; `row`: the instruction that started what is waited for."""
        if row < 0:
            return REDUCTION
        i = self.instructions[row]
        if i.op == Op.SEND:
            return SEND_CAUSE
        return (Kind.W if i.op == Op.FETCH_W else i.kind) - 1

    def write(self, comm: MPI.Intracomm, program: Program | None, path: str) -> None:
        """The trace of all ranks, written by rank 0, which has the whole program. Collective."""
        after = reading(self.transport)
        shape = (self.walks, len(self.instructions) + 1)
        times = aligned(np.array(self.times).reshape(shape), self.before, after)
        waited = np.diff(np.array(self.waited).reshape(shape), axis=1)
        every = comm.gather((times, waited, self.cause))
        on_rank_0(comm, lambda: _write(every or [], program, path))


def _write(every: list[tuple[Times, Times, Small]], program: Program | None, path: str) -> None:
    """`every`: times and seconds waited between instructions, and causes, by rank."""
    assert program is not None
    start = min(times.min() for times, _, _ in every)
    # Whole nanoseconds, so that starts, waits and lengths add up.
    begins = [np.rint((times - start) * 1e9) for times, _, _ in every]
    came = np.concatenate([one[:, :-1] for one in begins], axis=1)
    left = np.concatenate([one[:, 1:] for one in begins], axis=1)
    wait = np.minimum(np.rint(np.concatenate([one for _, one, _ in every], axis=1) * 1e9), left - came)
    cause = np.concatenate([one for _, _, one in every], axis=1)
    walks = measured(program, (came + wait) / 1e3, (left - came - wait) / 1e3, wait / 1e3, cause)
    data = trace_file(trace_events(program, walks, MEASURED))
    try:
        with open_output(path) as out:
            out.write(data)
    except OSError as error:
        raise RefusedFile(f"--trace {path}: {error.strerror}") from None
