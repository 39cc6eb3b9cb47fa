"""What is logged of each step, and what takes it: a script's function, or a directory of TensorBoard's events."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from os import PathLike
from pathlib import Path

import torch

from mpirun.comm.device import Device
from mpirun.training.session import Result
from schedgen.util.errors import UsageError

Log = Callable[[int, Mapping[str, float]], None]  # takes the number of steps done, and a step's numbers by name


def step_numbers(result: Result, device: Device) -> dict[str, float]:
    """What is logged of a step."""
    seconds = result.seconds
    numbers = {"loss": result.loss, "grad_norm": result.grad_norm, "lr": result.lr, "seconds": seconds}
    numbers |= {"samples_per_second": result.samples / seconds, "tokens_per_second": result.tokens / seconds}
    if device.kind == "cuda":
        numbers["peak_bytes"] = torch.cuda.max_memory_allocated(device.torch)
    else:
        numbers["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {**numbers, **result.metrics}


def make_log(log: Log | str | PathLike[str] | None, ending: ExitStack) -> Log | None:
    """The function that takes each step's numbers; a directory gets TensorBoard's events. `ending` closes it.

    UsageError if there can be no such directory, or TensorBoard's package is missing.
    """
    if log is None or callable(log):
        return log
    place = str(log) if "://" in str(log) else str(Path(log).absolute())  # the script may change its folder
    try:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(place)
    except ImportError:
        raise UsageError(f"log={log!r} needs the package tensorboard") from None
    except OSError as error:
        raise UsageError(f"log={log!r}: {error.strerror}") from None
    ending.callback(writer.close)

    def write(step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return write
