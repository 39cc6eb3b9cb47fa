"""The schedule file: rank 0 reads and proves it, every rank gets its part."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from mpi4py import MPI

from mpirun.comm.fail_together import on_rank_0
from schedgen.checker import check
from schedgen.ir.file import line_of, read, stored_hash
from schedgen.ir.header import Header
from schedgen.ir.program import Program
from schedgen.util.errors import RefusedFile, UsageError


class Schedule(NamedTuple):
    program: Program  # this rank's rows
    first_line: int  # of its first instruction in the file
    sha256: str  # that the file ends with
    whole: Program | None  # on rank 0


def schedule(comm: MPI.Intracomm, name: str) -> Schedule:
    """Collective. The file need not be on every host."""
    found = on_rank_0(comm, lambda: _checked(comm, name))
    program, sha256 = found or (None, "")
    header: Header = comm.bcast(None if program is None else program.header)
    parts = None
    if program is not None:
        ends = program.bounds.tolist()
        parts = [
            (program.rows.take(slice(a, b)), line_of(program, a, rank), sha256)
            for rank, (a, b) in enumerate(pairwise(ends))
        ]
    rows, line, sha256 = comm.scatter(parts)
    return Schedule(Program(header, rows), line, sha256, program)


def _checked(comm: MPI.Comm, name: str) -> tuple[Program, str]:
    try:
        with Path(name).open("rb") as source:
            program, fault = read(source, name)
            sha256 = stored_hash(source)
    except OSError as error:
        raise RefusedFile(f"{name}: {error.strerror}") from None
    workers = program.header.workers
    if workers != comm.size:
        alone = comm.size == 1
        hint = " (start it by mpiexec; if that was done, it belongs to another MPI than mpi4py does)" if alone else ""
        raise UsageError(f"{name} is for {workers} ranks, mpiexec -n {workers}, but this run has {comm.size}{hint}")
    check(program, name)
    if fault:
        raise RefusedFile(fault)
    return program, sha256
