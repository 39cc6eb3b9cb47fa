"""--stream-words: words in pinned memory that a GPU's streams write and wait for, to order kernels and messages.

- A *mark* is a number that the stream writes into its word when it reaches the mark. Testing a mark only reads memory,
  and calls nothing of CUDA.
- A *promise* is a number in a receive's own word. A stream can wait for it before the message has arrived: the host
  launches the wait and continues. The thread that ends the receive keeps the promise, by a store or, after a copy, by
  letting the copy's stream write.

Numbers grow by one and wrap around at 2**32: they are compared by the sign of their 32-bit difference, as CUDA does.
While a stream waits, some CUDA calls would wait for it: allocations, the loading of kernels, copies of memory that is
not pinned. So a first step does all of these before words are used.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from schedgen.util.errors import UsageError

PAGE = 1024  # words that are allocated at once
HALF, WHOLE = 2**31, 2**32
AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ: by the sign of the 32-bit difference
FLUSH = 1 << 30  # CU_STREAM_WAIT_VALUE_FLUSH: afterwards a network card's writes to the GPU's memory are seen
CAN_FLUSH = 98  # CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES


class Word:
    """A word, and the last number that was promised to be written into it."""

    def __init__(self, memory: np.ndarray, operations: CudaStreamOperations) -> None:
        """`memory`: shape (1,), uint32, pinned and zero."""
        self.memory, self.address, self.operations = memory, int(memory.ctypes.data), operations
        self.last = 0

    def next(self) -> Number:
        """The number to be written next."""
        self.last = (self.last + 1) % WHOLE
        return Number(self, self.last)


class Number:
    """A point in time: when a word gets this number. It is a `Mark`."""

    __slots__ = ("number", "word")

    def __init__(self, word: Word, number: int) -> None:
        """`number`: what will be written into `word`."""
        self.word, self.number = word, number

    def reached(self) -> bool:
        """Whether the number is written."""
        return (int(self.word.memory[0]) - self.number) % WHOLE < HALF

    def arrive(self) -> None:
        """Make work launched into the current stream from now on wait until the number is written."""
        self.word.operations.wait(self.word.address, self.number)

    def keep(self) -> None:
        """Write the number now."""
        self.word.memory[0] = self.number

    def keep_in_stream(self) -> None:
        """Write the number after all work launched into the current stream."""
        self.word.operations.write(self.word.address, self.number)


class StreamWords:
    """The words of a device: one for each stream, and others on request."""

    def __init__(self, host: Callable[[int], Tensor], operations: CudaStreamOperations) -> None:
        """`host`: allocates pinned memory, given a number of bytes."""
        self.host, self.operations = host, operations
        self.of_streams: dict[Hashable, Word] = {}
        self.free: Iterator[Word] = iter(())
        self.pages: list[np.ndarray] = []  # all memory, kept: streams may write into it after the last read

    def word(self) -> Word:
        """A new word."""
        if (word := next(self.free, None)) is not None:
            return word
        memory = self.host(4 * PAGE).numpy().view(np.uint32)
        memory[:] = 0
        self.pages.append(memory)
        words = [Word(memory[place : place + 1], self.operations) for place in range(PAGE)]
        self.free = itertools.islice(words, 1, None)
        return words[0]

    def mark(self) -> Number:
        """A mark after all work launched into the current stream."""
        stream = self.operations.current()
        if stream not in self.of_streams:
            self.of_streams[stream] = self.word()
        number = self.of_streams[stream].next()
        number.keep_in_stream()
        return number


class CudaStreamOperations:
    """Operations that CUDA's driver launches into the current stream, which executes them in order."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        """UsageError if the driver lacks them."""
        try:
            driver = ctypes.CDLL(library)
            self._write, self._wait = (self._function(driver, f"cuStream{what}Value32") for what in ("Write", "Wait"))
            self._device, self._attribute = driver.cuCtxGetDevice, driver.cuDeviceGetAttribute
        except (OSError, AttributeError) as error:
            raise UsageError(f"stream words: CUDA's driver lacks stream memory operations: {error}") from None
        self._until: int | None = None  # the flags of a wait, once the GPU was asked

    @staticmethod
    def _function(driver: ctypes.CDLL, name: str) -> Any:
        """Version 2 of a driver's function if there is one: version 1 needs a setting of the driver's module."""
        function = getattr(driver, f"{name}_v2", None) or getattr(driver, name)
        function.argtypes = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint
        function.restype = ctypes.c_int
        return function

    def current(self) -> int:
        """The handle of the current stream."""
        return int(torch.cuda.current_stream().cuda_stream)

    def write(self, address: int, number: int) -> None:
        """Write a 32-bit word, after all work launched into the stream."""
        self._check("cuStreamWriteValue32", self._write(self.current(), address, number, 0))

    def wait(self, address: int, number: int) -> None:
        """Make the stream wait until the word is `number` or above."""
        if self._until is None:
            device, can = ctypes.c_int(), ctypes.c_int()
            self._check("cuCtxGetDevice", self._device(ctypes.byref(device)))
            self._check("cuDeviceGetAttribute", self._attribute(ctypes.byref(can), CAN_FLUSH, device))
            # Without flushes words do not order messages that a network card writes itself.
            self._until = AT_LEAST | (FLUSH if can.value else 0)
        self._check("cuStreamWaitValue32", self._wait(self.current(), address, number, self._until))

    @staticmethod
    def _check(name: str, code: int) -> None:
        if code:
            raise RuntimeError(f"stream words: {name} returns error {code}")
