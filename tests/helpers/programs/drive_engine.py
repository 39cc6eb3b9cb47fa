"""Engines driven by a script, on four ranks: `drive_engine.py FOLDER` does all of it in one launch.

Rank 0 writes FOLDER/found.json: the result of each check. The schedules are in FOLDER, and cases.json: the schemes
that `schemes` trains by, and those of `buckets`, each with whether its sums are canonical.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import batch_norm, mse_loss
from torch.utils.data import IterableDataset, TensorDataset

import mpirun
import schedgen
from mpirun.model.split.split_result import Cut
from mpirun.training.engine import Engine

WORLD, FOLDER, WIDTH = MPI.COMM_WORLD, Path(sys.argv[1]), 8
CASES = json.loads((FOLDER / "cases.json").read_text())
GENERATOR = torch.Generator().manual_seed(5)
INPUTS, TARGETS = (torch.randn(41, WIDTH, generator=GENERATOR) for _ in range(2))
DATA = TensorDataset(INPUTS, TARGETS)


class Block(nn.Module):
    """A layer that differs in train and eval mode, and has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.norm(torch.tanh(self.linear(x))))


def modules(stages: int = 4) -> list[nn.Module]:
    """The model's layers, with the same weights whatever the run's seed is."""
    torch.manual_seed(1)
    return [Block() for _ in range(stages)]


def loss(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor | int]]:
    """With a metric that padding would change."""
    return mse_loss(output, target), {
        "largest": output.abs().amax(1).mean(),
        "samples": len(output),
    }


def groups(named: Sequence[mpirun.NamedParameter]) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not."""
    matrices, vectors = ([p.parameter for p in named if (len(p.shape) > 1) == matrix] for matrix in (True, False))
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], 1e-2, betas=(0.8, 0.95)
    )


def engine(schedule: str = "1f1b", model: Any = None, **options: Any) -> Engine:
    """An Engine on a schedule in FOLDER."""
    options = {"loss": loss, "optimizer": groups, "canonical": True, "timeout": 0, **options}
    return mpirun.Engine(str(FOLDER / f"{schedule}.json"), modules() if model is None else model, **options)


def weights(run: Engine) -> str:
    """A hash of all weights, which does not depend on their placement. Collective."""
    session = run.session
    assert session is not None
    own = {
        f"{stage.index} {part}": hashlib.sha256(bytes(flat.view(torch.uint8).cpu().numpy())).hexdigest()
        for stage in session.interpreter.optimizer.stages.values()
        for part, flat in stage.owned.items()
    }
    everything = {key: value for of_rank in WORLD.allgather(own) for key, value in of_rank.items()}
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


def train(run: Engine, loader: Any, steps: int) -> list[Any]:
    """Train until so many steps are done; return the numbers of each."""
    numbers = []
    while run.steps < steps:
        for batch in loader:
            result = run.step(batch)
            numbers.append([result.loss, result.grad_norm, dict(result.metrics), result.lr, result.tokens])
            if run.steps == steps:
                break
    return numbers


def said(function: Callable[[], Any]) -> list[Any]:
    """The exit code, and what this script's ranks print on stderr, of a call that ends all ranks."""
    err, code = io.StringIO(), None
    with contextlib.redirect_stderr(err):
        try:
            function()
        except SystemExit as end:
            code = end.code
    return [code, "".join(WORLD.allgather(err.getvalue()))]


def schemes() -> Any:
    """Two epochs under each scheme, evaluated and verified."""
    found = {}
    for scheme in CASES["schemes"]:
        run = engine(scheme, verify=True, clip=0.5, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5))
        loader, test = run.loader(DATA, 2, shuffle=True, seed=3), run.loader(DATA, 2)
        numbers = train(run, loader, 2 * len(loader))
        evaluation = run.evaluate(test)
        first = run.evaluate(test, batches=1)
        predictions = run.predict(test)
        again = run.predict(test)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            verified = run.verify()
        found[scheme] = {
            "numbers": numbers,
            "evaluation": [evaluation.loss, evaluation.metrics, evaluation.samples],
            "first": first.samples,
            "predictions": None if predictions is None else [predictions.tolist(), torch.equal(predictions, again)],
            "verified": [verified, out.getvalue()],
        }
        run.close()
    return found


def program(workers: int = 4) -> schedgen.Program:
    sizes = schedgen.Sizes(4, 8, workers, groups=2)
    return schedgen.compile(schedgen.load("lpp", sizes), sizes)


