"""Train a small ResNet with BatchNorm on scikit-learn's 1,797 handwritten digits.

    mpiexec -n 4 python -m mpirun.examples.digits SCHEDULE [EPOCHS]

SCHEDULE is a file of schedgen. After each epoch, by default of three, it prints the accuracy on 297 digits.
"""

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import nn
from torch.nn.functional import cross_entropy, relu
from torch.utils.data import TensorDataset

import mpirun

EPOCHS, EVERY = 3, 8


class Residual(nn.Module):
    """Two convolutions with BatchNorm, and a skip connection around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.last_norm = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (samples, width, 8, 8)."""
        return relu(x + self.last_norm(self.second(relu(self.norm(self.first(x))))))


def resnet(blocks: int = 6, width: int = 16) -> nn.Module:
    """Images, shape (samples, 1, 8, 8), to scores, shape (samples, 10)."""
    begin = [nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(width, 10)]
    return nn.Sequential(*begin, *(Residual(width) for _ in range(blocks)), *end)


def loss(scores: torch.Tensor, digits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Cross-entropy, and how often the highest score is right."""
    return cross_entropy(scores, digits), {"accuracy": (scores.argmax(-1) == digits).float().mean()}


def main(schedule: str, epochs: int = EPOCHS, checkpoints: str | None = None, **options: Any) -> list[float]:
    """Train; returns the accuracies. `options`: more arguments of the Engine."""
    images, digits = load_digits(return_X_y=True)
    data = TensorDataset(
        torch.tensor(images, dtype=torch.get_default_dtype()).view(-1, 1, 8, 8) / 16, torch.tensor(digits)
    )
    train, test = (torch.utils.data.Subset(data, range(*ends)) for ends in ((0, 1500), (1500, len(data))))
    torch.manual_seed(0)
    run = mpirun.Engine(
        schedule, lambda stages: mpirun.split(resnet(), torch.zeros(8, 1, 8, 8), stages=stages), loss=loss,
        optimizer=lambda named: torch.optim.SGD([p.parameter for p in named], 0.1, momentum=0.9, nesterov=True),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5), **options,
    )  # fmt: skip
    loader, tests = (run.loader(part, microbatch_size=8, shuffle=part is train, workers=1) for part in (train, test))
    if checkpoints:
        run.resume(checkpoints, data=loader)
    accuracies = []
    while loader.epoch < epochs:
        for batch in loader:
            result = run.step(batch)
            if checkpoints and run.steps % EVERY == 0:
                run.save(checkpoints, data=loader)
        accuracies.append(run.evaluate(tests).metrics["accuracy"])
        if run.rank == 0:
            print(f"epoch {loader.epoch}: loss {result.loss:.4f}, accuracy {accuracies[-1]:.4f}", flush=True)
    run.close()
    return accuracies


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedule")
    parser.add_argument("epochs", type=int, nargs="?", default=EPOCHS)
    main(**vars(parser.parse_args()))
