"""mpirun on a disk that is full when the third checkpoint is written."""

from __future__ import annotations

import resource
import signal
import sys

from mpi4py import MPI

from mpirun.checkpoint import disk_format
from mpirun.cli.main import main

write_file = disk_format.write_file


def when_full(directory, step, kind, rank, entries):
    """As `write_file`, with a limit on the size of files in step 3."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if step == 3 else soft, hard))
    try:
        return write_file(directory, step, kind, rank, entries)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
if MPI.COMM_WORLD.rank == 0:
    disk_format.write_file = when_full
sys.exit(main())
