"""One rank's interpreter, with everything it needs in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpi4py import MPI

from mpirun.comm.fail_together import together
from mpirun.comm.transport import NO_ROW, make_transport
from mpirun.engine.interpreter import Interpreter
from mpirun.engine.loss import check_order
from mpirun.engine.memory_slots import Memory
from mpirun.engine.optimizer import Optimizer
from mpirun.engine.setup import Training
from mpirun.engine.stage import Stage
from mpirun.model.build_stage import build_stage
from mpirun.watchdog import NOTHING, OTHERS, WAIT, WORDS
from schedgen.ir.header import Header
from schedgen.ir.instructions import COMPUTE, Instruction, Kind
from schedgen.ir.program import Program


def interpreter(
    comm: MPI.Intracomm,
    program: Program,
    instructions: Sequence[Instruction],
    of: Training,
    state: memoryview | None = None,
) -> Interpreter:
    """`program`: this rank's rows; `instructions`: the same one by one; `state`: for the watchdog. Collective."""
    header = program.header
    if of.model.loss_of == "minibatch":
        together(comm, lambda: check_order(header, instructions))
    memory = Memory(comm, program, instructions, of)
    stages = together(comm, lambda: _stages(comm.rank, header, instructions, memory, of))
    owned = {stage: one for stage, one in stages.items() if one.own}
    state = memoryview(bytearray(8 * WORDS)).cast("q") if state is None else state
    transport = make_transport(comm, header.groups, of.device, of.crowded, show_waits(state))
    return Interpreter(header, instructions, stages, memory, transport, state, of, Optimizer(of.recipe, owned))


def show_waits(state: memoryview) -> Callable[[int | None], None]:
    """What a transport calls when a wait begins and ends: the watchdog then sees what this rank waits for."""

    def show(row: int | None) -> None:
        state[WAIT] = NOTHING if row is None else OTHERS if row == NO_ROW else row

    return show


def _stages(
    rank: int, header: Header, instructions: Sequence[Instruction], memory: Memory, of: Training
) -> dict[int, Stage]:
    """The stages this rank owns, computes or adds gradients of."""
    mine = {
        stage: [via for via in header.weight_shards.parts(stage) if rank in header.weight_shards.holders(stage, via)]
        for stage in range(header.stages)
    }
    owned = {stage for stage, parts in mine.items() if len(parts) == len(header.weight_shards.parts(stage))}
    needed = {stage for stage, parts in mine.items() if parts} | {
        i.stage for i in instructions if i.op in COMPUTE or i.kind in (Kind.W, Kind.DW)
    }
    stages = {}
    for stage in sorted(needed):
        module = build_stage(of.model, stage, of.seed)
        place = None if stage in owned else memory.weights(stage)
        stages[stage] = Stage(
            module,
            stage,
            of.shapes[stage],
            of.device,
            stage in owned,
            place,
            of.mixed,
            header.weight_shards.parts(stage),
            mine[stage],
        )
        stages[stage].shared = of.model.tied_to_earlier(stage, stages[stage].names)
    return stages
