"""`Engine`: a run that a script drives, with one MPI rank per worker of the schedule.

    run = mpirun.Engine("1f1b.json", model, loss=loss, optimizer=torch.optim.Adam, lr=1e-3)
    for batch in run.loader(dataset, microbatch_size=4, shuffle=True):
        print(run.step(batch).loss)

Every method is collective: all ranks call it, in the same order. A user's mistake ends all ranks with one sentence and
an exit code; a rank that fails on its own says where, and ends the others.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakSet

import torch
from mpi4py import MPI
from torch.optim.lr_scheduler import LRScheduler

from mpirun.checkpoint.export import check_new, whole_state
from mpirun.checkpoint.export import export as write_export
from mpirun.comm.fail_together import Stop, on_rank_0, refuse, together
from mpirun.comm.output import note, print_notes
from mpirun.comm.run_comm import RunComm
from mpirun.data.dataset_loaders import FunctionLoader, MapLoader, StreamLoader, loader_class
from mpirun.data.loader import Batch, Loader
from mpirun.engine.expand_slices import expanded_model
from mpirun.engine.host import threads_kept, use_host
from mpirun.engine.read_schedule import Schedule, check_for_run, read_schedule, share_program
from mpirun.engine.setup import StepOptions
from mpirun.model.contract import Model
from mpirun.model.rng import generators_kept
from mpirun.training.arguments import (
    Log,
    Models,
    Optimizers,
    check_batches,
    check_data,
    check_options,
    check_saving,
    check_tolerance,
    directory_of,
    make_log,
    make_recipe,
    take_model,
)
from mpirun.training.batches import LossWeight, loss_weights, read_by, shares, whole_batch
from mpirun.training.compiled import compile_for, is_scheme
from mpirun.training.errors import end_on_error, end_on_uncaught, exit_by
from mpirun.training.evaluation import Evaluation, Evaluator, evaluate, predict
from mpirun.training.notes import DataNotes
from mpirun.training.prepared import Prepared
from mpirun.training.same_options import check_same_options, options_to_compare
from mpirun.training.saving import Checkpoints, Saving
from mpirun.training.session import Result, Session, is_compared
from mpirun.training.shapes import Shapes, check_buckets, check_loss_weight, check_padding
from mpirun.watchdog import EVALUATING, IN_SCRIPT, PHASE, SETTING_UP
from schedgen.ir.program import Program
from schedgen.util.files import check_writable
from schedgen.util.option_fields import refuse_overwriting

P = ParamSpec("P")
T = TypeVar("T")


def _collective(method: Callable[Concatenate[Engine, P], T]) -> Callable[Concatenate[Engine, P], T]:
    """Wrap a method: its errors end all ranks, it leaves torch's generators as they were, and gradients are enabled."""

    @functools.wraps(method)
    def called(self: Engine, *args: P.args, **kwargs: P.kwargs) -> T:
        with (
            generators_kept(),
            torch.inference_mode(False),  # a script's loop may stand in torch.no_grad()
            exit_by(self.comm, self._position, self._failing, self._all_exit),
            self._running.watchdog.calling(method.__name__.lstrip("_")),
        ):
            return method(self, *args, **kwargs)

    return called  # type: ignore[return-value]  # its argument is called self


