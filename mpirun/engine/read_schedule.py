"""The schedule: rank 0 reads and checks it, and refuses a wrong number of ranks; each rank gets its list.

Rank 0 never holds the text. It reads the file block by block into columns of 22 bytes per instruction. Checking them
takes about three times that memory. Afterwards rank 0 keeps only its own rows, unless `all_ranks` is kept.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpirun.comm.fail_together import on_rank_0
from schedgen.checker import check
from schedgen.ir.file import line_of, read, stored_hash
from schedgen.ir.header import Header
from schedgen.ir.program import Program
from schedgen.util.errors import RefusedFile, UsageError


class Schedule(NamedTuple):
    """What a rank keeps of a schedule file."""

    program: Program  # the rows of this rank
    first_line: int  # the line in the file of its first instruction
    sha256: str  # the hash that the file ends with
    all_ranks: Program | None  # the rows of all ranks, on rank 0; None elsewhere


def read_schedule(comm: MPI.Intracomm, name: str) -> Schedule:
    """A rank's part of a file that only rank 0 must see. Collective; Stop if refused, or for another count of ranks."""
    program, sha256 = on_rank_0(comm, lambda: _read_checked(comm, name)) or (None, "")
    return share_program(comm, program, sha256)


def share_program(comm: MPI.Intracomm, program: Program | None, sha256: str = "") -> Schedule:
    """This rank's part of a program that rank 0 has and sends, one rank after the other. Collective."""
    header: Header = comm.bcast(None if program is None else program.header)
    if program is None:
        rows, line, sha256 = comm.recv(source=0)
    else:  # the last part is rank 0's own
        first = line_of(program, 0, 0)  # in the file two more lines separate the lists of two ranks
        for rank, (a, b) in reversed(list(enumerate(pairwise(program.bounds.tolist())))):
            rows, line = program.rows.take(np.arange(a, b)), first + 2 * rank + a  # a copy: the other rows can be freed
            if rank:
                comm.send((rows, line, sha256), rank)
    return Schedule(Program(header, rows), line, sha256, program)


def _read_checked(comm: MPI.Comm, name: str) -> tuple[Program, str]:
    try:
        with Path(name).open("rb") as source:
            program, fault = read(source, name)
            sha256 = stored_hash(source)
    except OSError as error:
        raise RefusedFile(f"{name}: {error.strerror}") from None
    check_for_run(program, name, comm.size)
    if fault:
        raise RefusedFile(fault)
    return program, sha256


def check_for_run(program: Program, name: str, ranks: int) -> None:
    """UsageError or RefusedFile unless `ranks` ranks can train with a program; `name`: what the error calls it."""
    workers = program.header.workers
    if workers != ranks:
        alone = ranks == 1
        hint = " (start it by mpiexec; if you did, mpiexec belongs to another MPI than mpi4py)" if alone else ""
        raise UsageError(f"{name} is for {workers} ranks, mpiexec -n {workers}, but this run has {ranks}{hint}")
    if program.header.is_forward:
        raise UsageError(f"{name} has forwards alone: nothing can be trained by it")
    check(Program(program.header, program.rows), name)  # a second object, so that what it caches is freed with it
