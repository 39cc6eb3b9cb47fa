"""Random numbers of a model: they depend on the run's seed, the step, the microbatch and the layer, on nothing else.

Rank, scheme, order and cut do not matter. A *layer* is an entry of the mapping that a stage is given as; in a stage
made by `mpirun.split`, an operation that draws; any other stage is one layer. A loss is seeded like a layer, an
optimizer by the step and its first parameter. A `ForwardWatch` finds the layers whose forward draws (dropout), when
shapes are inferred. `LayerRng` then seeds the generator before each of their forwards: the same forward draws the same
numbers again, on any rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

T = TypeVar("T")

WHOLE_STAGE = ""  # the layer's name in a stage that is one layer
LOSS = ".loss"  # what the loss draws is seeded by this name, which no layer has


def derived_seed(*parts: int | str) -> int:
    """A seed for torch, below 2**63, that depends on all of `parts`."""
    words = [part if isinstance(part, int) else int.from_bytes(part.encode(), "little") for part in parts]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0]) % 2**63


def seed_generators(seed: int) -> None:
    """Seed torch's generators: that of the CPU and, if there are devices, theirs.

    `torch.manual_seed` would do the same, but formats a stack trace for each kind of device that does not exist.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


class GeneratorsKept:
    """On exit, restore torch's generators of the CPU and of the current GPU, whatever drew from them or seeded them.

    Ranks have different layers and seed differently; what a script draws must be the same on all ranks.
    """

    def __init__(self) -> None:
        self.of_script: list[list[Tensor]] = []  # the states at each entry, the innermost last

    def __enter__(self) -> None:
        """Keep the script's states."""
        self.of_script.append(generator_states())

    def __exit__(self, *_: object) -> None:
        """Restore them."""
        _set_states(self.of_script.pop())

    def items(self, loader: Iterable[T]) -> Iterator[T]:
        """What a loader gives, which draws from the script's generators, as in a loop of the script."""
        items: Iterator[T] | None = None
        while True:
            own = generator_states()
            _set_states(self.of_script[-1])
            try:
                items = iter(loader) if items is None else items
                item = next(items)
            except StopIteration:
                return
            finally:
                self.of_script[-1] = generator_states()
                _set_states(own)
            yield item


def generator_states() -> list[Tensor]:
    """The states of torch's generators, of the CPU and of the current GPU."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


def _set_states(states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)


class RandomOp(nn.Module):
    """An operation of a traced module that draws: a layer whose name does not depend on the cut."""


def layers_of(module: nn.Module, layers: Sequence[str]) -> Sequence[str]:
    """The names of a stage's layers; `layers`: of a mapping that it is given as, else none."""
    return layers or [name for name, part in module.named_modules() if isinstance(part, RandomOp)] or [WHOLE_STAGE]


class LayerRng:
    """Seeds the generator before each forward of the layers of a stage that draw.

    `at` is set for a forward of the stage: the run's seed, the step, the microbatch. It is empty otherwise: the module
    may be another stage's, too, or a script's. `begin` is called with a layer's name before its forward.
    """

    def __init__(self, module: nn.Module, stage: int, layers: Sequence[str], seed: Callable[[int], None]) -> None:
        """`layers`: names of those that draw; `seed` seeds the generator that they draw from."""
        self.at: tuple[int, ...] = ()
        self.begin: Callable[[str], None] = lambda name: seed(self.seed(name))
        self.layers: set[str] = set()
        self.add(module, stage, layers)

    def add(self, module: nn.Module, stage: int, layers: Sequence[str]) -> None:
        """Seed before these layers, too, which draw in microbatches of another shape or in evaluations."""
        for name in dict.fromkeys(layers):
            if name not in self.layers:
                layer = module if name == WHOLE_STAGE else module.get_submodule(name)
                layer.register_forward_pre_hook(self._hook(name or f"stage {stage}"))
        self.layers.update(layers)

    def seed(self, name: str) -> int:
        """The seed for a layer's forward in the job at `at`."""
        return derived_seed(*self.at, name)

    def _hook(self, name: str) -> Callable[[nn.Module, Any], None]:
        def before(_: nn.Module, __: Any) -> None:
            if self.at:
                self.begin(name)

        return before
