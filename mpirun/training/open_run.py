"""A script's run: how it begins and ends in its process, and its stages, which are built once a microbatch is known.

`Engine` is an `OpenRun` until `close`. Its collective methods turn a mistake into one sentence, on all ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import chain, islice
from typing import Any, Concatenate, ParamSpec, Self, TypeVar
from weakref import WeakSet

import torch

from mpirun.comm.fail_together import Stop, refuse, together
from mpirun.comm.waiting import RunComm
from mpirun.data.loader import Batch, Loader
from mpirun.data.microbatches import Microbatch, MicrobatchSource
from mpirun.engine.options import RunOptions
from mpirun.engine.recipe import Recipe
from mpirun.engine.setup import Host, text_microbatches
from mpirun.model.contract import Model
from mpirun.model.rng import GeneratorsKept
from mpirun.training.arguments import check_batches
from mpirun.training.batches import LossWeight, Shapes, StepBatches, check_same_batch, whole_batch
from mpirun.training.errors import end_on_error, end_on_uncaught, exit_by
from mpirun.training.evaluation import Evaluator
from mpirun.training.prepared import Prepared, first_microbatch
from mpirun.training.saving import Checkpoints
from mpirun.training.session import Session, is_compared
from mpirun.watchdog import EVALUATING

P = ParamSpec("P")
T = TypeVar("T")
Run = TypeVar("Run", bound="OpenRun")


def collective(method: Callable[Concatenate[Run, P], T]) -> Callable[Concatenate[Run, P], T]:
    """Wrap a method: its errors end all ranks, it leaves torch's generators as they were, and gradients are enabled."""

    @functools.wraps(method)
    def called(self: Run, *args: P.args, **kwargs: P.kwargs) -> T:
        with (
            self.generators,
            torch.inference_mode(False),  # a script's loop may stand in torch.no_grad()
            self._exit_by(),
            self._running.watchdog.calling(method.__name__.lstrip("_")),
        ):
            return method(self, *args, **kwargs)

    return called  # type: ignore[return-value]  # its argument is called self


class OpenRun:
    """A run that has not ended. It builds its stages as soon as it knows what a microbatch looks like."""

    host: Host
    _options: RunOptions
    _recipe: Recipe
    _model: Model
    _shapes: Shapes
    _loss_weight: LossWeight | None
    _reads: list[int]
    _count: int  # microbatches of a step

    def __init__(self, comm: RunComm, shows_traceback: bool) -> None:
        self.comm, self.generators = comm, GeneratorsKept()
        self._exit_by = functools.partial(exit_by, comm, self._position, self._failing, shows_traceback)
        self.session: Session | None = None
        self._steps_at_end = 0  # steps, once the run has ended
        self._ending = contextlib.ExitStack()  # restores what the process had before the run
        self._prepared: Prepared | None = None
        self._loaders: WeakSet[Loader] = WeakSet()  # loaders known to read what this run's ranks read

    @property
    def steps(self) -> int:
        """Steps done, including those before a checkpoint; the count stays when the run has ended."""
        return self._steps_at_end if self.session is None else self.session.steps

    @contextlib.contextmanager
    def _beginning(self) -> Iterator[None]:
        """Inside, what a constructor does; a mistake ends the run on all ranks."""
        with self.generators, self._exit_by():
            try:
                if self.comm.size > 1:
                    self._ending.callback(end_on_uncaught(self.comm, self._failing))
                yield
            except Exception as error:
                if isinstance(error, Stop) or self.comm.size == 1:
                    self._end()  # the process, as a notebook's, may start another run
                raise

    def close(self) -> None:
        """End the run; another Engine may follow in this process. Collective."""
        if self.session is None:
            return
        self.session.wait_for_others()
        if self._prepared is not None:
            self._prepared.free()
        self._end()

    def __enter__(self) -> Self:
        """The run itself, which is closed at the end of the block."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close. An exception that leaves the block ends the other ranks, whether or not this one would catch it."""
        if self.session is None:
            return
        if error is None or isinstance(error, SystemExit | Stop):  # it ends all ranks
            self.close()
        elif self.comm.size == 1:
            self._end()
        else:
            self._failing(error)
            end_on_error(self.comm, error)

    def _end(self) -> None:
        if self.session is not None:
            self._steps_at_end = self.session.steps
            self.session.close()
            self.session = None
        self._ending.close()

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

    # Its parts

    @property
    def _built(self) -> Prepared:
        if self._prepared is None:
            if self._model.batch is None:
                raise Stop("give Engine(example=(input, target)), one microbatch, or make a loader first")
            self._build(text_microbatches(self.comm, self._model, self._options, self._count))
        assert self._prepared is not None
        return self._prepared

    @property
    def _begun(self) -> Prepared:
        """What is built, whose values are those of a checkpoint or the same on all ranks."""
        built = self._built
        built.session.check_start()
        return built

    @property
    def checkpoints(self) -> Checkpoints:
        """What the run saves and resumes."""
        return self._begun.checkpoints

    def _build(self, source: Microbatch | MicrobatchSource) -> None:
        """Build the stages for the microbatches of a source, or for a script's that look like this one. Collective."""
        if isinstance(source, Microbatch):
            source = StepBatches(source, self._count)
        self._prepared = Prepared(
            self._running, self._model, self._options, self._recipe, self.host, source, self._shapes, self._loss_weight
        )

    def _batch(self, batch: Any, name: str, compared: bool, size: int | None = None) -> Batch:
        """A script's batch as a `Batch`; Stop if it does not have the microbatches of a step.

        `compared`: Stop, too, if ranks have made different ones themselves; `name`: of the batch, for the message.
        `size`: of a microbatch, to which a script's own batch is padded; None: it may not be.
        """
        if not isinstance(batch, Batch):
            pair, uneven = self._model.origin.pair, self._shapes.any
            batch = together(self.comm, lambda: whole_batch(batch, self._count, pair, size, uneven))
            if compared:
                check_same_batch(self.comm, batch, name)
        if len(batch.samples) != self._count:
            raise Stop(f"the batch is of {len(batch.samples)} microbatches, but a step has {self._count}")
        if batch.loader is not None and batch.loader not in self._loaders:
            others = list(batch.loader.reads) != self._reads
            refuse(self.comm, others, "the loader is another Engine's, whose ranks read other microbatches")
            self._loaders.add(batch.loader)
        if self._prepared is None:
            self._build(first_microbatch(self.comm, batch))
        return batch

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
        together(self.comm, lambda: check_batches(loader))
        session, shapes = self._running, self._shapes.anew()
        padded = isinstance(loader, Loader) and loader.pads_in_part and (batches is None or batches >= len(loader))

        def evaluators() -> Generator[tuple[Evaluator, Batch], None, None]:
            size = 0  # of a microbatch: a script's smaller last batch is padded
            for number, given in enumerate(islice(self.generators.items(loader), batches)):
                name = f"batch {number + 1}"
                batch = self._batch(given, name, is_compared(number), size)
                size = batch.size
                yield self._begun.evaluator(batch, shapes.of(batch, name), padded, scores), batch

        whole = loader.from_the_start() if isinstance(loader, Loader) else contextlib.nullcontext()
        with session.watchdog.phase(EVALUATING), whole, contextlib.closing(evaluators()) as pairs:
            first = next(pairs, None)
            refuse(self.comm, first is None, "there is no batch to evaluate")
            assert first is not None
            return use(session, chain([first], pairs))
