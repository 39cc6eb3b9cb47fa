"""Kernels of the late device captured as graphs, and the pool of memory that all graphs share.

- In a capture kernels are recorded; only replays run them. The host may not wait, record events or seed generators.
- A kernel keeps addresses, not tensors. Memory outside the pool must still be allocated in every replay.
- A tensor made in a capture lies in the pool. When it is freed, tensors of later captures may get its memory, and
  replays fill it with NaN.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from late_streams import Kernel, Streams
from torch import Tensor, UntypedStorage

ONES = 255
LINE = 512  # bytes: sizes of blocks are multiples of this


def bytes_at(address: int, size: int) -> Tensor:
    """A view of memory as bytes, shape (size,), which does not keep the memory alive."""
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


class Pool:
    """Blocks of memory that live as long as the device."""

    def __init__(self) -> None:
        self.blocks: dict[int, Tensor] = {}  # by address
        self.free: dict[int, list[int]] = {}  # by size, addresses
        self.kernels: list[Kernel] | None = None  # of the capture
        self.captures = self.replays = 0  # of graphs
        self.died: set[int] = set()  # free addresses whose last tensor's values are still there

    def make(self, like: Tensor) -> Tensor:
        """A tensor in the pool, without values, of the layout and type of `like`."""
        size = -(-max(1, like.untyped_storage().nbytes()) // LINE) * LINE
        addresses = self.free.setdefault(size, [])
        if not addresses:
            block = torch.full((size,), ONES, dtype=torch.uint8)
            self.blocks[block.data_ptr()] = block
            addresses.append(block.data_ptr())
        address = addresses.pop()
        if address in self.died:
            self.died.remove(address)
            if self.kernels:  # else it may be an input of the graph, filled before the replay
                self.kernels.append(self._emptied(address))
        storage = bytes_at(address, size).untyped_storage()
        weakref.finalize(storage, self._give_back, address, size).atexit = False
        return torch.empty(0, dtype=like.dtype).set_(storage, 0, like.size(), like.stride())

    def _give_back(self, address: int, size: int) -> None:
        # Note it before it is free: in between, another thread might give it to another tensor.
        self.died.add(address)
        self.free[size].append(address)

    def _emptied(self, address: int) -> Kernel:
        return lambda: self.blocks[address].fill_(ONES)

    @contextlib.contextmanager
    def capturing(self, kernels: list[Kernel]) -> Iterator[None]:
        """A context of a capture; kernels that overwrite the memory of freed tensors are added to `kernels`."""
        self.kernels = kernels
        try:
            yield
        finally:
            self.kernels = None
            while self.died:  # other threads add to it
                kernels.append(self._emptied(self.died.pop()))


class Address:
    """The address and layout of a tensor, for a kernel that is replayed."""

    def __init__(self, tensor: Tensor, pool: Pool) -> None:
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.offset, storage = int(tensor.storage_offset()), tensor.untyped_storage()
        self.address, self.bytes = storage.data_ptr(), storage.nbytes()
        self.storage = None if self.address in pool.blocks else weakref.ref(storage)

    def tensor(self) -> Tensor:
        """The tensor. RuntimeError if its memory has been freed."""
        storage: UntypedStorage | None
        storage = bytes_at(self.address, self.bytes).untyped_storage() if self.storage is None else self.storage()
        if storage is None:
            raise RuntimeError("a kernel of a graph uses memory that has been freed since it was captured")
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


class Generator:
    """A seed that a graph reads when it is replayed."""

    def __init__(self) -> None:
        self.seed = 0

    def use(self) -> None:
        torch.default_generator.manual_seed(self.seed)


class LateGraph:
    """As `device.CudaGraph`."""

    def __init__(self, streams: Streams, pool: Pool, draws: int) -> None:
        self.streams, self.pool = streams, pool
        self.generators = [Generator() for _ in range(draws)]
        self.kernels: list[Kernel] = []

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        self.pool.captures += 1
        with self.pool.capturing(self.kernels), self.streams.capturing(self.kernels):
            yield

    def draw(self, number: int) -> None:
        self.streams.launch(self.generators[number].use)

    def replay(self, seeds: Sequence[int]) -> None:
        self.pool.replays += 1
        for generator, seed in zip(self.generators, seeds, strict=True):
            self.streams.launch(lambda generator=generator, seed=seed: setattr(generator, "seed", seed))
        for kernel in self.kernels:
            self.streams.launch(kernel)


def recorded(run: Callable[..., object], values: Any, pool: Pool, late: Callable[[Tensor], bool]) -> Kernel:
    """A kernel that calls `run` with these nested arguments, and keeps only addresses of tensors on the device."""

    def kept(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(kept, value))
        if isinstance(value, dict):
            return {name: kept(x) for name, x in value.items()}
        return Address(value, pool) if isinstance(value, Tensor) and late(value) else value

    def made(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(made, value))
        if isinstance(value, dict):
            return {name: made(x) for name, x in value.items()}
        return value.tensor() if isinstance(value, Address) else value

    addresses = kept(values)
    return lambda: run(*made(addresses))
