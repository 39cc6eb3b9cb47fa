"""Engines driven by a script, on four ranks: `drive_engine.py FOLDER` does all of it in one launch.

Rank 0 writes FOLDER/found.json: the result of each check. The schedules are in FOLDER, and cases.json: the schemes
that `schemes` trains by, and those of `buckets`, each with whether its sums are canonical.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import mpirun
import schedgen
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


def normed() -> nn.Sequential:
    """Four layers with running statistics."""
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in "1234"))


def statistics() -> Any:
    """Buffers that forwards change: verified, and those of a run that was saved, resumed and exported."""
    data = TensorDataset(INPUTS[:32], TARGETS[:32])
    found = {}
    for name, schedule in (("split", "recompute"), ("shared out", "ddp")):
        verified, out, exported, saved = False, io.StringIO(), [], FOLDER / f"statistics {name}"
        model = mpirun.split(normed(), INPUTS[:2], stages=4) if name == "split" else list(normed())
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
            run = engine(scheme)
            loader = run.loader(DATA, 2, shuffle=True)
            found = run.resume(FOLDER / name, data=loader)
            numbers += [found] * (scheme != "1f1b") + train(run, loader, steps)
            run.save(FOLDER / name, data=loader)
            hashed = weights(run)
            run.close()
        runs.append([[entry for entry in numbers if entry is not True], hashed])
    return runs


class Mixing(nn.Module):
    """A layer for vectors of any number of positions, (samples, positions, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)) + x.cumsum(1) / x.shape[1])


def of_lengths(lengths: Sequence[int], size: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Data whose step k has sequences of lengths[k], in 8 microbatches of `size`."""
    draw = torch.Generator().manual_seed(0)
    rows = [length for length in lengths for _ in range(8 * size)]
    return [(torch.randn(n, WIDTH, generator=draw), torch.randn(n, WIDTH, generator=draw)) for n in rows]


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
    run = mixing()  # evaluated first, on another shape than it is trained on
    run.evaluate(run.loader(of_lengths((3,), 4), 4), batches=1)
    train(run, run.loader(of_lengths((6, 6)), 2), 2)
    run.close()
    return found


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


if __name__ == "__main__":
    found = {
        check.__name__: check()
        for check in (
            schemes,
            given_schedules,
            statistics,
            predictions,
            resumed,
            buckets,
        )
    }
    if WORLD.rank == 0:
        (FOLDER / "found.json").write_text(json.dumps(found))
