"""What rank 0 keeps of a schedule: its own rows."""

import gc
import weakref

import numpy as np
from mpi4py import MPI

from mpirun.engine.read_schedule import read_schedule, share_program
from schedgen.compiler.compile import compile
from schedgen.ir.file import write
from schedgen.schemes import load
from schedgen.schemes.scheme import Sizes

SIZES = Sizes(1, 4)


def test_the_rows_of_all_ranks_go_when_nobody_wants_them():
    program = compile(load("1f1b", SIZES), SIZES)
    rows = [column.copy() for column in program.rows]
    schedule = share_program(MPI.COMM_SELF, program)
    assert not any(np.shares_memory(*pair) for pair in zip(schedule.program.rows, program.rows, strict=True))
    whole = weakref.ref(program)
    schedule = schedule._replace(all_ranks=None)
    del program
    gc.collect()
    assert whole() is None
    assert all((a == b).all() for a, b in zip(schedule.program.rows, rows, strict=True))


def test_a_read_schedule_is_the_files(tmp_path):
    program, path = compile(load("1f1b", SIZES), SIZES), tmp_path / "f.json"
    with path.open("wb") as file:
        write(program, file)
    schedule = read_schedule(MPI.COMM_SELF, str(path))
    lines = path.read_text().splitlines()
    assert all((a == b).all() for a, b in zip(schedule.program.rows, program.rows, strict=True))
    assert lines[schedule.first_line - 1] == f"   {program.instruction(0)},"
    assert schedule.sha256 in lines[-2]
