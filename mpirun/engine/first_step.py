"""The first step: times its jobs, and records which parameters get a gradient.

Later steps let MPI make progress during the long jobs that have messages in flight.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from mpirun.comm.progress_thread import MessageProgress, needs_calls
from mpirun.comm.transport import Transport
from mpirun.engine.core.context import Act, Context
from mpirun.engine.core.interpreter import Interpreter
from mpirun.engine.core.optimizer_step import StepResult
from mpirun.engine.job_graphs import JobGraphs
from schedgen.ir.instructions import COMPUTE, Instruction, Op
from schedgen.util.errors import UsageError


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
        self.reached: set[tuple[int, str]] = set()  # (stage, parameter) that got a gradient in the first step

    def begin_pass(self) -> None:
        """Count the passes of graphs; use words once passes neither allocate memory nor load kernels.

        Both may wait for streams that wait for words.
        """
        if self.graphs is not None:
            self.graphs.begin_pass()
        self.context.device.use_words(self.timed and (self.graphs is None or self.graphs.captured))


def run_first(interpreter: RunInterpreter, step: int) -> StepResult:
    """As `interpreter.run`, for the first step: note in `reached` which parameters got a gradient, and time its jobs.

    In later steps, long jobs with messages in flight let MPI make progress.
    """
    with _time_jobs(interpreter) as seconds, _note_reached(interpreter):
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


@contextlib.contextmanager
def _note_reached(interpreter: RunInterpreter) -> Iterator[None]:
    stage_of, instructions = interpreter.context.stage_of, interpreter.context.instructions
    stages = {stage_of(i) for i in instructions if i.op in (Op.BWD, Op.BWD_W)}
    # An AccumulateGrad node lives as long as it is held here. A hook on the parameter would slow down later steps.
    places = [((s.index, n), p) for s in stages for n, p in zip(s.names, s.parameters, strict=True)]
    for (_, name), parameter in places:
        if not parameter.requires_grad:
            raise UsageError(
                f"{name} has been frozen since the Engine was built: freeze it before, or let the function optimizer= "
                "leave it out"
            )
    adders = {place: get_gradient_edge(parameter).node for place, parameter in places}

    def reach(place: tuple[int, str], _: object, gradients: tuple[Tensor | None, ...]) -> None:
        if gradients[0] is not None:  # a custom backward may return None
            interpreter.reached.add(place)

    with contextlib.ExitStack() as hooks:
        for place, adder in adders.items():
            hooks.callback(adder.register_hook(partial(reach, place)).remove)
        yield


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
