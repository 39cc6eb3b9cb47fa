"""What a run on GPUs decides about messages before its first step, as far as that can be tested without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mpi4py import MPI

from mpirun.comm.device import Cuda, Device, mpi_libraries
from mpirun.comm.gpu_transport import Mirror, QueuedTransport


def test_the_library_that_is_asked_is_the_one_that_is_loaded():
    assert MPI.Is_initialized()
    (library,) = mpi_libraries(Path("/proc/self/maps").read_text())
    assert Path(library).is_file()


TRIAL = """
from unittest import mock
from mpirun.comm import message
comm, cpu = MPI.COMM_WORLD, torch.device("cpu")
works = message.messages_arrive(comm, cpu)
real = message.mpi_buffer
lost = torch.zeros(2**22, dtype=torch.uint8)
buffer = lambda x: real(x) if x.any() or comm.rank == 1 else real(lost[: len(x)])  # what arrives lies elsewhere
with mock.patch.object(message, "mpi_buffer", buffer):
    fails = message.messages_arrive(comm, cpu)
print(comm.rank, works, fails)
"""


def test_the_trial_sees_what_does_not_arrive(scripts):
    """A message is lost on one rank of four; all of them learn of it."""
    (done,) = scripts(4, [[TRIAL]])
    assert done.out.splitlines() == [f"{rank} True False" for rank in range(4)], done.err


DYING = """
import os, signal, sys
from unittest import mock
from mpi4py import MPI
from mpirun.comm.device import Device
from mpirun.cli.main import main
class Dying(Device):
    def try_messages(self, comm):
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        comm.Barrier()
with mock.patch("mpirun.engine.setup.choose_device", lambda *_: Dying()):
    sys.exit(main(sys.argv[1:]))
"""


def test_a_death_in_the_trial_names_the_way_out(launch, compiled, text):
    schedule = compiled("1f1b", stages=2, microbatches=2)
    done = launch(2, schedule, "--model", "mpirun.examples.mlp:tiny", "--text", text, program=["-c", DYING])
    assert done.code != 0
    assert "trying messages between GPUs" in done.err
    assert "MPI died on GPU memory: take gpu messages host" in done.err


class Staged(Device):
    """A device that MPI cannot read, which counts the host memory that is asked for."""

    kind, direct, asked = "staged", False, 0

    def host(self, size: int) -> torch.Tensor:
        self.asked += size
        return super().host(size)


def test_what_arrives_in_one_place_goes_through_one_place_of_the_host():
    """64 messages into 3 places, a tenth of their block, need no more host memory than these places."""
    device = Staged()
    transport = QueuedTransport(MPI.COMM_SELF, (), device=device)
    block = torch.zeros(10_000, dtype=torch.uint8)
    places = [block[begin : begin + 300].view(torch.float32) for begin in (400, 700, 1000)]
    receives = [transport.receive(places[k % 3], 0, 1) for k in range(64)]
    for k, receive in enumerate(receives):
        receive.start()
        sent = transport.send(torch.full((75,), float(k)), 0, 1)
        transport.wait(receive.done)
        transport.wait(sent)
        assert (places[k % 3] == k).all()
    assert device.asked == 900 + 64 * 300  # every send has its own
    transport.free()


def test_numbers_of_several_widths_lie_in_the_host_s_memory_as_in_the_block():
    mirror, block = Mirror(Staged()), torch.zeros(64, dtype=torch.uint8)
    narrow, wide = block[20:24].view(torch.float32), block[24:40].view(torch.float64)
    mirror.cover(narrow)
    mirror.cover(wide)
    assert mirror.of(narrow).shape == narrow.shape and mirror.of(wide).shape == wide.shape
    assert mirror.of(wide).data_ptr() - mirror.of(narrow).data_ptr() == 4


@pytest.fixture
def gpu(monkeypatch):
    """A `Cuda` as its constructor makes it, of a GPU that has only a generator and a name."""
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    gpu = object.__new__(Cuda)
    gpu.torch, gpu.direct, gpu.shared = torch.device("cuda", 0), True, ""
    return gpu


def test_the_seed_of_a_gpu_is_that_of_the_host_too(gpu):
    drawn = []
    for _ in range(2):
        gpu.seed(7)
        drawn.append((float(torch.rand(1)), torch.cuda.default_generators[0].initial_seed()))
    assert drawn[0] == drawn[1] and drawn[0][1] == 7
