"""The core's interpreter, with what surrounds its passes: graphs, stream words, calls of MPI during jobs."""

from __future__ import annotations

from collections.abc import Sequence

from mpirun.comm.progress_thread import ENOUGH, MessageProgress
from mpirun.comm.transport import Transport
from mpirun.engine.core.context import Act, Context
from mpirun.engine.core.interpreter import Interpreter
from mpirun.engine.core.optimizer_step import StepResult
from mpirun.engine.job_graphs import JobGraphs
from schedgen.ir.instructions import COMPUTE


class RunInterpreter(Interpreter):
    """A rank's list, prepared for a run."""

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
        self.optimizer, self.slots, self.progress, self.graphs = context.optimizer, context.slots, progress, graphs
        self.warm = False  # whether a step is done
        if self.transport.moves_alone or graphs is not None:  # a rank is never inside a replayed job for long
            return
        for row, i in enumerate(context.instructions):
            if i.op in COMPUTE and under_way[row] >= ENOUGH:
                act = self.code[row]
                self.code[row] = _where_messages_move(self.transport, progress.with_thread(act), act)

    def run(self, step: int) -> StepResult:
        """As in `Interpreter`; with words once steps neither allocate memory nor load kernels.

        Both may wait for streams that wait for words.
        """
        if self.graphs is not None:
            self.graphs.begin_pass()
        self.context.device.use_words(self.warm and (self.graphs is None or self.graphs.captured))
        result = super().run(step)
        self.warm = True
        return result


def _where_messages_move(transport: Transport, with_calls: Act, act: Act) -> Act:
    """An act that runs `with_calls` if messages are in flight when it begins, else `act`."""
    transport.watch()
    moves = transport.moves

    def run() -> None:
        (with_calls if moves() else act)()

    return run