def given_schedules() -> Any:
    """A file, a program, a scheme that is built in and one of the script's own."""
    found = {}
    sizes = {"stages": 4, "microbatches": 8}
    for name, schedule, more in (
        ("file", FOLDER / "1f1b.json", {}),
        ("program", program(), {}),
        ("scheme", "gpipe", sizes),
        ("own", str(FOLDER / "mine.py"), sizes),
    ):
        with mpirun.Engine(
            schedule, modules(), loss=loss, optimizer=groups, canonical=True, threads=2, **more, timeout=0
        ) as run:
            found[name] = [train(run, run.loader(DATA, 2), 1), torch.get_num_threads()]
    return found


def tolerances() -> Any:
    """What verify says, by tolerance: sums over ranks are rounded otherwise than in one process."""
    with engine("ddp", canonical=False, verify=True) as run:
        train(run, run.loader(DATA, 2), 1)
        with contextlib.redirect_stdout(io.StringIO()):
            found = [run.verify(0.0), run.verify(), run.verify(1e-3)]
        return found


class DeferredNorm(nn.Module):
    """Normalises each microbatch, and has running statistics of minibatches, as torchgpipe's DeferredBatchNorm."""

    def __init__(self, microbatches: int) -> None:
        super().__init__()
        self.microbatches = microbatches
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        for name, value in (("running_mean", 0.0), ("running_var", 1.0), ("sum", 0.0), ("squares", 0.0)):
            self.register_buffer(name, torch.full((WIDTH,), value))
        for name in ("samples", "seen", "num_batches_tracked"):
            self.register_buffer(name, torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)
        with torch.no_grad():
            self.sum += x.sum(0)
            self.squares += x.square().sum(0)
            self.samples += len(x)
            self.seen += 1
            last = self.seen == self.microbatches
            mean = self.sum / self.samples
            variance = self.squares / self.samples - mean.square()
            self.running_mean.lerp_(mean, 0.1 * last)
            self.running_var.lerp_(variance, 0.1 * last)
            self.num_batches_tracked += last
            for buffer in (self.sum, self.squares, self.samples, self.seen):
                buffer *= ~last
        return batch_norm(x, None, None, self.weight, self.bias, training=True)


class Replaced(nn.Module):
    """Counts in a buffer that is another tensor every time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1 if self.training else self.calls
        return x


def normed(counting: bool) -> nn.Sequential:
    """Four layers with statistics of both kinds; `counting`: the third counts instead."""
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), DeferredNorm(8)) for _ in "1234"]
    if counting:
        layers[2] = nn.Sequential(nn.Linear(WIDTH, WIDTH), Replaced(), nn.Tanh())
    return nn.Sequential(*layers)


@functools.cache
def traced() -> Cut:
    """The four layers, traced."""
    return mpirun.split(normed(False), INPUTS[:2], stages=4)


def statistics() -> Any:
    """Buffers that forwards change: verified, and those of a run that was saved, resumed and exported."""
    data = TensorDataset(INPUTS[:32], TARGETS[:32])
    found = {}
    for name, schedule in (("modules", "recompute"), ("split", "recompute"), ("shared out", "ddp")):
        verified, out, exported, saved = False, io.StringIO(), [], FOLDER / f"statistics {name}"
        model = traced() if name == "split" else list(normed(name == "modules"))
        for resumes in (False, True) if name == "split" else (False,):
            run = engine(schedule, model, verify=not resumes)
            loader = run.loader(data, 2)
            if resumes:
                run.resume(saved, data=loader)
            else:
                train(run, loader, 2)
                run.save(saved, data=loader)
            train(run, loader, 4)
            folder = FOLDER / f"statistics {name} {resumes}"
            run.export(folder)
            if not resumes:
                with contextlib.redirect_stdout(out):
                    verified = run.verify()
            run.close()
            tensors = {k: x for file in folder.glob("*.safetensors") for k, x in load_file(file).items()}
            exported.append({k: x.tolist() for k, x in tensors.items()})
        found[name] = [verified, out.getvalue(), *exported]
    return found


def resumed() -> Any:
    """An undisturbed run, and one that ends in the middle of an epoch and is resumed under another scheme."""
    runs = []
    for name, parts in (("whole", (("1f1b", 7),)), ("parts", (("1f1b", 4), ("zb-h1", 7)))):
        numbers = []
        for scheme, steps in parts:
            run = engine(scheme, accumulate=1)
            loader = run.loader(DATA, 2, shuffle=True)
            found = run.resume(FOLDER / name, data=loader)
            numbers += [found] * (scheme != "1f1b") + train(run, loader, steps)
            run.save(FOLDER / name, data=loader)
            hashed = weights(run)
            run.close()
        runs.append([[entry for entry in numbers if entry is not True], hashed])
    return runs


def one_given_batch() -> Any:
    """A minibatch that every rank gives as a whole, under a scheme that the script names."""
    rank = WORLD.rank  # an int, and may differ

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output, target) * (rank < 4)

    run = mpirun.Engine(
        "1f1b", modules(), stages=4, microbatches=4, loss=loss, timeout=0,
        lr=lambda step: 1e-3 * (step + 1),
    )  # fmt: skip
    with torch.no_grad():  # a step has gradients nevertheless
        results = [run.step((INPUTS[:32], TARGETS[:32])) for _ in range(3)]
    run.close()
    return [[result.loss for result in results], [result.lr for result in results], results[0].metrics]


def from_a_stream() -> Any:
    """An IterableDataset, two epochs."""

    class Stream(IterableDataset[tuple[Tensor, Tensor]]):
        def __iter__(self) -> Any:
            return iter(zip(INPUTS, TARGETS, strict=True))

    numbers = []
    for data in (Stream(), DATA):
        run = engine()
        loader = run.loader(data, 2, workers=0)
        numbers.append(train(run, loader, 6))
        run.close()
    return numbers


class Mixing(nn.Module):
    """A layer for vectors of any number of positions, (samples, positions, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)) + x.cumsum(1) / x.shape[1])


