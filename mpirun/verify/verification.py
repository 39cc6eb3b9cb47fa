"""Compares a run with the same steps in one process, and reports how far their results differ."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from mpi4py import MPI
from torch import Tensor

from mpirun.comm.output import say
from mpirun.comm.waiting import sleeping_barrier
from mpirun.engine.interpreter import Interpreter
from mpirun.engine.setup import Setup
from mpirun.engine.weight_shards import Unit
from mpirun.model.module_tensors import given_modules, kept
from mpirun.verify.compare import compare, default_tolerance, directionless, same_bits
from mpirun.verify.delayed_updates import run_with_delayed_updates, used_versions
from mpirun.verify.one_process import run_in_one_process
from mpirun.verify.record import Parameters, RankRecord, Record, copy_pieces, gather_record
from mpirun.verify.reference_stage import Start
from mpirun.verify.statistics import Statistics, gather_statistics, own_buffers
from mpirun.verify.tensor_slices import without_slices
from schedgen.ir.program import Program
from schedgen.util.errors import UsageError, clip, one_line

REASONS = (
    "usual reasons: a forward draws from another generator than torch's default ones, keeps state outside of "
    "registered buffers, or changes a parameter; ranks have different data"
)


class Verification:
    """One rank's part of --verify: records what the interpreter does from now on, then compares."""

    def __init__(
        self, comm: MPI.Intracomm, program: Program, setup: Setup, interpreter: Interpreter, start: Start
    ) -> None:
        """`program`: this rank's rows; `start`: on rank 0, `first_values` of the model without slices."""
        self.start = start
        self.comm, self.program, self.header, self.setup = comm, program, program.header, setup
        self.interpreter = interpreter
        self.record = RankRecord([], [], {}, {})
        self.resumed_buffers: Parameters = {}  # the model's buffers on this rank, as read from a checkpoint
        interpreter.optimizer_step.on_gradients = self._add_gradients

    def resumed(self) -> None:
        """Record the buffers with which the run continues from a checkpoint."""
        self.resumed_buffers = self._buffers()

    def _buffers(self) -> Parameters:
        return own_buffers(self.program, self.setup, self.interpreter.stages, self.comm.rank)

    def _add_gradients(self, totals: dict[Unit, Tensor]) -> None:
        """Record the gradients of the units of which this rank is the first owner."""
        self.record.gradients.append({})
        for (stage, shard), total in totals.items():
            if self.header.first_owner(stage, shard) == self.comm.rank:
                self.record.gradients[-1].update(copy_pieces(self.interpreter.stages[stage], shard, total))

    def _divides_by_gradients(self) -> bool:
        """Whether the optimizer makes full steps even from tiny gradients, which is assumed of all but SGD."""
        description = self.interpreter.optimizer.description()
        return description is not None and description[0].rpartition(".")[2].lower() != "sgd"

    def compare(self, begun: int, steps: int, beat: Callable[[], None], tolerance: float | None) -> int:
        """Repeat all steps on rank 0, compare those from `begun` on; returns the exit code on all ranks. Collective.

        beat       is called after each microbatch
        tolerance  the relative difference that is allowed; None: the default for the types
        """
        for stage in self.interpreter.optimizer.stages.values():
            for shard, flat in stage.owned.items():
                self.record.parameters.update(copy_pieces(stage, shard, flat))
        self.record.buffers.update(self._buffers())
        ours = gather_record(self.comm, self.header, self.setup.shapes, self.record)
        setup, header = self.setup, self.header
        statistics = gather_statistics(self.comm, self.program, setup, self.record.buffers, self.resumed_buffers)
        if isinstance(ours, Record):
            setup, header, ours, statistics = without_slices(setup, header, ours, statistics)
        used = used_versions(self.comm, self.program)
        code = 0
        if isinstance(ours, str):
            _say(f"failed: {ours}")
            code = 1
        elif ours is not None:
            with kept(module for entry in setup.model.stages for _, module in given_modules(entry)):
                if used is None:
                    theirs = run_in_one_process(setup, header, self.start, statistics, begun, steps, beat)
                else:
                    theirs = run_with_delayed_updates(setup, header, used, self.start, statistics, begun, steps, beat)
            code = self._report(ours, theirs, statistics, tolerance)
        sleeping_barrier(self.comm)  # meanwhile rank 0 has repeated all steps
        return int(self.comm.bcast(code))

    def _report(self, ours: Record, theirs: Record, statistics: Statistics, tolerance: float | None) -> int:
        """Print the differences; return the exit code."""
        tolerance = default_tolerance(self.setup) if tolerance is None else tolerance
        limit = 0.0 if self.setup.canonical else tolerance
        if len(ours.gradients) != len(theirs.gradients):
            _say("failed: the steps that changed nothing are not those of one process")
            return 1
        left_out = directionless(theirs) if limit and self._divides_by_gradients() else None
        differences = compare(ours, theirs, limit, left_out)
        for difference in differences:
            where = f" ({difference.where})" if difference.where else ""
            _say(f"{difference.what} differ from one process by at most {difference.size:.3g}{where}")
        if left_out is not None and (count := sum(int(mask.sum()) for mask in left_out.values())):
            elements = sum(mask.numel() for mask in left_out.values())
            _say(f"{count} of {elements} parameter elements are left out: their gradients are rounding alone")
        for stage, why in statistics.left_out.items():
            _say(f"{clip(', '.join(statistics.names[stage]))} of stage {stage} are not compared: {why}")
        code = 0 if all(difference.size <= difference.limit for difference in differences) else 1
        equal = not code and self.setup.canonical and same_bits(ours, theirs)
        why = "every bit of losses, gradients and parameters equals one process" if equal else f"the limit is {limit:g}"
        _say(f"{'failed' if code else 'passed'}: {why}")
        if code:
            _say(REASONS)
        return code


def _say(line: str) -> None:
    say(f"verify: {line}", sys.stdout)


def check_repeatable(changed: Sequence[str]) -> None:
    """UsageError if settings changed across resumes: one process would not repeat the same steps."""
    if changed:
        raise UsageError(
            f"verify repeats all steps from the first, but the checkpoint was made with {one_line(changed[0])}"
        )
