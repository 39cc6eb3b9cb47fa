"""Set-up: cores and threads of a rank on its host, its rows of the schedule, digests of its values."""

from __future__ import annotations

import gc
import os
import weakref

import numpy as np
import pytest
import torch
from compiled import compiled
from mpi4py import MPI
from torch import Tensor, nn

from mpirun.data.values import digest_of
from mpirun.engine.build import value_digests
from mpirun.engine.read_schedule import read_schedule, share_program
from mpirun.model.contract import Model
from schedgen.ir.file import write

CORES = sorted(os.sched_getaffinity(0))
# The cores that each rank may use, and for each whether it shares one, and how many threads it takes.
BOUND = [
    ([CORES[:2]], [(False, 2)]),
    ([CORES[:2]] * 2, [(False, 1)] * 2),
    ([CORES[:1], CORES[1:2]], [(False, 1)] * 2),
    ([CORES[:1], CORES[1:2], CORES[1:2]], [(False, 1), (True, 1), (True, 1)]),
]
SHARES = """
import os, sys, torch
from mpi4py import MPI
from mpirun.engine.options import SetupOptions
from mpirun.engine.setup import use_host
comm = MPI.COMM_WORLD
for cores in eval(sys.argv[1]):
    ranks = comm.Split(0 if comm.rank < len(cores) else MPI.UNDEFINED)
    if ranks:
        os.sched_setaffinity(0, cores[ranks.rank])
        crowded = use_host(ranks, SetupOptions(device="cpu")).crowded
        found = ranks.gather((crowded, torch.get_num_threads()))
        if found:
            print(found)
"""


@pytest.mark.skipif(len(CORES) < 2, reason="ranks are bound to two cores")
@pytest.mark.parametrize("apart", [{}, {"MPIR_CVAR_NOLOCAL": "1"}], ids=["together", "apart"])
def test_cores_are_shared_by_the_ranks_that_may_use_them(launch, apart):
    """Whether launchers bind ranks to cores or leave all cores to all, or MPICH is told that no two share a host."""
    done = launch(3, program=["-c", SHARES, str([cores for cores, _ in BOUND])], env=apart)
    assert (done.code, done.out.splitlines()) == (0, [str(shares) for _, shares in BOUND]), done.err


def test_the_rows_of_all_ranks_go_when_nobody_wants_them():
    program = compiled("1f1b", 1, 4)
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
    program, path = compiled("1f1b", 1, 4), tmp_path / "f.json"
    with path.open("wb") as file:
        write(program, file)
    schedule = read_schedule(MPI.COMM_SELF, str(path))
    lines = path.read_text().splitlines()
    assert all((a == b).all() for a, b in zip(schedule.program.rows, program.rows, strict=True))
    assert lines[schedule.first_line - 1] == f"   {program.instruction(0)},"
    assert schedule.sha256 in lines[-2]


COMPLEX = torch.complex(torch.arange(4.0), torch.arange(4.0))


@pytest.mark.parametrize(
    "tensor",
    [COMPLEX.conj(), COMPLEX.conj().imag, COMPLEX[:1].conj().imag, torch.ones(1, 4)[:, 0], torch.ones(()), COMPLEX[:0]],
)
def test_what_tells_values_apart_is_of_the_values_in_whatever_layout(tensor):
    def digests(buffer: Tensor) -> object:
        module = nn.Identity()
        module.register_buffer("buffer", buffer)
        return value_digests(Model([module], nn.functional.mse_loss), 0, module, owned=False)

    plain = torch.tensor(tensor.tolist(), dtype=tensor.dtype)
    assert digests(tensor) == digests(plain) and digest_of([tensor]) == digest_of([plain])
    assert not tensor.numel() or digests(tensor) != digests(tensor + 1)


def test_a_forward_may_resize_a_buffer_that_has_been_digested():
    buffer = torch.ones(2)
    digest_of([buffer])
    assert buffer.resize_(8).numel() == 8