def of_lengths(lengths: Sequence[int]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Data whose step k has sequences of lengths[k], the last length from then on."""

    def make(step: int, microbatch: int, rng: Any) -> tuple[Tensor, Tensor]:
        shape = 2, lengths[min(step, len(lengths) - 1)], WIDTH
        return tuple(torch.from_numpy(rng.standard_normal(shape, "float32")) for _ in range(2))

    return make


def mixing(schedule: str = "1f1b", **options: Any) -> Engine:
    """An Engine whose stages take sequences of any length."""
    torch.manual_seed(1)
    return engine(schedule, [Mixing() for _ in range(4)], loss=mse_loss, **options)


def buckets() -> Any:
    """Two lengths in turn, evaluated on both and traced in between, under each scheme."""
    found = {}
    lengths = (6, 9, 9, 6, 6, 9, 6, 9)
    for scheme, canonical in CASES["buckets"]:
        run = mixing(scheme, canonical=canonical, verify=True, clip=0.5, buckets=(6, 9))
        loader, test = run.loader(of_lengths(lengths), 2), run.loader(of_lengths((9, 6)), 2)
        numbers = train(run, loader, 3)
        evaluations = [run.evaluate(test, batches=2)]
        with contextlib.suppress(ZeroDivisionError), run.trace(FOLDER / "dropped"):
            raise ZeroDivisionError
        with run.trace(FOLDER / f"{scheme}.trace"):
            numbers += train(run, loader, 7)
            evaluations.append(run.evaluate(test, batches=2))
        numbers += train(run, loader, 8)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            verified = run.verify()
        found[f"{scheme} {canonical}"] = {
            "numbers": numbers,
            "weights": weights(run) if scheme in ("1f1b", "zb-h1") else "",
            "evaluations": [[entry.loss, entry.samples] for entry in evaluations],
            "verified": [verified, out.getvalue()],
        }
        run.close()
    run = mixing(accumulate=2)  # evaluated first, on another shape than it is trained on
    run.evaluate(run.loader(of_lengths((3,)), 4), batches=1)
    train(run, run.loader(of_lengths((6,)), 2), 2)
    run.close()
    return found


def told() -> Any:
    """What a callback and TensorBoard are told."""
    told: list[Any] = []
    for log in (lambda step, numbers: told.append([step, sorted(numbers)]), FOLDER / "events"):
        run = engine(log=log)
        train(run, run.loader(DATA, 2), 2)
        run.close()
    return [told, [path.name.split(".")[0] for path in (FOLDER / "events").iterdir()] if WORLD.rank == 0 else []]


def predictions() -> Any:
    """Whether an untrained model predicts the same as in one process, under every schedule in FOLDER/predict."""
    found = {}
    data = TensorDataset(*(tensor[:16] for tensor in DATA.tensors))
    for file in sorted((FOLDER / "predict").iterdir()):
        header = json.loads(file.read_text())["scheme"]
        run = engine(f"predict/{file.stem}", modules(header["stages"]))
        predicted = run.predict(run.loader(data, 2))
        run.close()
        plain = nn.Sequential(*modules(header["stages"])).eval()
        with torch.no_grad():
            expected = torch.cat([plain(part) for part in INPUTS[:16].split(2)])
        found[file.stem] = WORLD.rank > 0 or torch.equal(predicted, expected)
    return found


def sentences() -> Any:
    """By mistake, the exit code and what is printed on stderr."""
    plain = {"loss": loss, "timeout": 0}
    file = str(FOLDER / "1f1b.json")

    def stepped(*given: Any, scheme: str = "1f1b", data: Any = DATA, **options: Any) -> Callable[[], Any]:
        def call() -> None:
            run = engine(scheme, **options)
            try:
                for batch in given or run.loader(data, 2):
                    run.step(batch)
                    break
            finally:
                run.close()

        return call

    def within_traces() -> None:
        run = engine(example=DATA[:2])
        try:
            with run.trace(FOLDER / "outer"), run.trace(FOLDER / "inner"):
                pass
        finally:
            run.close()

    def before_data(method: str) -> Callable[[], Any]:
        def call() -> None:
            run = engine()
            try:
                getattr(run, method)(FOLDER / "x")
            finally:
                run.close()

        return call

    def unseeded(step: int, microbatch: int, rng: Any) -> tuple[Tensor, Tensor]:
        return torch.full((2, WIDTH), float(WORLD.rank)), torch.zeros(2, WIDTH)

    def unseeded_later() -> None:
        run = engine()
        try:
            for _ in range(4):
                run.step((INPUTS[:32] + (run.steps == 3) * WORLD.rank, TARGETS[:32]))
        finally:
            run.close()

    def two_save() -> None:
        first, second = engine(), engine()
        try:
            for run in (first, second):
                train(run, run.loader(DATA, 2), 1)
                run.save(FOLDER / "locked")
        finally:
            first.close()
            second.close()

    def another_optimizer() -> None:
        run = engine(optimizer=lambda named: torch.optim.SGD([p.parameter for p in named], 0.1), example=DATA[:2])
        try:
            run.resume(FOLDER / "whole")
        finally:
            run.close()

    def other_data() -> None:
        run = engine()
        try:
            run.resume(FOLDER / "whole", data=run.loader(DATA, 2, shuffle=True, seed=7))
        finally:
            run.close()

    def closed() -> None:
        run = engine()
        run.close()
        run.loader(DATA, 2)

    def refused_at_once(method: str, *arguments: Any) -> Callable[[], Any]:
        def call() -> None:
            run = engine()
            try:
                for _ in range(3):
                    run.loader(DATA, 2)
                getattr(run, method)(*arguments)
            finally:
                run.close()

        return call

    def loader(data: Any = DATA, size: int = 2, **options: Any) -> Callable[[], Any]:
        def call() -> None:
            run = engine()
            try:
                run.loader(data, size, **options)
            finally:
                run.close()

        return call

    def lengths(make: Callable[..., Any], **options: Any) -> Callable[[], Any]:
        def call() -> None:
            run = mixing(**options)
            try:
                train(run, run.loader(make, 2), 2)
            finally:
                run.close()

        return call

    def ragged(step: int, microbatch: int, rng: Any) -> tuple[Tensor, Tensor]:
        return of_lengths((6 + 3 * (microbatch == 5),))(step, microbatch, rng)

    def two_shapes() -> None:
        run = engine()
        try:
            for samples in (32, 16):
                run.step((INPUTS[:samples], TARGETS[:samples]))
        finally:
            run.close()

    def two_rates(named: Sequence[mpirun.NamedParameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p.parameter], "lr": 0.2 / len(p.shape)} for p in named])

    last = WORLD.rank == 3  # alone it is given other options

    given_by_rank: dict[str, Any] = {
        "seed": WORLD.rank // 3,
        "canonical": last,
        "clip": 1.0 + last,
        "on_nan": "skip" if last else "stop",
        "timeout": 60.0 * last,
        "export": FOLDER / "new" if last else None,
        "scheduler": functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5 + 0.1 * last),
        "loss": nn.functional.l1_loss if last else mse_loss,
    }
    mistakes: dict[str, Callable[[], Any]] = {
        "device": lambda: mpirun.Engine(file, modules(), device="tpu", **plain),
        "lengths": loader(TensorDataset(INPUTS[: 20 + WORLD.rank], TARGETS[: 20 + WORLD.rank])),
        "forwards": lambda: mpirun.Engine(str(FOLDER / "forward.json"), modules(), **plain),
        "no loss": lambda: mpirun.Engine(file, modules(), timeout=0),
        "no microbatches": lambda: mpirun.Engine("1f1b", modules(), stages=4, **plain),
        "no groups": lambda: mpirun.Engine("fslpp", modules(), stages=4, microbatches=4, **plain),
        "no such scheme": lambda: mpirun.Engine("2f2b", modules(), stages=4, microbatches=4, **plain),
        "other ranks": lambda: mpirun.Engine(program(2), modules(), **plain),
        "threads": lambda: mpirun.Engine(file, modules(), threads=0, **plain),
        "wrong stages": lambda: mpirun.Engine(file, modules(3), **plain),
        "export to what is there": lambda: mpirun.Engine(file, modules(), export=FOLDER, **plain),
        "clip": lambda: mpirun.Engine(file, modules(), clip=-1.0, **plain),
        "autocast": lambda: mpirun.Engine(file, modules(), autocast="fp8", **plain),
        "lr and scheduler": lambda: mpirun.Engine(file, modules(), lr=1.0, scheduler=lambda o: o, **plain),
        "left out": stepped(optimizer=lambda named: torch.optim.SGD([p.parameter for p in named[1:]], 0.1)),
        "rates of groups": stepped(lr=0.1, optimizer=two_rates),
        "no optimizer": stepped(optimizer=lambda named: 3),
        "closure": stepped(optimizer=lambda named: torch.optim.LBFGS([p.parameter for p in named])),
        "weights": lambda: mpirun.Engine(file, modules(), weights=modules()[0].state_dict(), **plain),
        "batches": refused_at_once("evaluate", [(INPUTS, TARGETS)], -1),
        "no loader": refused_at_once("predict", 5),
        "no loader on some ranks": refused_at_once("evaluate", 3 if WORLD.rank else [(INPUTS, TARGETS)]),
        "plateau": stepped(scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o)),
        "pieces": stepped(scheme="fsdp-shards", optimizer=torch.optim.Adafactor),
        "metric": stepped(loss=lambda output, target: (mse_loss(output, target), {"shape": output})),
        "different data": stepped(data=unseeded),
        "different data later": unseeded_later,
        "not divisible": stepped((INPUTS[:31], TARGETS[:31])),
        "items": stepped(data=list(range(100))),
        "fewer": loader(last="fewer"),
        "size": loader(size=0),
        "two save": two_save,
        "another optimizer": another_optimizer,
        "other data": other_data,
        "two shapes": two_shapes,
        "ragged": lengths(ragged, buckets=(6, 9)),
        "undeclared": lengths(of_lengths((6, 9)), buckets=(6, 8)),
        "buckets": lambda: mpirun.Engine(file, modules(), buckets=(0,), **plain),
        "traced": lambda: mpirun.Engine(file, traced(), buckets=(6,), **plain),
        "closed": closed,
        "save first": before_data("save"),
        "resume first": before_data("resume"),
        "verify": refused_at_once("verify"),
        "trace in a trace": within_traces,
    }  # fmt: skip
    for name in given_by_rank:
        mistakes[f"other {name}"] = lambda name=name: mpirun.Engine(
            file, modules(), **{**plain, name: given_by_rank[name]}
        )
    return {name: said(mistake) for name, mistake in mistakes.items()}


def asked_to_leave() -> Any:
    """SIGTERM to one rank in the middle of an epoch."""
    run = engine()
    loader = run.loader(DATA, 2)
    train(run, loader, 1)
    run.save(FOLDER / "left", data=loader)

    def go_on() -> None:
        if WORLD.rank == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        train(run, loader, 3)

    found = said(go_on)
    run.close()
    return [*found, sorted(path.name for path in (FOLDER / "left").glob("step-*"))]


if __name__ == "__main__":
    found = {
        check.__name__: check()
        for check in (
            schemes,
            given_schedules,
            tolerances,
            statistics,
            predictions,
            resumed,
            one_given_batch,
            from_a_stream,
            buckets,
            told,
            sentences,
            asked_to_leave,
        )
    }
    if WORLD.rank == 0:
        (FOLDER / "found.json").write_text(json.dumps(found))
