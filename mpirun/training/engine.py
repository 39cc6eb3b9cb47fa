"""`Engine`: a run that a script drives, with one MPI rank per worker of the schedule.

    run = mpirun.Engine("1f1b.json", model, loss=loss, optimizer=torch.optim.Adam, lr=1e-3)
    for batch in run.loader(dataset, microbatch_size=4, shuffle=True):
        print(run.step(batch).loss)

Every method is collective: all ranks call it, in the same order. A user's mistake ends all ranks with one sentence and
an exit code; a rank that fails on its own says where, and ends the others.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from mpi4py import MPI
from torch.optim.lr_scheduler import LRScheduler

from mpirun.checkpoint.disk_format import Manifest
from mpirun.checkpoint.pretrained import check_new, whole_state
from mpirun.checkpoint.pretrained import export as write_export
from mpirun.checkpoint.reader import load_whole
from mpirun.comm.fail_together import Stop, on_rank_0, refuse, together
from mpirun.comm.waiting import RunComm
from mpirun.data.dataset_loaders import MapLoader, loader_class
from mpirun.data.loader import Loader
from mpirun.engine.expand_slices import expanded_model
from mpirun.engine.options import RunOptions, in_words
from mpirun.engine.read_schedule import Schedule
from mpirun.engine.recipe import Recipe
from mpirun.engine.setup import use_host
from mpirun.training.arguments import (
    ORDER,
    SIZES,
    Given,
    Models,
    Optimizers,
    check_same_options,
    directory_of,
    load,
    make_recipe,
    options_to_compare,
)
from mpirun.training.batches import LossWeight, Shapes, check_loss_weight, read_by, whole_batch
from mpirun.training.evaluation import Evaluation, evaluate, predict
from mpirun.training.open_run import OpenRun, collective
from mpirun.training.prepared import shared
from mpirun.training.saving import beside
from mpirun.training.session import Result, Session, is_compared, step_numbers
from mpirun.watchdog import IN_SCRIPT, PHASE, VERIFYING
from schedgen.ir.program import Program
from schedgen.util.option_fields import checked

T = TypeVar("T")


class Engine(OpenRun):
    """A run. It trains the given modules: on each rank those of the stages that it owns.

    It is built as soon as it knows what a microbatch looks like: at once from `example`, else from the first loader
    that it makes, or the first batch that it is given. A Model may make its microbatches itself.

    schedule      a file written by schedgen, or a schedgen.Program. Or a scheme whose sizes `stages` and `microbatches`
                  (None: as many as ranks) give: its name, or a FILE.py with w and n
    model         what `split` returns, a Model, a list of modules, one per stage, or a function: stages -> these.
                  For "ddp" and "fsdp" any module: it is called with its own input, in microbatches of any shapes
    loss          (output, target) -> loss, a mean over the samples, or (loss, metrics by name); None: the Model's
    loss_of       "microbatch", or "minibatch": the loss takes the outputs and targets of all microbatches of a step,
                  joined along dimension 0; None: as the Model says
    loss_weight   target -> what a microbatch's loss is a mean over, if not over samples: say, the number of tokens
                  that count. The loss and the metrics of a step are then means over that
    example       one microbatch, a pair (input, target) or a mapping: its shapes and types matter, not its values
    optimizer     a class, such as torch.optim.Adam, or a list of NamedParameters -> a torch optimizer or a list of
                  them; what they leave out is not trained by this Engine. None: torch.optim.AdamW. A function is called
                  for each stage, or shard of one, that a rank owns, when the Engine is built
    elementwise   the optimizer steps element by element, so that it may step pieces; known of torch's own classes
    lr            the learning rate of all parameter groups, or a function of the step, counted from 0; None: those of
                  the optimizer
    scheduler     an optimizer -> a torch LRScheduler for it, which is stepped once per step. It is called in the first
                  step, for each torch optimizer, whose rate is then `lr`, if that is a number
    weights       a directory of safetensors files that parameters and buffers are read from, by their names
    buckets       sizes that dimension 1 of the input, such as the sequence length, may have, the same in all
                  microbatches of a step; empty: those of `split`, else microbatches have one shape, those of a bare
                  module any
    log           is called on rank 0 with the number of steps done and a step's numbers by name, or those of an
                  evaluation ("eval/loss"), for example to write them for TensorBoard
    comm          the ranks; None: all

    With a scheme's name it takes these options of `schedgen compile`: groups, chunks, group, replicas, shards, n, mode,
    weight_slots, prefetch, recompute, offload, evict, memory_limit, updates. One number of `replicas` is of the whole
    scheme, one of `shards` is for each stage.

    These it shares with the command line (`mpirun.engine.options.RunOptions`):

    """

    __doc__ = __doc__.rstrip() + "\n\n" + in_words(RunOptions)

    def __init__(
        self,
        schedule: str | os.PathLike[str] | Program | Schedule,
        model: Models,
        *,
        loss: Callable[[Any, Any], Any] | None = None,
        loss_of: str | None = None,
        loss_weight: LossWeight | None = None,
        example: Any = None,
        stages: int | None = None,
        microbatches: int | None = None,
        optimizer: Optimizers | Recipe | None = None,
        elementwise: bool = False,
        lr: float | Callable[[int], float] | None = None,
        scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        weights: str | os.PathLike[str] | None = None,
        buckets: Sequence[int] = (),
        log: Callable[[int, Mapping[str, float]], None] | None = None,
        comm: MPI.Intracomm | None = None,
        **options: Any,
    ) -> None:
        given = dict(locals())
        compiled = {name: value for name in (*SIZES, *ORDER) if (value := options.pop(name, None)) is not None}
        for unknown in options.keys() - {each.name for each in fields(RunOptions)}:
            raise TypeError(f"Engine has no argument {unknown}: help(mpirun.Engine) lists them")
        comm = RunComm(MPI.COMM_WORLD if comm is None else comm)
        super().__init__(comm, bool(options.get("traceback")))
        with self._beginning():
            use = self._options = together(comm, lambda: checked(RunOptions(**options)))
            check_same_options(comm, options_to_compare({**given, **compiled, **vars(self._options)}))
            self._weights_directory, self._recipe = together(comm, lambda: (
                None if weights is None else directory_of("weights, if the module does not have them itself", weights),
                make_recipe(optimizer, lr, scheduler, self._options.clip, elementwise),
            ))  # fmt: skip
            self._ending.callback(torch.set_num_threads, torch.get_num_threads())
            self.host = use_host(comm, use)
            taken = Given(model, loss, stages, self._weights_directory, use.seed, loss_of)
            file, self._model = load(comm, schedule, microbatches, taken, compiled)
            self._schedule: str | None = None  # the file, which no trace may overwrite
            if isinstance(schedule, str | os.PathLike) and Path(schedule).is_file():
                self._schedule = str(Path(schedule).absolute())
            self.session = session = Session(comm, file, use.timeout, use.verify)
            self._state = session.state
            self._shapes = together(comm, lambda: Shapes(comm, buckets, self._model, session.header))
            together(comm, lambda: check_loss_weight(loss_weight, self._model, session.header))
            self._loss_weight = loss_weight
            expanded = together(comm, lambda: expanded_model(self._model, session.header))
            self._reads = read_by(session.instructions, session.header, expanded)
            self._count = session.header.microbatches  # of a step
            self._log = log if comm.rank == 0 else None
            if example is not None:
                one = together(comm, lambda: whole_batch(example, 1, self._model.origin.pair))
                self._build(shared(comm, one.microbatches[0]))
            session.watchdog.state[IN_SCRIPT] = True

    # The interface of a script

    @property
    def rank(self) -> int:
        """This process's number among the ranks, from 0."""
        return self.comm.rank

    @property
    def state(self) -> dict[str, Any]:
        """What `save` writes besides, and `resume` reads."""
        return self._state

    def print(self, *values: Any, **options: Any) -> None:
        """Python's `print`, on rank 0 alone."""
        if self.rank == 0:
            print(*values, **options)

    @collective
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
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
    ) -> Loader:
        """The batches of a dataset, of which this rank makes the microbatches that its list reads.

        dataset          map-style or iterable. Its
                         items are pairs (input, target), or mappings, of which the loss gets all entries
        microbatch_size  samples of a microbatch
        shuffle          a new order in every epoch, from `seed` and the epoch; the same for any number of ranks
        seed             None: the run's
        workers          processes that load samples ahead; 0: this one loads them, between the steps
        last             what to do with an epoch's last samples if they do not fill a step: "pad" or "drop"
        collate          makes a batch from a list of items; None: torch's default
        sampler          gives the dataset's indices in the order of an epoch, the same on all ranks: torch's generators
                         are seeded for the epoch, and its `set_epoch(epoch)` is called, if it has one
        batch_sampler    gives lists of indices, each of a step; the last alone may have fewer
        """
        loader = together(
            self.comm,
            lambda: loader_class(dataset)(
                dataset, microbatch_size, self._count, self._reads, self._model.origin.pair,
                shuffle=shuffle, seed=self._options.seed if seed is None else seed,
                workers=workers, last=last, collate=collate, sampler=sampler, batch_sampler=batch_sampler,
                fills=not self._shapes.any,
            ),
        )  # fmt: skip
        options = {"shuffle": shuffle, "seed": loader.seed, "last": last, "collate": collate}
        options |= {"sampler": sampler, "batch_sampler": batch_sampler}
        samples: dict[str, Any] = {"microbatch_size": microbatch_size, "samples of the dataset": loader.sample_count}
        samples["order of samples"] = loader.order_digest
        check_same_options(self.comm, {**samples, **options})
        if isinstance(loader, MapLoader):  # a stream is not read ahead: it may be read only once
            first = on_rank_0(self.comm, lambda: loader.microbatch(0, 0, 0))  # a mistake in the dataset stops all ranks
            if self._prepared is None:
                self._build(shared(self.comm, first))
            if loader.pads_in_part and self._built.why_uncut is not None:
                raise Stop(self._built.why_uncut)
        self._loaders.add(loader)
        return loader

    @collective
    def step(self, batch: Any = None, *, leave: bool = True) -> Result:
        """Train on a batch: one of a loader, or a pair (input, target), a tensor without target, or a mapping.

        A script's own batch has all samples of the step, the same everywhere.

        batch   None: the Model makes its microbatches itself
        leave   after SIGTERM, save and end the run; False: the result says that some rank is asked to leave

        Whether ranks have the same data is checked in steps 1, 2, 4, 8, ... of the run, of a script's own batch all of
        it. In other steps ranks may use different samples without an error.
        """
        session = self._running
        compared = is_compared(session.steps - session.begun)
        given = None if batch is None else self._batch(batch, f"step {session.steps + 1}", compared)
        weights, samples, tokens = self._begun.take(given)
        compared = compared and (given is None or given.loader is not None)  # else all of it is compared already
        result = session.step(weights, samples, tokens, compared)
        if given is not None and given.loader is not None:
            given.loader.trained(given)
        if self._log is not None:
            self._log(session.steps, step_numbers(result, self.host.device))
        if result.leave and leave:
            self.checkpoints.leave()
        return result

    @collective
    def evaluate(self, loader: Iterable[Any], batches: int | None = None) -> Evaluation:
        """The loss and the metrics over a loader's samples, in eval mode; `batches`: how many batches.

        It begins with the epoch's first batch, and leaves the loader's position alone. A list of batches,
        such as pairs (input, target), may replace the loader.
        """
        found = self._over(
            loader, batches, lambda session, given: evaluate(session, given, self._loss_weight), scores=True
        )
        if self._log is not None:
            numbers = {"loss": found.loss, **found.metrics}
            self._log(self.steps, {f"eval/{name}": value for name, value in numbers.items()})
        return found

    @collective
    def predict(
        self, loader: Iterable[Any], batches: int | None = None, each: Callable[[int, Any], None] | None = None
    ) -> Any:
        """The model's outputs for a loader's samples, in their order, in eval mode: on rank 0, None elsewhere.

        `each`: is called with the number of a microbatch and its output on the rank that has the output, for example
        to write it; then nothing is gathered. The target may be None.
        """
        return self._over(loader, batches, lambda session, given: predict(session, given, each), scores=False)

    @contextlib.contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Record, in the steps of the block, when each rank executes which instruction, and what it waits for.

        Rank 0 writes the trace at the end of the block, for `schedgen stats --measured`, `draw` and Perfetto.
        On a GPU traced steps are slower: each instruction that computes is waited for.
        """
        self._begin_trace(path)
        try:
            yield
        except BaseException:
            if self.session is not None:
                self.session.drop_trace()
            raise
        self._end_trace()

    @collective
    def _begin_trace(self, path: str | os.PathLike[str]) -> None:
        self._built.session.begin_trace(os.fspath(path), self._schedule)

    @collective
    def _end_trace(self) -> None:
        self._running.end_trace()

    @collective
    def profile(self, path: str | os.PathLike[str], steps: int = 10) -> None:
        """Write on rank 0 what the stages and messages cost here, as `python -m mpirun profile` does.

        The file is for `--profile` of schedgen's commands, and for `plan`: seconds and bytes by stage, for microbatches
        like the run's first. `steps` are timed, in which every rank computes all stages, with copies of the weights and
        optimizers of its own, for which it needs memory. The training stays as it is: the next step has the same bits.
        """
        self._built.profile(os.fspath(path), steps)

    @collective
    def save(
        self,
        directory: str | os.PathLike[str],
        data: Loader | None = None,
        keep: int = 3,
        state: Mapping[str, Any] | None = None,
    ) -> bool:
        """Write a checkpoint of the run and of the position in `data`; returns whether that succeeded.

        The newest `keep` checkpoints are kept. A run saves to one directory, which is new or the one it resumed from.
        After steps that would be lost, a folder that cannot be used is replaced by one beside it, with a note. SIGTERM
        saves as the last call did. The dict `run.state` is saved, too, after an update by `state`: numbers, strings and
        tensors, in lists and dicts, of each rank its own.
        """
        self.state.update(state or {})
        return self.checkpoints.save(directory, data, keep)

    @collective
    def resume(self, directory: str | os.PathLike[str] | Manifest | None, data: Loader | None = None) -> bool:
        """Continue from the newest whole checkpoint: weights, optimizer, step, and the position in `data`.

        Returns False if the directory has no checkpoint. In its place, a checkpoint that was found there, or None.
        `run.state` gets what was saved of it, with tensors on the CPU. On another number of ranks that is possible if
        all ranks had the same.
        """
        return self._built.checkpoints.resume(directory, data)

    @collective
    def export(self, directory: str | os.PathLike[str]) -> None:
        """Write the whole model under its own names: safetensors, and the other files of the directory `weights`.

        After steps that would be lost, a folder that cannot be used is replaced by one beside it, with a note.
        """
        session = self._begun.session
        path = together(self.comm, lambda: directory_of("export", directory))
        path = beside(session, path, lambda folder: on_rank_0(self.comm, lambda: check_new(folder)))
        with session.model_values():
            write_export(session.part, path, self._weights_directory)

    @collective
    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of the whole model's parameters and saved buffers by its own names, on rank 0's CPU; elsewhere none.

        The module that the Engine was made with can load these; names are without the
        `_orig_mod.` of torch.compile.
        """
        session = self._begun.session
        with session.model_values():
            return whole_state(session.part)

    @collective
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Give the whole model the values that rank 0 passes, by its own names, as `state_dict` returns them.

        What the other ranks pass does not matter. The optimizer keeps its state.
        """
        session = self._built.session
        refuse(self.comm, session.verifies, "load_state_dict: verify repeats all steps: load before the Engine is made")
        session.interpreter.optimizer.take_assigned()
        load_whole(session.part, state)
        session.start = None

    @collective
    def verify(self, tolerance: float | None = None) -> bool:
        """Repeat all steps in one process, and print how far results differ; returns whether that is allowed.

        The Engine must be made with verify=True. With canonical=True nothing may differ, else a relative difference of
        `tolerance`; None: 1e-5, or more where numbers are narrower than float32.
        """
        refuse(self.comm, not self._running.verifies, "verify: say verify=True where the Engine is made")
        session = self._begun.session
        assert session.verification is not None
        session.watchdog.state[PHASE] = VERIFYING
        return session.verification.compare(session.steps, session.beat, tolerance) == 0
