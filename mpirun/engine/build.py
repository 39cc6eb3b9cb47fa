"""One rank's interpreter for a run, built with everything that it needs: stages, memory slots, transport, optimizer.

Around the core's passes it has graphs, stream words, and calls of MPI during jobs.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from mpi4py import MPI
from torch import Tensor, nn

from mpirun.comm.fail_together import Stop, first_difference, together
from mpirun.comm.gpu_transport import make_transport
from mpirun.comm.ordered_allreduce import AllreduceQueue
from mpirun.comm.progress_thread import ENOUGH, MessageProgress
from mpirun.comm.transport import NO_ROW, Transport
from mpirun.data.microbatches import MicrobatchReader, Position
from mpirun.data.values import digest_of, raw_bytes
from mpirun.engine.core.buffers import LocalBuffers
from mpirun.engine.core.context import Act, Around, Context
from mpirun.engine.core.grad_buffers import GradBuffers
from mpirun.engine.core.interpreter import Interpreter
from mpirun.engine.core.optimizer_step import StepResult
from mpirun.engine.core.stage import LocalStage
from mpirun.engine.grad_norm import GradNorms
from mpirun.engine.job_graphs import Job, JobGraphs, check_nothing_offloaded
from mpirun.engine.loss import MinibatchLoss, check_forwards_first, exchange_among, minibatch_ranks, score
from mpirun.engine.memory_slots import MemorySlots
from mpirun.engine.optimizer import Optimizer
from mpirun.engine.other_sums import SliceSums, tied_sum
from mpirun.engine.running_statistics import KeptBuffers
from mpirun.engine.saved_sizes import saved_sizes
from mpirun.engine.setup import Setup
from mpirun.engine.weight_versions import StageVersions
from mpirun.model.build_stage import build_stage
from mpirun.model.contract import Model
from mpirun.model.module_tensors import own_tensors
from mpirun.model.rng import LOSS, derived_seed
from mpirun.watchdog import NOTHING, OTHERS, WAIT, WORDS
from schedgen.ir.header import Header
from schedgen.ir.instructions import COMPUTE, Instruction, Kind
from schedgen.ir.program import Program
from schedgen.simulator.buffer_sizes import bytes_under_way


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


class Values(NamedTuple):
    """What must be the same on all ranks with a stage: a tied parameter (under the tie's first name), all trained
    parameters, or all else.
    """

    stage: int  # of the model's
    slice: int
    what: str


def value_digests(model: Model, index: int, module: nn.Module, owned: bool) -> dict[Values, str]:
    """Digests of a stage's values. Only a rank that owns some part of its weights has trained parameters."""

    def values(stage: int, what: str) -> Values:
        return Values(model.model_stage(stage), model.slice_of(stage).index, what)

    tensors = own_tensors(module)
    others = {name: tensor for name, tensor in tensors.items() if not tensor.requires_grad}
    digests = {values(index, "frozen parameters or buffers"): _digest(others)}
    if owned:
        trained = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
        digests[values(index, "parameters")] = _digest(trained)
        for first, *more in model.tied:
            for _, name in (place for place in (first, *more) if place[0] == index):
                digests[values(*first)] = _digest({first[1]: module.get_parameter(name)})
    return digests


def check_same_start(comm: MPI.Intracomm, own: Mapping[Values, str]) -> None:
    """Stop if ranks have different values of a stage. Collective."""
    if (difference := first_difference(comm, own)) is not None:
        values, one, other, *_ = difference
        raise Stop(
            f"ranks {one} and {other} begin with different values of stage {values.stage}, {values.what}: the code "
            "that makes them should draw the same numbers on every rank, as after torch.manual_seed with the same "
            "number of threads; modules that an earlier Engine has trained have their values on its owners' ranks: "
            "save and resume"
        )


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """A digest of names and values. A whole stage's values go through CRC-32: three times as fast as SHA-256."""
    items = ((name, x.dtype, x.shape, zlib.crc32(raw_bytes(x).data)) for name, x in sorted(tensors.items()))
    return digest_of(part for item in items for part in item)


def build_interpreter(
    comm: MPI.Intracomm,
    program: Program,
    instructions: Sequence[Instruction],
    setup: Setup,
    state: memoryview | None = None,
    other: RunInterpreter | None = None,
    digests: MutableMapping[Values, str] | None = None,
) -> RunInterpreter:
    """Build one rank's interpreter. Collective; Stop if the model does not fit the schedule.

    program, instructions  this rank's list, as a table and as single instructions
    state                  the words that the watchdog reads; None: there is no watchdog
    other                  an interpreter of the same list for microbatches of another shape, never in use at the same
                           time; the new one shares its weights, modules, optimizer, memory slots, and the gradient
                           buffers of what the rank owns
    digests                gets those of the values that stages begin with
    """
    header, whole = program.header, setup.model.loss_of == "minibatch"
    if setup.graphs:
        together(comm, lambda: check_nothing_offloaded(instructions))
    if whole:
        check_forwards_first(comm, header, instructions)
    slots = MemorySlots(comm, program, instructions, setup, () if other is None else other.slots.blocks)
    if other is None:
        stages, of_values = together(comm, lambda: _local_stages(comm.rank, header, instructions, slots, setup))
        owned = {index: stage for index, stage in stages.items() if stage.owned}
        optimizer = together(
            comm, lambda: Optimizer(setup.recipe, setup.model, owned, setup.seed, header.offloads_optimizer)
        )
        if digests is not None:
            digests.update(of_values)
    else:
        stages = {s: stage.elsewhere(slots.weights(s), setup.shapes[s]) for s, stage in other.stages.items()}
        optimizer = other.optimizer
    state = memoryview(bytearray(8 * WORDS)).cast("q") if state is None else state
    transport = make_transport(comm, header.groups, setup.crowded, _show_waits(state), device=setup.device)
    position = Position()
    graphs = JobGraphs(setup.device, slots.blocks) if setup.graphs else None

    def seed_loss() -> None:
        setup.device.seed(derived_seed(setup.seed, position.step, LOSS))

    slice_sums = SliceSums()
    exchange = exchange_among(comm, minibatch_ranks(header))
    context = Context(
        header=header, instructions=instructions, shapes=setup.shapes, dataflow=setup.dataflow, seed=setup.seed,
        device=setup.device, position=position, stages=stages, slots=slots, transport=transport,
        allreduces=AllreduceQueue(transport), buffers=LocalBuffers(transport),
        grad_buffers=GradBuffers(
            header, stages, slots, comm.rank, None if other is None else other.context.grad_buffers
        ),
        microbatches=MicrobatchReader(setup.microbatches, setup.device.torch, position),
        score=partial(score, setup.model.loss),
        minibatch_loss=MinibatchLoss(setup.model, setup.device.torch, setup.autocast_dtype, seed_loss, exchange)
        if whole else None,
        around=_around(instructions, graphs), versions=StageVersions(instructions, stages, slots), optimizer=optimizer,
        norms=GradNorms(header, setup.shapes, comm.rank, setup.canonical),
        other_sums={Kind.T: partial(tied_sum, setup.model), Kind.X: slice_sums.prepare, Kind.G: slice_sums.prepare},
    )  # fmt: skip
    context.saved_sizes.update(saved_sizes(comm, context, setup.example))
    lent = [sum(context.saved_sizes.get(stage, ())) for stage in range(header.stages)]
    progress = MessageProgress(comm, setup.device) if other is None else other.progress
    under_way = bytes_under_way(program, slots.bytes._replace(saved=slots.bytes.saved + lent)).tolist()
    return RunInterpreter(context, state, under_way, progress, graphs)


def _around(instructions: Sequence[Instruction], graphs: JobGraphs | None) -> Around:
    """What surrounds the computation of a job: the capture as a graph, and buffers that a RECOMPUTE restores."""
    kept = KeptBuffers(instructions)

    def around(i: Instruction, stage: LocalStage, compute: Callable[..., Any]) -> Callable[..., Any]:
        def captured(job: Callable[..., Any]) -> Callable[..., Any]:
            return job if graphs is None else Job(graphs, i, stage.layer_rng, job)

        return kept.around(i, stage, compute, captured)

    return around


def _show_waits(state: memoryview) -> Callable[[int | None], None]:
    """A callback for the begin and the end of a transport's waits: it shows the watchdog what this rank waits for."""

    def show(row: int | None) -> None:
        state[WAIT] = NOTHING if row is None else OTHERS if row == NO_ROW else row

    return show


def _local_stages(
    rank: int, header: Header, instructions: Sequence[Instruction], slots: MemorySlots, setup: Setup
) -> tuple[dict[int, LocalStage], dict[Values, str]]:
    """The stages, by number, that a rank owns or computes or whose gradients it adds or forwards; digests of values."""
    owned_shards: dict[int, list[int]] = {}
    for index, shard in header.units_of(rank):
        owned_shards.setdefault(index, []).append(shard)
    named = {i.stage for i in instructions if i.op in COMPUTE or i.kind in (Kind.W, Kind.DW)}
    stages, digests = dict[int, LocalStage](), dict[Values, str]()
    entries = [[*entry.values()] if isinstance(entry, Mapping) else [entry] for entry in setup.model.stages]
    given = [any(isinstance(layer, nn.Module) for layer in layers) for layers in entries]  # not by a function, nor meta

    def build(index: int) -> nn.Module:
        owned = index in owned_shards
        module = build_stage(setup.model, index, setup.seed, values=owned, mapped=True)
        digests.update(value_digests(setup.model, index, module, owned))
        return module

    # What is owned first: stages that share a parameter copy its value before one moves it to where it is fetched. All
    # of these are built before the first one moves; of others, one at a time is beside its flat weights.
    order = sorted(named | owned_shards.keys(), key=lambda index: (index not in owned_shards, index))
    tied = {stage for tie in setup.model.tied for stage, _ in tie}
    modules = {index: build(index) for index in order if given[index] or index in tied}
    for index in order:
        module = modules.pop(index) if index in modules else build(index)
        stages[index] = LocalStage(
            module, index, setup.shapes[index], setup.device, slots.weights(index), setup.autocast_dtype,
            header.weight_shards.of(index), owned_shards.get(index, []), stages.values(), given[index],
            setup.model.origin.call,
        )  # fmt: skip
        stages[index].outside_norm = setup.model.tied_to_earlier(index, stages[index].names)
    return dict(sorted(stages.items())), digests