class Engine:
    """A run. It learns what the data look like from the first batch that is trained on or evaluated.

    It trains the given modules: on each rank those of the stages that it owns. `state_dict` and `export` give all.

    Its arguments:

    schedule      a file written by schedgen, or a schedgen.Program. Or a scheme whose sizes `stages` and `microbatches`
                  give: its name, or a FILE.py with w and n
    model         what `split` returns, a Model, a list of modules, one per stage, or a function: stages -> such a model
    loss          (output, target) -> loss, a mean over the samples, or (loss, metrics by name); None: the Model's
    loss_weight   target -> what a microbatch's loss is a mean over, if not over samples: say, the number of tokens
                  that count. The loss and the metrics of a step are then means over that
    optimizer     a class, such as torch.optim.Adam, or a list of NamedParameters -> a torch optimizer of them all;
                  None: torch.optim.AdamW
    elementwise   the optimizer steps element by element, so that it may step pieces; known of torch's own classes
    lr            the learning rate of all parameter groups, or a function of the step, counted from 0; None: those of
                  the optimizer
    scheduler     an optimizer -> a torch LRScheduler for it, which is stepped once per step
    clip          the largest norm of the whole gradient; None: no limit
    accumulate    passes through the schedule before the optimizer's step
    autocast      "bf16": forwards in mixed precision
    device        "cpu", "cuda", or "auto": a GPU where every rank has one
    gpu_messages  "direct": MPI is given GPU memory; "host": messages go through host memory; or "auto"
    stream_words  on a GPU, order messages and kernels by words in memory instead of events
    graphs        on a GPU, capture the kernels of each job once and replay them
    canonical     add gradients in microbatch order: under every schedule the bits of one process with the same stages
    threads       torch's threads on each rank; None: the rank's share of the cores
    seed          of weights, dropout and shuffling
    weights       a directory of safetensors files that parameters and buffers are read from, by their names
    buckets       sizes that dimension 1 of the input, such as the sequence length, may have, the same in all
                  microbatches of a step; empty: microbatches have one shape
    on_nan        "stop", or "skip" the step, if a loss or a gradient is not finite
    verify        record the steps, for the method `verify`
    log           is called on rank 0 with the number of steps done and a step's numbers by name; or a directory,
                  to which they are written for TensorBoard
    timeout       seconds without progress after which a run is ended; 0: never. Time in which every rank is between
                  two calls of the Engine does not count
    export        the directory that `export` will write; it is refused at once if it is not empty
    comm          the ranks; None: all
    """

    def __init__(
        self,
        schedule: str | os.PathLike[str] | Program,
        model: Models,
        *,
        loss: Callable[[Any, Any], Any] | None = None,
        loss_weight: LossWeight | None = None,
        stages: int | None = None,
        microbatches: int | None = None,
        optimizer: Optimizers | None = None,
        elementwise: bool = False,
        lr: float | Callable[[int], float] | None = None,
        scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        clip: float | None = None,
        accumulate: int = 1,
        autocast: str | None = None,
        device: str = "auto",
        gpu_messages: str = "auto",
        stream_words: bool = False,
        graphs: bool = False,
        canonical: bool = False,
        threads: int | None = None,
        seed: int = 0,
        weights: str | os.PathLike[str] | None = None,
        buckets: Sequence[int] = (),
        on_nan: str = "stop",
        verify: bool = False,
        log: Log | str | os.PathLike[str] | None = None,
        timeout: float = 600.0,
        export: str | os.PathLike[str] | None = None,
        comm: MPI.Intracomm | None = None,
    ) -> None:
        """Read or compile the schedule, and check that the model fits it; the class says what the arguments are."""
        given = dict(locals())
        self.comm = RunComm(MPI.COMM_WORLD if comm is None else comm)
        self.session: Session | None = None
        self._steps_at_end = 0  # steps, once the run has ended
        self._data_notes = DataNotes(self.comm)
        self._loaders: WeakSet[Loader] = WeakSet()  # loaders known to read what this run's ranks read
        self._ending = contextlib.ExitStack()  # restores what the process had before the run
        with (
            generators_kept(),
            exit_by(self.comm, self._position, self._failing, self._all_exit),
            self._ended_by_mistakes(),
        ):
            if self.comm.size > 1:
                self._ending.callback(end_on_uncaught(self.comm, self._failing))
            together(
                self.comm,
                lambda: check_options(autocast, accumulate, on_nan, device, gpu_messages, threads, seed, timeout),
            )
            check_same_options(self.comm, options_to_compare(given))
            self._shapes, self._weights_directory, recipe = together(self.comm, lambda: (
                Shapes(self.comm, buckets),
                None if weights is None else directory_of("weights, if the module does not have them itself", weights),
                make_recipe(optimizer, lr, scheduler, clip, elementwise),
            ))  # fmt: skip
            if export is not None:
                on_rank_0(self.comm, lambda: check_new(directory_of("export", export)))
            self._ending.callback(threads_kept())
            self._host = use_host(self.comm, device, threads or 0, gpu_messages, stream_words)
            self._options = StepOptions(
                recipe=recipe, seed=seed, passes=accumulate, canonical=canonical, on_nan=on_nan,
                autocast_dtype=torch.bfloat16 if autocast else None, graphs=graphs,
            )  # fmt: skip
            file, self._model = self._load(schedule, model, loss, stages, microbatches)
            self._schedule: str | None = None  # the file, which no trace may overwrite
            if not isinstance(schedule, Program) and Path(schedule).is_file():
                self._schedule = str(Path(schedule).absolute())
            self.session = session = Session(self.comm, file, timeout)
            session.end_with_script()
            together(self.comm, lambda: check_buckets(buckets, self._model, session.header))
            together(self.comm, lambda: check_loss_weight(loss_weight, self._model, session.header))
            self._loss_weight = loss_weight
            expanded = together(self.comm, lambda: expanded_model(self._model, session.header))
            self._reads = read_by(session.instructions, session.header, expanded, accumulate)
            self._prepared = Prepared(session, self._model, self._options, self._host, verify, loss_weight)
            self._checkpoints = Checkpoints(session)
            self._log = on_rank_0(self.comm, lambda: make_log(log, self._ending))
            session.watchdog.state[IN_SCRIPT] = True

    def _load(
        self,
        given: str | os.PathLike[str] | Program,
        model: Models,
        loss: Callable[[Any, Any], Any] | None,
        stages: int | None,
        microbatches: int | None,
    ) -> tuple[Schedule, Model]:
        """Read or compile the schedule, and take the model that was given."""

        def take(stages: int | None, layers: Sequence[int] | None = None) -> Model:
            weights, seed = self._weights_directory, self._options.seed
            with print_notes(self.comm):
                return together(self.comm, lambda: take_model(model, loss, stages, layers, weights, seed))

        name = "the schedule" if isinstance(given, Program) else os.fspath(given)
        if isinstance(given, Program):
            on_rank_0(self.comm, lambda: check_for_run(given, name, self.comm.size))
            file = share_program(self.comm, given if self.comm.rank == 0 else None)
        elif is_scheme(name):
            taken = take(stages)
            with print_notes(self.comm):
                program = on_rank_0(self.comm, lambda: compile_for(taken, name, microbatches, self.comm.size))
            return share_program(self.comm, program), taken
        else:
            file = read_schedule(self.comm, name)
        header = file.program.header
        if microbatches not in (None, header.microbatches):
            raise Stop(f"{name} has {header.microbatches} microbatches, not {microbatches}")
        count = header.model_stages
        if stages not in (None, count):
            raise Stop(f"{name} has {count} stages of the model, not {stages}")
        return file, take(count, header.scheme.get("layers"))

    # The interface of a script

    @property
    def rank(self) -> int:
        """This process's number among the ranks, from 0."""
        return self.comm.rank

    @property
    def steps(self) -> int:
        """Steps done, including those before a checkpoint; the count stays when the run has ended."""
        return self._steps_at_end if self.session is None else self.session.steps

    @_collective
    def loader(
        self,
        dataset: Any,
        microbatch_size: int = 1,
        *,
        shuffle: bool = False,
        seed: int | None = None,
        workers: int = 0,
        last: str = "pad",
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Loader:
        """The batches of a dataset, of which this rank makes the microbatches that its list reads.

        dataset          map-style, iterable, or a function: step, microbatch, numpy Generator -> (input, target). Its
                         items are pairs (input, target), or mappings, of which the loss gets all entries
        microbatch_size  samples of a microbatch; a function's has as many as dimension 0 of what it returns
        shuffle          a new order in every epoch, from `seed` and the epoch; the same for any number of ranks
        seed             None: the run's
        workers          processes that load samples ahead; 0: this one loads them, between the steps
        last             what to do with an epoch's last samples if they do not fill a step: "pad" or "drop"
        collate          makes a batch from a list of items; None: torch's default
        """
        loader = together(
            self.comm,
            lambda: loader_class(dataset)(
                dataset, microbatch_size, self._prepared.count, self._reads, self._model.origin.pair,
                say=self._data_notes.say, shuffle=shuffle, seed=self._options.seed if seed is None else seed,
                workers=workers, last=last, collate=collate,
            ),
        )  # fmt: skip
        options = {"shuffle": shuffle, "seed": loader.seed, "last": last, "collate": collate}
        samples = {"microbatch_size": microbatch_size, "samples of the dataset": loader.sample_count}
        check_same_options(self.comm, {**samples, **options})
        if isinstance(loader, MapLoader):
            on_rank_0(self.comm, lambda: loader.microbatch(0, 0, 0))  # a mistake in the dataset stops all ranks
        self._loaders.add(loader)
        return loader

    @_collective
    def step(self, batch: Any) -> Result:
        """Train on a batch: one of a loader, or a pair (input, target) or mapping of all samples, the same everywhere.

        Whether ranks have the same data is checked in steps 1, 2, 4, 8, ... of the run. In other steps the rank that
        reads an input and the rank that reads its target may use different samples without an error.
        """
        session = self._running
        batch = self._batch(batch)
        if self._prepared.verifies and isinstance(batch.loader, StreamLoader):
            raise Stop("verify=True does all steps again, but an IterableDataset is read once: train without it")
        of_shape = self._prepared.use(batch, self._shapes.of(batch, f"step {session.steps + 1}"))
        if isinstance(batch.loader, FunctionLoader):
            batch = batch._replace(samples=[of_shape.example.size] * len(batch.samples))
        total = sum(batch.samples)
        if min(batch.samples) < of_shape.example.size:
            check_padding(self._model, self._running.header)
        weights = None if self._loss_weight is None else loss_weights(self._loss_weight, batch, self.comm)
        self._prepared.batches.give(session.steps, batch, self._prepared.verifies, weights)
        compared = is_compared(session.steps - session.begun)
        result = session.step(shares(batch.samples if weights is None else weights), total * of_shape.tokens)
        if batch.loader is not None:
            batch.loader.trained(batch)
        if compared:
            of_several = self._model.loss_of == "microbatch" and self._prepared.count > 1
            if weights is None and of_several and session.header.has_flush:
                self._data_notes.look(batch)
            self._data_notes.print_unsaid()
        numbers = {"loss": result.loss, "grad_norm": result.grad_norm, "lr": result.lr, **result.metrics}
        if self._log is not None:
            self._log(session.steps, numbers)
        if result.leave:
            self._checkpoints.leave()
        return result

    @_collective
    def evaluate(self, loader: Iterable[Any], batches: int | None = None) -> Evaluation:
        """The loss and the metrics over a loader's samples, in eval mode; `batches`: how many batches.

        It begins with the epoch's first batch, and leaves the loader's position alone. A list of batches,
        such as pairs (input, target), may replace the loader. A loader of a function has no end: it needs `batches`.
        """
        return self._over(
            loader, batches, lambda session, given: evaluate(session, given, self._loss_weight), scores=True
        )

    @_collective
    def predict(
        self, loader: Iterable[Any], batches: int | None = None, each: Callable[[int, Any], None] | None = None
    ) -> Any:
        """The model's outputs for a loader's samples, in their order, in eval mode: on rank 0, None elsewhere.

        `each`: is called with the number of a microbatch and its output on the rank that has the output, for example
        to write it; then nothing is gathered. The target may be None if microbatches of this shape have been trained
        on or evaluated: the first microbatch of a shape is used to try the loss.
        """
        return self._over(loader, batches, lambda session, given: predict(session, given, each), scores=False)

    @contextlib.contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Record, in the steps of the block, when each rank executes which instruction, and what it waits for.

        Rank 0 writes the trace at the end of the block, for `schedgen stats --measured`, `draw` and Perfetto.
        On a GPU traced steps are slower: each instruction that computes is waited for.
        """
        name = self._begin_trace(path)
        try:
            yield
        except BaseException:
            if self.session is not None:
                self.session.drop_trace()
            raise
        self._end_trace(name)

    @_collective
    def _begin_trace(self, path: str | os.PathLike[str]) -> str:
        """Begin to record; returns the name of the file, absolute unless it is - for standard output."""
        session = self._running
        refuse(self.comm, not self._prepared.has_stages, "trace: the first step builds the stages: trace a later one")
        refuse(self.comm, session.trace is not None, "trace: steps are traced already")
        name = os.fspath(path) if os.fspath(path) == "-" else str(Path(path).absolute())
        on_rank_0(self.comm, lambda: check_writable("trace", name))
        on_rank_0(self.comm, lambda: refuse_overwriting([self._schedule], [name]))
        session.begin_trace()
        return name

    @_collective
    def _end_trace(self, name: str) -> None:
        if not self._running.end_trace("trace", name):
            note(self.comm, f"trace: no step is done, so {name} is not written")

    @_collective
    def save(self, directory: str | os.PathLike[str], data: Loader | None = None, keep: int = 3) -> bool:
        """Write a checkpoint of the run and of the position in `data`; returns whether that succeeded.

        The newest `keep` checkpoints are kept. A run saves to one directory, which is new or the one it resumed from.
        SIGTERM saves as the last call did.
        """
        self._build_stages("save")
        together(self.comm, lambda: check_saving(data, keep))
        path = together(self.comm, lambda: directory_of("save", directory))
        return self._checkpoints.save(Saving(path, data, keep))

    @_collective
    def resume(self, directory: str | os.PathLike[str], data: Loader | None = None) -> bool:
        """Continue from the newest whole checkpoint: weights, optimizer, step, and the position in `data`.

        Returns False if the directory has no checkpoint.
        """
        session = self._running
        refuse(self.comm, bool(session.steps), "resume: this run has done steps already: make a new Engine")
        again = "verify=True does all steps again, but not those before a checkpoint: resume without it"
        refuse(self.comm, self._prepared.verifies, again)
        together(self.comm, lambda: check_data(data))
        path = together(self.comm, lambda: directory_of("resume", directory))
        manifest = self._checkpoints.resume(path, data)
        if manifest is not None:
            self._prepared.resume(manifest)
        return manifest is not None

    @_collective
    def export(self, directory: str | os.PathLike[str]) -> None:
        """Write the whole model under its own names: safetensors, and the other files of the directory `weights`."""
        self._build_stages("export")
        path = together(self.comm, lambda: directory_of("export", directory))
        on_rank_0(self.comm, lambda: check_new(path))
        session = self._running
        stages, source = session.interpreter.stages, self._weights_directory
        with session.model_values():
            write_export(self.comm, session.header, session.setup, stages, path, source, session.beat)

    @_collective
    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of the whole model's parameters and saved buffers by its own names, on rank 0's CPU; elsewhere none.

        The module that the Engine was made with can load these; names are without the
        `_orig_mod.` of torch.compile.
        """
        self._build_stages("state_dict")
        session = self._running
        with session.model_values():
            return whole_state(self.comm, session.header, session.setup, session.interpreter.stages, session.beat)

    @_collective
    def verify(self, tolerance: float | None = None) -> bool:
        """Repeat all steps in one process, and print how far results differ; returns whether that is allowed.

        The Engine must be made with verify=True. With canonical=True nothing may differ, else a relative difference of
        `tolerance`; None: 1e-5, or more where numbers are narrower than float32.
        """
        refuse(self.comm, not self._prepared.verifies, "verify: say verify=True where the Engine is made")
        together(self.comm, lambda: check_tolerance(tolerance))
        return self._running.verify(tolerance) == 0

    def close(self) -> None:
        """End the run; another Engine may follow in this process. Collective."""
        if self.session is None:
            return
        self.session.wait_for_others()
        self._prepared.free()
        self._end()

    def __enter__(self) -> Engine:
        """The engine itself, which is closed at the end of the block."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close. An exception that leaves the block ends the other ranks, whether or not this one would catch it."""
        if self.session is None:
            return
        if error is None or isinstance(error, SystemExit):  # it ends all ranks
            self.close()
        elif self.comm.size == 1:
            self._end()
        else:
            self._failing(error)
            end_on_error(self.comm, error)

    # Its parts

    @contextlib.contextmanager
    def _ended_by_mistakes(self) -> Iterator[None]:
        """Inside, an error that stops all ranks also ends the run: the process, as a notebook's, may start another."""
        try:
            yield
        except Exception as error:
            if isinstance(error, Stop) or self.comm.size == 1:
                self._end()
            raise

    def _end(self) -> None:
        if self.session is not None:
            self._steps_at_end = self.session.steps
            self.session.close()
            self.session = None
        self._ending.close()

    def _all_exit(self) -> bool:
        """Whether all scripts exit here, by sys.exit in a function of theirs; if so, the run has ended."""
        if self.session is not None and not self.session.all_exit():
            return False
        self._end()
        return True

    @property
    def _running(self) -> Session:
        if self.session is None:
            raise Stop("the Engine is closed")
        return self.session

    def _failing(self, error: BaseException) -> None:
        """Tell the watchdog that this rank reports by itself why it ends."""
        if self.session is not None:
            self.session.watchdog.end(type(error), error, None)

    def _position(self) -> str:
        return "" if self.session is None else self.session.position()

    def _batch(self, batch: Any) -> Batch:
        """A script's batch as a `Batch`; Stop if it does not have the microbatches of a step.

        UsageError on a rank whose microbatch of a loader has other keys than the run's first.
        """
        count = self._prepared.count
        if not isinstance(batch, Batch):
            batch = together(self.comm, lambda: whole_batch(batch, count, self._model.origin.pair))
        if len(batch.samples) != count:
            raise Stop(f"the batch is of {len(batch.samples)} microbatches, but a step has {count}")
        if batch.loader is not None and batch.loader not in self._loaders:
            others = list(batch.loader.reads) != self._reads
            refuse(self.comm, others, "the loader is another Engine's, whose ranks read other microbatches")
            self._loaders.add(batch.loader)
        self._prepared.check_names(batch)
        return batch

    def _build_stages(self, method: str) -> None:
        """Build the stages if the run was resumed with data and has used none yet: all of its steps may be done.

        Stop if the stages are still not built; `method`: for the message.
        """
        data = self._checkpoints.data
        if not self._prepared.has_stages and data is not None:
            with data.from_the_start():
                batch = self._batch(next(iter(data)))
            self._prepared.build(batch, Shapes(self.comm, self._shapes.buckets).of(batch, "batch 1"))
        refuse(self.comm, not self._prepared.has_stages, f"{method}: nothing has been trained or evaluated yet")

    def _over(
        self,
        loader: Iterable[Any],
        batches: int | None,
        use: Callable[[Session, Iterable[tuple[Evaluator, Batch]]], T],
        scores: bool,
    ) -> T:
        """Call `use` with an epoch's first batches and the evaluators of their shapes; the loader's position stays.

        `scores`: batches are scored by their targets.
        """
        session = self._running
        together(self.comm, lambda: check_batches(loader, batches))
        shapes = Shapes(self.comm, self._shapes.buckets)
        padded = isinstance(loader, Loader) and loader.pads_in_part and (batches is None or batches >= len(loader))

        def evaluators() -> Generator[tuple[Evaluator, Batch], None, None]:
            for number, given in enumerate(islice(loader, batches), start=1):
                batch = self._batch(given)
                yield self._prepared.evaluator(batch, shapes.of(batch, f"batch {number}"), padded, scores), batch

        found = evaluators()
        whole = loader.from_the_start() if isinstance(loader, Loader) else contextlib.nullcontext()
        before = session.watchdog.state[PHASE]
        with session.watchdog.phase(before if before == SETTING_UP else EVALUATING), whole, contextlib.closing(found):
            first = next(found, None)
            refuse(self.comm, first is None, "there is no batch to evaluate")
            assert first is not None
            result = use(session, chain([first], found))
        self._data_notes.print_unsaid()
        return result
