"""Prints the latencies of the ways to order host and GPU on this machine, as one object, in microseconds.

event    from the end of a kernel until a host that polls an event sees it
wait     from a word that the host writes to the end of a stream's wait for it (cuStreamWaitValue32)
eager    a forward and backward of a small GPT block, launched kernel by kernel
replay   the same as a CUDA graph
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable

import numpy as np
import torch

from mpirun.examples.gpt import Block

TIMES = 200
EQUAL_OR_MORE = 0  # CU_STREAM_WAIT_VALUE_GEQ


def median(once: Callable[[int], float]) -> float:
    """The median of the second half of many calls, in microseconds."""
    return 1e6 * float(np.median([once(number) for number in range(TIMES)][TIMES // 2 :]))


def event(_: int) -> float:
    """A kernel of some 100 us, and the host's time until its end is seen, less the kernel's own."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    begin.synchronize()
    at = time.perf_counter()
    begin.record()
    torch.cuda._sleep(200_000)
    end.record()
    while not end.query():
        pass
    return time.perf_counter() - at - begin.elapsed_time(end) / 1e3


def wait_for_word() -> Callable[[int], float]:
    """The stream waits for a number in pinned memory, which the host writes; an event then tells the host."""
    driver, word = ctypes.CDLL("libcuda.so.1"), torch.zeros(1, dtype=torch.int32, pin_memory=True)
    stream, address = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), ctypes.c_uint64(word.data_ptr())
    wait_value, number = getattr(driver, "cuStreamWaitValue32_v2", driver.cuStreamWaitValue32), word.numpy()

    def once(count: int) -> float:
        done = torch.cuda.Event()
        code = wait_value(stream, address, ctypes.c_uint32(count + 1), ctypes.c_uint(EQUAL_OR_MORE))
        assert code == 0, f"cuStreamWaitValue32 says {code}"
        done.record()
        time.sleep(1e-3)  # until the stream waits
        at = time.perf_counter()
        number[0] = count + 1
        while not done.query():
            pass
        return time.perf_counter() - at

    return once


def block_step() -> Callable[[], object]:
    """A forward and backward of little work in many kernels."""
    block, x = Block(64, 4).cuda(), torch.randn(4, 64, 64, device="cuda", requires_grad=True)

    def step() -> None:
        for parameter in block.parameters():
            parameter.grad = None
        block(x).sum().backward()

    return step


def seconds(act: Callable[[], object]) -> float:
    """From the call to the end of its kernels."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    act()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


with torch.cuda.stream(torch.cuda.Stream()):
    found = {"event": median(event), "wait": median(wait_for_word())}
    step = block_step()
    found["eager"] = median(lambda _: seconds(step))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    found["replay"] = median(lambda _: seconds(graph.replay))
print(json.dumps(found))
