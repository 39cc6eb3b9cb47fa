"""One rank's interpreter, with everything it needs in place."""

from __future__ import annotations

from collections.abc import Sequence

from mpi4py import MPI

import mpirun.model
from mpirun.errors import together
from mpirun.interpreter import Interpreter
from mpirun.loss import check_order
from mpirun.memory import Memory
from mpirun.optimizer import Optimizer
from mpirun.stage import Stage
from mpirun.training import Training
from mpirun.transport import transport
from schedgen.program import COMPUTE, Header, Instruction, Kind, Program


def interpreter(
    comm: MPI.Intracomm,
    program: Program,
    instructions: Sequence[Instruction],
    of: Training,
    state: memoryview | None = None,
) -> Interpreter:
    """`program`: this rank's rows; `instructions`: the same one by one; `state`: for the guard. Collective."""
    header = program.header
    if of.model.loss_of == "minibatch":
        together(comm, lambda: check_order(header, instructions))
    memory = Memory(comm, program, instructions, of)
    stages = together(comm, lambda: _stages(comm.rank, header, instructions, memory, of))
    owned = {stage: one for stage, one in stages.items() if one.own}
    link = transport(comm, header.groups, of.device, of.crowded, state)
    return Interpreter(header, instructions, stages, memory, link, of, Optimizer(of.recipe, owned))


def _stages(
    rank: int, header: Header, instructions: Sequence[Instruction], memory: Memory, of: Training
) -> dict[int, Stage]:
    """The stages this rank owns, computes or adds gradients of."""
    mine = {
        stage: [via for via in header.parts(stage) if rank in header.holders(stage, via)]
        for stage in range(header.stages)
    }
    owned = {stage for stage, parts in mine.items() if len(parts) == len(header.parts(stage))}
    needed = {stage for stage, parts in mine.items() if parts} | {
        i.stage for i in instructions if i.op in COMPUTE or i.kind in (Kind.W, Kind.DW)
    }
    stages = {}
    for stage in sorted(needed):
        module = mpirun.model.build(of.model, stage, of.seed)
        place = None if stage in owned else memory.weights(stage)
        stages[stage] = Stage(
            module,
            stage,
            of.shapes[stage],
            of.device,
            stage in owned,
            place,
            of.mixed,
            header.parts(stage),
            mine[stage],
        )
        stages[stage].shared = mpirun.model.shared_before(of.model, stage, stages[stage].names)
    return stages
