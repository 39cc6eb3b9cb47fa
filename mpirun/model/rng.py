"""Random numbers in a model depend on the step, the microbatch and the layer: never on rank, scheme or order.

A layer is an entry of the mapping that a stage of the model is given as, or in
a traced stage an operation that draws; a stage given otherwise is one layer. Layers that draw random numbers in their
forward (dropout) are found once, on fake tensors, and before each of their
forwards the generator is seeded anew: a forward done again, on whichever rank,
draws the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

ALL = ""  # the name of a stage that is one layer


def number(*parts: int | str) -> int:
    """A seed that depends on all of `parts`."""
    words = [part if isinstance(part, int) else int.from_bytes(part.encode(), "little") for part in parts]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])


class Draw(nn.Module):
    """An operation of a traced module that draws, as a layer with a name that does not depend on the cut."""

    def __init__(self, operation: Callable[..., Any]) -> None:
        super().__init__()
        self.operation = operation

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.operation(*args, **kwargs)


class Draws:
    """Seeds the layers of one stage that draw; `at` says for which step and microbatch."""

    def __init__(self, module: nn.Module, index: int, names: Sequence[str], seed: Callable[[int], None]) -> None:
        """`index` of the stage; `names` of its layers that draw; `seed`: seeds the generator they draw from."""
        self.at: tuple[int, ...] = ()  # the run's seed, the step, the microbatch
        for name in names:
            layer = module if name == ALL else module.get_submodule(name)
            layer.register_forward_pre_hook(self._hook(name or f"stage {index}", seed))

    def _hook(self, name: str, seed: Callable[[int], None]) -> Callable[[nn.Module, Any], None]:
        def before(_: nn.Module, __: Any) -> None:
            seed(number(*self.at, name) % 2**63)

        return before


class Watch(TorchDispatchMode):
    """Notes which of a module's layers draw random numbers while it is active."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        """`names` of the layers; empty: each `Draw` in the module is one, or else the module."""
        super().__init__()
        self.drawn = False
        self.found: list[str] = []
        for name in names or [name for name, one in module.named_modules() if isinstance(one, Draw)] or [ALL]:
            layer = module.get_submodule(name) if name else module
            layer.register_forward_pre_hook(lambda *_: setattr(self, "drawn", False))
            layer.register_forward_hook(lambda *_, name=name: self.found.append(name) if self.drawn else None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:  # attention is, even without dropout
            arguments = func._schema.arguments
            given = {one.name: one.default_value for one in arguments if one.has_default_value()}
            given |= {argument.name: value for argument, value in zip(arguments, args, strict=False)}
            self.drawn |= (given | kwargs).get("dropout_p", 1.0) != 0.0
        return func(*args, **kwargs)
