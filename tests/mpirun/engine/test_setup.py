"""The cores and threads that a rank has on its host."""

from __future__ import annotations

import os

import pytest

CORES = sorted(os.sched_getaffinity(0))
# The cores that each rank may use, and for each whether it shares one, and how many threads it takes.
BOUND = [
    ([CORES[:2]], [(False, 2)]),
    ([CORES[:2]] * 2, [(False, 1)] * 2),
    ([CORES[:1], CORES[1:2]], [(False, 1)] * 2),
    ([CORES[:1], CORES[1:2], CORES[1:2]], [(False, 1), (True, 1), (True, 1)]),
]
SHARES = """
import os, sys
import torch
from mpi4py import MPI
from mpirun.engine.setup import use_host
comm = MPI.COMM_WORLD
for cores in eval(sys.argv[1]):
    ranks = comm.Split(0 if comm.rank < len(cores) else MPI.UNDEFINED)
    if ranks:
        os.sched_setaffinity(0, cores[ranks.rank])
        crowded = use_host(ranks, "cpu", 0, "auto", False).crowded
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


GROWTH = """
import sys, dataclasses, mpirun, numpy, schedgen, torch
from mpi4py import MPI
from mpirun.engine.build import build_interpreter
class Counted(numpy.ndarray):
    read = 0
    def __iter__(self):
        Counted.read += self.size
        return super().__iter__()
def work(microbatches):
    sizes, calls, x = schedgen.Sizes(2, microbatches, 1), 0, torch.zeros(microbatches, 2)
    program = schedgen.compile(schedgen.load("gpipe", sizes), sizes)
    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")
    layers = [torch.nn.Linear(2, 2) for _ in range(2)]
    with mpirun.Engine(program, layers, loss=torch.nn.functional.mse_loss, canonical=True, timeout=0) as run:
        run.step((x, x))
        header = dataclasses.replace(program.header, compute=program.header.compute.view(Counted))
        program = schedgen.Program(header, program.rows)
        Counted.read, instructions = 0, program.instructions(0)
        sys.setprofile(count)
        try:
            made = build_interpreter(MPI.COMM_SELF, program, instructions, run.session.setup)
        finally:
            sys.setprofile(None)
        made.transport.free()
    return calls + Counted.read
work(8)  # imports, and fills caches
few, more, most = map(work, (64, 128, 256))
print(more - few, most - more)
"""


def test_setting_up_grows_as_the_list_does(scripts):
    """Counted are calls, and elements that loops read of the arrays of jobs."""
    (done,) = scripts(1, [[GROWTH]])
    assert done.code == 0, done.err
    first, then = map(int, done.out.split())
    assert 0 < then < 2.1 * first
