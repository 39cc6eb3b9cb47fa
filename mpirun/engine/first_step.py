"""The first step times its jobs: later steps let MPI make progress during the long ones with messages in flight."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence

from mpirun.comm.progress_thread import MessageProgress, needs_calls
from mpirun.comm.transport import Transport
from mpirun.engine.core.context import Act, Context
from mpirun.engine.core.interpreter import Interpreter
from mpirun.engine.core.optimizer_step import StepResult
from mpirun.engine.job_graphs import JobGraphs
from schedgen.ir.instructions import COMPUTE, Instruction


class RunInterpreter(Interpreter):
    """The core's interpreter, with what surrounds its passes: graphs, stream words, calls of MPI during long jobs."""

    def __init__(
        self,
        context: Context,
        state: memoryview,
        under_way: Sequence[int],
        progress: MessageProgress,
        graphs: JobGraphs | None,
    ) -> None:
        """Prepare all instructions. Collective.

        state      the words that the watchdog reads
        under_way  by row, the bytes in flight while the instruction runs
        progress   calls MPI; interpreters with the same modules share it
        graphs     captures and replays jobs; None: no job is captured
        """
        super().__init__(context, state)
        self.optimizer, self.slots = context.optimizer, context.slots
        self.under_way, self.progress, self.graphs = under_way, progress, graphs
        self.timed = False  # whether the first step is done

    def begin_pass(self) -> None:
        """Count the passes of graphs; use words once passes neither allocate memory nor load kernels.

        Both may wait for streams that wait for words.
        """
        if self.graphs is not None:
            self.graphs.begin_pass()
        self.context.device.use_words(self.timed and (self.graphs is None or self.graphs.captured))


def run_first(interpreter: RunInterpreter, step: int) -> StepResult:
    """As `interpreter.run`, for the first step; in later steps, long jobs let MPI make progress."""
    with _time_jobs(interpreter) as seconds:
        result = interpreter.run(step)
    interpreter.timed = True
    _let_mpi_go_on(interpreter, seconds)
    return result


@contextlib.contextmanager
def _time_jobs(interpreter: RunInterpreter) -> Iterator[dict[tuple[int, int], float]]:
    """Time the jobs of the block, without their waits; yields the least seconds of each stage and opcode."""
    transport, acts = interpreter.transport, interpreter.code
    seconds: dict[tuple[int, int], float] = {}

    def timed(act: Act, i: Instruction) -> Act:
        def run() -> None:
            waited, begin = transport.waited, time.perf_counter()
            act()
            spent = time.perf_counter() - begin - (transport.waited - waited)
            seconds[i.stage, i.op] = min(spent, seconds.get((i.stage, i.op), spent))

        return run

    pairs = zip(acts, interpreter.context.instructions, strict=True)
    interpreter.code = [timed(act, i) if i.op in COMPUTE else act for act, i in pairs]
    try:
        yield seconds
    finally:
        interpreter.code = acts


def _let_mpi_go_on(interpreter: RunInterpreter, seconds: Mapping[tuple[int, int], float]) -> None:
    """Let MPI make progress during jobs where this pays; `seconds`: how long a job takes, by stage and opcode."""
    transport, code = interpreter.transport, interpreter.code
    if transport.moves_alone or interpreter.graphs is not None:  # a rank is never inside a replayed job for long
        return
    for row, i in enumerate(interpreter.context.instructions):
        if i.op in COMPUTE and needs_calls(seconds[i.stage, i.op], interpreter.under_way[row]):
            code[row] = _where_messages_move(transport, interpreter.progress.with_thread(code[row]), code[row])


def _where_messages_move(transport: Transport, with_calls: Act, act: Act) -> Act:
    """An act that runs `with_calls` if messages are in flight when it begins, else `act`."""
    transport.watch()
    moves = transport.moves

    def run() -> None:
        (with_calls if moves() else act)()

    return run
