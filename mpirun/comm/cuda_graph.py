"""Kernels of a GPU captured as one CUDA graph, by torch, and the memory that it reads and writes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class CudaGraph:
    """A graph with memory from a pool that graphs share; these are replayed in the order of their captures."""

    def __init__(self, device: torch.device, pool: tuple[int, int], draws: int) -> None:
        """`draws`: how many random number generators it has, one for each time that a layer begins to draw."""
        self.pool = pool
        self.graph: Any = torch.cuda.CUDAGraph()
        self.default: Any = torch.cuda.default_generators[device.index]
        self.generators: list[Any] = [torch.Generator(device) for _ in range(draws)]
        for generator in self.generators:
            self.graph.register_generator_state(generator)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Inside, kernels are captured, not executed. Other threads may go on: they query events, and MPI copies."""
        own = self.default.graphsafe_get_state()
        self.graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the error that made the capture fail is raised
                self.graph.capture_end()
            raise
        else:
            self.graph.capture_end()
        finally:
            self.default.graphsafe_set_state(own)

    def draw(self, number: int) -> None:
        """In a capture: what follows draws from this generator."""
        self.default.graphsafe_set_state(self.generators[number].graphsafe_get_state())

    def replay(self, seeds: Sequence[int]) -> None:
        """Launch all kernels, which draw from generators with these seeds."""
        for generator, seed in zip(self.generators, seeds, strict=True):
            generator.manual_seed(seed)
        self.graph.replay()


class _Memory:
    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def memory_at(device: torch.device, address: int, size: int) -> Tensor:
    """GPU memory as a tensor of bytes, shape (size,), which does not own it."""
    return torch.as_tensor(_Memory(address, size), device=device)
