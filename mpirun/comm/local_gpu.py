"""A rank's GPU, made current before MPI starts: some MPI libraries bind themselves to the GPU that is current then.

Neither MPI nor torch can be asked yet. The launcher gives the rank's number on its host in the environment, and CUDA's
driver is called directly. Without a launcher, a driver or a GPU, nothing happens.
"""

from __future__ import annotations

import argparse
import ctypes
import os
from collections.abc import Mapping, Sequence

# Launchers' variables for a rank's number on its host. Ranks of mpiexec in a Slurm job inherit Slurm's, so it is last.
LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "SLURM_LOCALID")


def local_rank(environment: Mapping[str, str]) -> int | None:
    """This rank's number on its host; None where no launcher says it."""
    numbers = (environment.get(name, "") for name in LOCAL_RANK)
    return next((int(number) for number in numbers if number.isdecimal()), None)


def use_local_gpu(arguments: Sequence[str] = ()) -> None:
    """Make the rank's GPU current; do nothing for a command's `--device cpu`, for `graph` and for `--help`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device", nargs="?")
    number = local_rank(os.environ)
    without = [*arguments[:1]] in (["graph"], ["-h"], ["--help"])
    if number is None or without or parser.parse_known_args(arguments)[0].device == "cpu":
        return
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return
    if driver.cuDeviceGet(ctypes.byref(device), number % count.value):
        return
    # The primary context is the one that torch takes.
    if not driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        driver.cuCtxSetCurrent(context)
