"""A profile: what a model's stages cost here, in the form that `schedgen simulate --profile` reads.

`Engine.profile` and `python -m mpirun profile` write it.

seconds      Every rank computes all stages by a schedule of one worker, with the interpreter that runs use, and times
             its instructions. All ranks do so at once, and share cores and memory bandwidth as they do in a run.
             Whole and split backwards alternate, so that whatever else the machine does slows both.
overhead     On a CPU, the part of a job's seconds outside of the stage's module and of autograd.
bytes        The same on all ranks: rank 0 counts them with the memory tracker, in a step of its own.
machine      Messages are timed inside hosts and between them, and devices by the jobs (`machine_speed`).
tensor       T of a schedule with --tensor T: the first slice of each stage is measured, and lists have all T.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from tqdm import tqdm

from mpirun.comm.fail_together import Stop, from_rank_0, on_rank_0, together
from mpirun.comm.machine_speed import measure_machine, speeds
from mpirun.comm.output import write_output
from mpirun.data.microbatches import Microbatch, MicrobatchSource
from mpirun.data.values import copy_of
from mpirun.engine.build import RunInterpreter, build_interpreter
from mpirun.engine.core.context import Act
from mpirun.engine.core.interpreter import Interpreter
from mpirun.engine.core.stage import LocalStage
from mpirun.engine.expand_slices import expanded_model
from mpirun.engine.memory_tracker import MemoryCount, track_memory
from mpirun.engine.other_sums import parameters_of_tie
from mpirun.engine.setup import Setup
from mpirun.model.build_stage import given_apart
from mpirun.model.contract import Model
from mpirun.model.dataflow import ALIGN
from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.ir.header import Header
from schedgen.ir.instructions import F, Instruction, Kind, Op, W
from schedgen.ir.program import Program
from schedgen.ir.stage_graph import StageGraph
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.util.files import check_writable

MICROBATCHES = 8  # of a step
OPS = {"F": Op.FWD, "B": Op.BWD, "I": Op.BWD_I, "W": Op.BWD_W, "step": Op.STEP}
HALVES = ("", "_input", "_weight")  # of the names of a stage's methods
MakeSetup = Callable[..., Setup]
Key = tuple[int, int]  # an opcode and a stage
BufferKey = tuple[int, int, int, int]  # kind, stage, microbatch, consumer


class Bytes(NamedTuple):
    """What an instruction does to the bytes alive on its rank."""

    before: int
    peak: int
    after: int
    defined: int  # bytes of the buffers it makes: x, g
    freed: int = 0  # by BWD_I, of what the forward has saved

    @property
    def kept(self) -> int:
        """Bytes that the instruction leaves alive besides `defined`."""
        return max(0, self.after - self.before - self.defined)

    @property
    def workspace(self) -> int:
        """Bytes at the peak besides those alive before the instruction and those that it leaves alive."""
        return max(0, self.peak - self.before - self.defined - self.kept)


class Copies(MicrobatchSource):
    """Microbatches of a profile that are copies of one, made when they are read, as those of a text are."""

    def __init__(self, example: Microbatch) -> None:
        self.example, self.count = example, MICROBATCHES

    def __call__(self, step: int, number: int) -> Microbatch:
        """A copy."""
        return copy_of(self.example)


class Profile:
    """One rank's part of a profile. Its construction and `write` are collective."""

    beat: Callable[[], None] = staticmethod(lambda: None)  # called before each instruction
    current: Instruction | None = None
    rank_seconds: Sequence[float] = ()  # by rank: of a job of each kind and stage

    def __init__(
        self, comm: MPI.Intracomm, model: Model, header: Header | None, set_up: MakeSetup, file: tuple[str, str]
    ) -> None:
        """Of a model's stages; if the schedule has slices, of the first of each stage, whose outputs nobody adds up.

        header  the schedule's; None: any that has the stages of the model
        set_up  for a schedule of one worker, with MICROBATCHES a step, and an `unsliced_model`
        file    its name in messages, its path

        Stop if the file cannot be written, the model does not fit, or its loss is of the whole minibatch.
        """
        self.comm, self.file = comm, file
        on_rank_0(comm, lambda: check_writable(*file))
        self.program = from_rank_0(comm, lambda: _one_worker(model, header))
        self.instructions, self.header = self.program.instructions(0), header or self.program.header
        slices = self.slices = self.header.tensor_parallel.degree
        self.model = together(comm, lambda: expanded_model(model, self.header))
        if slices > 1:  # the weights given are of whole stages, and any will do
            model = model._replace(stages=self.model.stages[::slices], sliced=(), weights=None)
        self.setup = set_up(self.program.header, unsliced_model=model)
        self.stages = [stage for stage in range(len(model.stages)) for _ in range(slices)]
        if self.setup.model.loss_of == "minibatch":
            raise Stop("a loss of the whole minibatch cannot be profiled: jobs are measured two microbatches at a time")
        together(comm, lambda: self.setup.device.try_messages(comm))

    def position(self) -> str:
        """The instruction being executed, for error messages; empty outside of a step."""
        return "" if self.current is None else f"{self.current}: "

    def write(self, steps: int) -> None:
        """Measure, timing this number of steps, and write the file on rank 0."""
        sizes = on_rank_0(self.comm, self._bytes) or {}
        seconds = self._seconds(steps)
        machine = measure_machine(self.comm, self.setup.device, self.setup.crowded, self.rank_seconds)
        profile = {**seconds, **({"machine": machine} if machine else {}), **sizes}
        profile |= {"tensor": self.slices} if self.slices > 1 else {}
        lines = (f" {json.dumps(name)}: {json.dumps(value)}" for name, value in profile.items())
        on_rank_0(self.comm, lambda: write_output(*self.file, ("{\n" + ",\n".join(lines) + "\n}\n").encode()))

    @contextlib.contextmanager
    def _interpreter(self) -> Iterator[RunInterpreter]:
        """An interpreter of all stages, inside; modules that a script gave keep their tensors, hooks and methods."""
        with contextlib.ExitStack() as apart:
            for stage in range(len(self.setup.model.stages)):
                apart.enter_context(given_apart(self.setup.model, stage, copied=True))
            machine = build_interpreter(MPI.COMM_SELF, self.program, self.instructions, self.setup)
            yield machine
            machine.transport.free()
            machine.progress.free()

    def _bytes(self) -> dict[str, object]:
        """Bytes by stage. The same in every run: they depend on no time, nor on what was measured before."""
        measured: dict[Key, list[Bytes]] = {}
        gc.collect()
        gc.disable()  # a collection at an arbitrary moment would change the counts: now cycles stay alive
        with self._interpreter() as machine, track_memory(self.setup.device.torch) as memory:
            for i, act in zip(self.instructions, machine.code, strict=True):
                self.current = i
                self.beat()
                measured.setdefault((i.op, i.stage), []).append(_execute(machine, i, act, memory))
        gc.enable()
        self.current = None
        stages, shapes = self.stages, self.setup.shapes
        weight = [shape.weight_bytes for shape in shapes]
        # What the first step makes, and what weight versions would: a float a parameter.
        state = [measured[Op.STEP, s][0].kept + 4 * len(shape.parameter_names) for s, shape in enumerate(shapes)]
        graph, dataflow = self.program.header.graph, self.setup.dataflow
        by_edge = {"per_consumer": [dataflow.x(*edge).spec.bytes for edge in graph.edges]} if graph.per_consumer else {}
        return {
            "activation": [measured[Op.FWD, s][0].defined for s in stages],
            **by_edge,
            "weight": [weight[s] for s in stages],
            "saved": [max(job.kept for job in measured[Op.FWD, s]) for s in stages],
            "half": [max(job.kept for job in measured[Op.BWD_I, s]) for s in stages],
            "freed": [max(job.freed for job in measured[Op.BWD_I, s]) for s in stages],
            "workspace": {
                direction: [max(job.workspace for job in measured[OPS[direction], s]) for s in stages]
                for direction in ("F", "B", "I", "W")
            },
            **({"tied": tied} if (tied := self._tied()) else {}),
            "owned": [weight[s] + state[s] for s in stages],
        }

    def _tied(self) -> list[int]:
        """By tie: the bytes of the trained parameters that its stages share, as `tied_sum` packs them."""
        sizes = []
        for stages in self.header.tied:
            shape = self.setup.shapes[self.header.model_stage(stages[0])]
            shared = {name for names in parameters_of_tie(self.model, stages) for name in names[stages[0]]}
            places = zip(shape.parameter_names, shape.layout, strict=True)
            lengths = [place.end - place.begin for name, place in places if name in shared]
            sizes.append(sum(-(-length // ALIGN) * ALIGN for length in lengths))
        return sizes

    def _seconds(self, steps: int) -> dict[str, object]:
        """Seconds of jobs and STEPs, and overheads of jobs, by stage: medians over ranks of each rank's medians.

        Where devices differ, they are those of the fastest.
        """
        silent = self.comm.rank > 0 or not sys.stderr.isatty()
        on_cpu, measured = self.setup.device.kind == "cpu", dict[Key, list[tuple[float, float]]]()
        with contextlib.ExitStack() as built:
            machine = together(self.comm, lambda: built.enter_context(self._interpreter()))
            for stage in machine.stages.values() if on_cpu else ():
                self._watch(stage)
            self._step(machine, {})  # to warm up
            self.comm.Barrier()
            for _ in tqdm(range(steps), unit="step", disable=silent):
                self._step(machine, measured)
        medians = self.comm.allgather({key: np.median(pairs, axis=0).tolist() for key, pairs in measured.items()})
        jobs = [(op, s) for name, op in OPS.items() if name != "step" for s in self.stages]
        least = sum(min(seconds for seconds, _ in measured[job]) for job in jobs)  # other programs lengthen a few jobs
        self.rank_seconds = self.comm.allgather(least)
        speed = speeds(self.rank_seconds)
        seconds, overhead = (
            {
                name: [
                    float(np.median([each * of_rank[op, s][k] for each, of_rank in zip(speed, medians, strict=True)]))
                    for s in self.stages
                ]
                for name, op in OPS.items()
            }
            for k in (0, 1)
        )
        del overhead["step"]
        return {**seconds, "overhead": overhead} if on_cpu else {**seconds}

    def _watch(self, stage: LocalStage) -> None:
        """Count the seconds that a stage's module and its backwards take, as `inside`."""

        def timed(method: Callable[..., Any], *arguments: Any) -> Any:
            begin = time.perf_counter()
            result = method(*arguments)
            self.inside += time.perf_counter() - begin
            return result

        for owner, name in ((stage.module, "forward"), *((stage, f"backward{half}") for half in HALVES)):
            setattr(owner, name, partial(timed, getattr(owner, name)))

    def _step(self, machine: Interpreter, measured: dict[Key, list[tuple[float, float]]]) -> None:
        """Execute and time every instruction once: its seconds, and its overhead."""
        for i, act in zip(self.instructions, machine.code, strict=True):
            self.current = i
            self.beat()
            machine.microbatches.forget()  # so that each reader makes them anew, as on several ranks
            self.inside, begin = 0.0, time.perf_counter()
            act()
            self.setup.device.finish()
            seconds = time.perf_counter() - begin
            measured.setdefault((i.op, i.stage), []).append((seconds, seconds - self.inside))
        self.current = None


def _execute(machine: Interpreter, i: Instruction, act: Act, memory: MemoryCount) -> Bytes:
    machine.microbatches.forget()
    before = memory.live
    memory.reset_peak()
    saved = [machine.context.pending_of(i).saved] if i.op == Op.BWD_I else []
    act()
    peak = memory.peak
    read, made = _buffers(machine.header.graph, i)
    # A copy replaces each buffer: a buffer that a forward or BWD_I keeps stays alive beside it, as it would after FREE.
    for key in (*read, *made):
        buffer = machine.context.buffers.get(*key)
        buffer.value = buffer.value.clone()
    defined = sum(machine.context.buffers.get(*key).value.nbytes for key in made)
    unfreed = memory.live
    saved.clear()
    after = memory.live
    return Bytes(before, peak, after, defined, unfreed - after)


def _buffers(graph: StageGraph, i: Instruction) -> tuple[list[BufferKey], list[BufferKey]]:
    """The g that an instruction is the last to read, and the x and g that it makes."""
    read: list[BufferKey] = []
    if i.op == Op.FWD:
        return read, [(Kind.X, i.stage, i.mb, consumer) for consumer in graph.output_consumers(i.stage)]
    if i.op not in (Op.BWD, Op.BWD_I):
        return read, []
    read += [(Kind.G, i.stage, i.mb, graph.gradient_consumer(i.stage, c)) for c in graph.consumers[i.stage]]
    return read, [(Kind.G, p, i.mb, graph.gradient_consumer(p, i.stage)) for p in graph.producers[i.stage]]


def _one_worker(model: Model, header: Header | None) -> Program:
    """The program of a step on one worker, for the model's graph or that of a schedule.

    Microbatches go in pairs, so that a stage does two jobs of a kind in a row: the state of the caches is then between
    that of 1F1B and of GPipe. The backwards of one pair are whole, those of the next are split.
    """

    own = model.graph()
    graph, tied = (own, own.tied) if header is None else (header.model_graph, header.model_ties)

    def n(s: np.ndarray, b: np.ndarray, d: np.ndarray) -> np.ndarray:
        job = np.where(d == F, s, 3 * graph.stages - 2 * s + (d == W))
        return (b // 2 * (3 * graph.stages + 2) + job) * 2 + b % 2

    scheme = Scheme("profile", 1, lambda s, b, d: (0 * s, 0 * s), n, "pairs", "strict", split=True)
    scheme = scheme._replace(
        unsplit_backward=lambda s, b: (0 * s + b) // 2 % 2 == 0, edges=graph.edges, per_consumer=graph.per_consumer
    )
    return compile(scheme, Sizes(graph.stages, MICROBATCHES, 1), Options(tied=tied))
