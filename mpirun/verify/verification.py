"""Compares a run with the same steps in one process, and reports how far their results differ."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

from mpi4py import MPI
from torch import Tensor

from mpirun.comm.output import say
from mpirun.comm.waiting import sleeping_barrier
from mpirun.engine.build import RunInterpreter
from mpirun.engine.running_statistics import statistics_rank
from mpirun.engine.setup import Setup
from mpirun.model.dataflow import Dataflow, Value
from mpirun.model.module_tensors import buffer_copies, given_modules, kept
from mpirun.model.stage_shape import Unit
from mpirun.verify.microbatch import Start
from mpirun.verify.one_process import run_in_one_process, run_with_delayed_updates, used_versions
from mpirun.verify.record import (
    Parameters,
    RankRecord,
    Record,
    compare,
    copy_pieces,
    default_tolerance,
    differing_copy,
    directionless,
    gather_record,
    same_bits,
)
from schedgen.ir.header import Header
from schedgen.ir.program import Program
from schedgen.ir.tensor_parallel import TensorParallel

REASONS = (
    "usual reasons: a forward draws from another generator than torch's default ones, keeps state outside of "
    "registered buffers, or changes a parameter; ranks have different data or modules; another Engine trains "
    "the same modules"
)


class Verification:
    """One rank's part of --verify: records what the interpreter does from now on, then compares."""

    def __init__(
        self, comm: MPI.Intracomm, program: Program, setup: Setup, interpreter: RunInterpreter, start: Start
    ) -> None:
        """`program`: this rank's rows; `start`: on rank 0, `first_values` of the model without slices."""
        self.start = start
        self.comm, self.program, self.header, self.setup = comm, program, program.header, setup
        self.interpreter = interpreter
        self.record = RankRecord([], [], {}, {})
        interpreter.optimizer_step.on_gradients = self._add_gradients

    def _add_gradients(self, totals: dict[Unit, Tensor]) -> None:
        """Record the gradients of the units of which this rank is the first owner."""
        self.record.gradients.append({})
        for (stage, shard), total in totals.items():
            if self.header.first_owner(stage, shard) == self.comm.rank:
                self.record.gradients[-1].update(copy_pieces(self.interpreter.stages[stage], shard, total))

    def compare(self, steps: int, beat: Callable[[], None], tolerance: float | None) -> int:
        """Repeat all steps on rank 0, and compare them; returns the exit code on all ranks. Collective.

        beat       is called after each microbatch
        tolerance  the relative difference that is allowed; None: the default for the types
        """
        for stage in self.interpreter.optimizer.stages.values():
            for shard, flat in stage.owned.items():
                self.record.parameters.update(copy_pieces(stage, shard, flat))
        comm, setup, header, shapes = self.comm, self.setup, self.header, self.setup.shapes
        for index, stage in self.interpreter.stages.items():
            if shapes[index].overwrites_buffers and statistics_rank(header, index) == comm.rank:
                self.record.buffers.update({(index, n): x.cpu() for n, x in buffer_copies(stage.module).items()})
        differing = differing_copy(comm, header, shapes, self.record)
        ours = gather_record(comm, header, shapes, self.record)
        used = used_versions(comm, self.program)
        code = int(differing is not None)
        if ours is not None and differing is not None:
            _say(f"failed: {differing}")
        elif ours is not None:
            setup, header, ours = without_slices(setup, header, ours)
            with kept(module for entry in setup.model.stages for _, module in given_modules(entry)):
                if used is None:
                    theirs = run_in_one_process(setup, header, self.start, steps, beat)
                else:
                    theirs = run_with_delayed_updates(setup, header, used, self.start, steps, beat)
            code = self._report(ours, theirs, tolerance)
        sleeping_barrier(comm)  # meanwhile rank 0 has repeated all steps
        return int(comm.bcast(code))

    def _report(self, ours: Record, theirs: Record, tolerance: float | None) -> int:
        tolerance = default_tolerance(self.setup) if tolerance is None else tolerance
        limit = 0.0 if self.setup.canonical else tolerance
        left_out = directionless(theirs) if limit else None
        differences = compare(ours, theirs, left_out)
        for difference in differences:
            where = f" ({difference.where})" if difference.where else ""
            _say(f"{difference.what} differ from one process by at most {difference.size:.3g}{where}")
        if left_out is not None and (count := sum(int(mask.sum()) for mask in left_out.values())):
            elements = sum(mask.numel() for mask in left_out.values())
            _say(f"{count} of {elements} parameter elements are left out: their gradients are rounding alone")
        code = 0 if all(difference.size <= limit for difference in differences) else 1
        equal = not code and self.setup.canonical and same_bits(ours, theirs)
        why = "every bit of losses, gradients and parameters equals one process" if equal else f"the limit is {limit:g}"
        _say(f"{'failed' if code else 'passed'}: {why}")
        if code:
            _say(REASONS)
        return code


def _say(line: str) -> None:
    say(f"verify: {line}", sys.stdout)


def without_slices(setup: Setup, header: Header, record: Record) -> tuple[Setup, Header, Record]:
    """A run's record, and the setup of its reference.

    In canonical mode the reference has slices and adds them up, as the ranks do; else it runs the model without slices.
    """
    if not header.tensor_parallel or setup.canonical:
        return setup, header, record
    stages = header.model_stages
    plain = replace(
        header,
        scheme={**header.scheme, "stages": stages},
        graph=header.model_graph,
        compute=header.compute[:, header.first_slices],
        tensor_parallel=TensorParallel(1, (), stages),
    )
    shapes = [setup.shapes[stage] for stage in header.first_slices]
    of_schedule = setup.dataflow.reads
    reads = [
        [x._replace(stage=header.model_stage(x.stage)) if isinstance(x, Value) else x for x in of_schedule[stage]]
        for stage in header.first_slices
    ]
    dataflow = Dataflow(reads, plain, [shape.outputs for shape in shapes])
    of_model = replace(setup, model=setup.unsliced_model, shapes=shapes, dataflow=dataflow)
    return of_model, plain, _joined(setup, header, record)


def _joined(setup: Setup, header: Header, record: Record) -> Record:
    tensor = header.tensor_parallel

    def joined(values: Parameters) -> Parameters:
        parameters: Parameters = {}
        for (stage, name), value in values.items():
            key = (header.model_stage(stage), name)
            dim = setup.shapes[stage].sliced_dims.get(name) if tensor.sliced[stage] else None
            if dim is None:
                parameters[key] = value  # the same in all slices
            elif key not in parameters:
                parameters[key] = dim.join([values[slice, name] for slice in tensor.slices_of(stage)])
        return parameters

    buffers = {  # each slice of a sliced stage has its own
        (header.model_stage(stage), name): x
        for (stage, name), x in record.buffers.items()
        if header.is_first_slice(stage) and not tensor.sliced[stage]
    }
    gradients = [joined(step) for step in record.gradients]
    return Record(record.losses, gradients, joined(record.parameters), buffers)
