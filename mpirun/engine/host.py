"""What a rank uses of its host: a device, and a share of the cores for torch's threads."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

import torch
from mpi4py import MPI

from mpirun.comm.device import Device, choose_device, ranks_on_host
from mpirun.comm.fail_together import together
from mpirun.comm.waiting import sleeping_barrier


@dataclass(frozen=True, kw_only=True)
class Host:
    """What a rank uses of its host."""

    device: Device
    crowded: bool  # there are more ranks on this host than cores


def use_host(comm: MPI.Intracomm, device: str, threads: int | None, gpu_messages: str, stream_words: bool) -> Host:
    """Choose this rank's device, by name, and torch's threads; None: the rank's share of the cores. Collective.

    `gpu_messages`: auto, direct or host; `stream_words`: words in pinned memory replace events.
    """
    sleeping_barrier(comm)  # some ranks may still be importing
    own = os.sched_getaffinity(0)  # launchers may bind a rank to some of the host's cores
    of_ranks = comm.allgather(own)
    ranks = Counter(core for rank in ranks_on_host(comm) for core in of_ranks[rank])
    cores = sum(Fraction(1, ranks[core]) for core in own)
    torch.set_num_threads(threads or max(1, int(cores)))
    chosen = together(comm, lambda: choose_device(comm, device, gpu_messages, stream_words))
    return Host(device=chosen, crowded=cores < 1)
