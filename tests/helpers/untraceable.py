"""Modules that cannot be split; each line that is the reason ends in `# here`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mpirun import pipe_split


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)


class Branch(Layers):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # here
            x = -x
        return self.second(self.first(x))


class Item(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        scale = x.max().item()  # here
        return self.second(x * scale)


class Numpy(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = torch.from_numpy(x.numpy())  # here
        return self.second(x)


class Viewed(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        top = x[:1]
        pipe_split()
        top.zero_()  # here
        return self.second(x)


class Input(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)  # here
        return self.second(self.first(x))


class Strided(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).t()
        pipe_split()
        return self.second(x.as_strided((4, 16), (16, 1)))  # here


class Counted(Layers):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.seen.add_(x.detach().sum(0))  # here
        pipe_split()
        return self.second(x + self.seen)


class Resized(Counted):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.detach()  # here
        return self.second(self.first(x))


class First(Layers):
    def forward(self, x: Tensor) -> Tensor:
        pipe_split()  # here
        return self.second(self.first(x))


class Straight(torch.autograd.Function):
    """Rounds; backward as if it did not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Rounded(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = Straight.apply(self.first(x))  # here
        return self.second(x)


class Forces(Layers):
    def forward(self, x: Tensor) -> Tensor:  # here
        x = x.detach().requires_grad_()
        energy = self.second(torch.tanh(self.first(x))).sum()
        (forces,) = torch.autograd.grad(energy, x, create_graph=True)
        return -forces


class Hooked(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x.register_hook(torch.zeros_like)  # here
        return self.second(x)


class Returns(Layers):
    def forward(self, x: Tensor) -> Any:  # here
        return iter([self.first(x)])


class Nothing(Layers):
    def forward(self, x: Tensor) -> Any:  # here
        return {"number": 3}
