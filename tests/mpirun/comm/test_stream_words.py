"""--stream-words: messages and kernels ordered by words that streams write and wait for, and not by events.

Trainings run on the late device, whose streams have both operations: here with faults, else in test_late_device.py.
The binding to CUDA's driver is tested with a stand-in library that has the driver's names.
"""

from __future__ import annotations

import shutil
import subprocess
from unittest import mock

import pytest
import torch
from examples import further

from mpirun.comm.stream_words import CudaStreamOperations, StreamWords, Word
from schedgen.util.errors import UsageError

# Faults in the order of words (helpers/programs/broken_order.py), and the path of messages with each.
BREAKS = [
    ("no stream waits for a word", "direct"),
    ("a word is written before the copy that it is of", "staged"),
    ("a promise is kept before its message has come", "direct"),
    *further(("no stream waits for a word", "staged")),
    *further(("a mark's word is written at once", "direct"), ("a mark's word is written at once", "staged")),
]


@pytest.fixture(scope="module")
def ended(in_one_launch, compiled, text):
    """By case, how two steps end, the second by words: exit code, hash of weights. No other test is in the launch."""
    schedule = compiled("gpipe", stages=2, microbatches=4)
    arguments = [str(schedule), "--model", "models_for_graphs:mlp_of_four", "--text", str(text), "--steps", "2"]
    arguments += ["--canonical", "--stream-words"]
    cases = [(None, "direct"), (None, "staged"), *BREAKS]
    runs = [{"arguments": arguments, "break": name, "late": how} for name, how in cases]
    results = in_one_launch(2, runs, env={"ORDER": "of words"})
    return {case: (code, weights) for case, (code, _, weights) in zip(cases, results, strict=True)}


@pytest.mark.parametrize("case", BREAKS, ids=", ".join)
def test_words_whose_order_is_broken_are_seen(ended, case):
    assert ended[None, "direct"] == ended[None, "staged"] and ended[None, "direct"][0] == 0
    assert ended[case] != ended[None, "direct"]


FAILING = """
import sys
sys.path.append("programs")
import torch
from late_device import Late
from mpi4py import MPI
from mpirun.comm.gpu_transport import QueuedTransport
device = Late(True, 0, words=True)
with device.working():
    transport = QueuedTransport(MPI.COMM_WORLD, [], device=device)
    device.use_words(ready=True)
    message = torch.zeros(8, device=device.torch)
    receive = transport.receive(message, 77, 0)  # there is no such rank
    receive.start()
    assert receive.done()
    (message + 1).tolist()
"""


def test_a_receive_that_fails_ends_the_rank_though_its_stream_waits_for_it(launch):
    """The main thread waits for the stream, which waits for the word of the message: nobody polls."""
    done = launch(1, program=["-c", FAILING])
    assert done.code == 1 and "invalid rank" in done.err.lower(), done.err


DRIVERS = """
import functools
from unittest import mock
from mpirun.comm import device
from mpirun.comm.fail_together import Stop, together
comm = MPI.COMM_WORLD
driver = functools.partial(device.CudaStreamOperations, "libc.so.6") if comm.rank == 1 else mock.Mock()
with mock.patch.object(device, "torch") as torch, mock.patch.object(device, "CudaStreamOperations", driver):
    torch.cuda.device_count.return_value = 1
    try:
        together(comm, lambda: device.Cuda(comm, "host", True))
    except Stop as stop:
        print(comm.rank, stop.speaker, str(stop).partition(":")[0])
"""


def test_a_driver_without_words_on_one_host_ends_all_ranks(scripts):
    (done,) = scripts(2, [[DRIVERS]])
    assert done.out.splitlines() == [f"{rank} 1 stream words" for rank in (0, 1)], done.err


FAKE = """
#include <stdint.h>
int cuStreamWriteValue32_v2(void *stream, uint64_t address, uint32_t number, unsigned flags) {
    if (stream != (void *)7 || flags) return 1;
    *(volatile uint32_t *)address = number;
    return 0;
}
int cuCtxGetDevice(int *device) { *device = 3; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 1; return attribute != 98 || device != 3; }
int cuStreamWaitValue32(void *stream, uint64_t address, uint32_t number, unsigned flags) {
    if (stream != (void *)7 || flags != 1u << 30) return 1;  // flushed
    return (int32_t)(*(volatile uint32_t *)address - number) >= 0 ? 0 : 801;
}
"""


@pytest.fixture
def driver(tmp_path):
    """The operations of stream 7 in a stand-in library, whose streams write at once and cannot wait."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("there is no C compiler")
    (tmp_path / "fake.c").write_text(FAKE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "fake.so", tmp_path / "fake.c"], check=True)
    with mock.patch.object(CudaStreamOperations, "current", lambda self: 7):
        yield CudaStreamOperations(str(tmp_path / "fake.so"))


def host(size):
    return torch.full((size,), 255, dtype=torch.uint8)


def test_the_driver_gets_addresses_and_numbers(driver):
    words = StreamWords(host, driver)
    first, second = words.mark(), words.mark()
    assert first.reached() and second.reached() and first.word is second.word
    second.arrive()
    promise = words.word().next()
    assert not promise.reached()
    with pytest.raises(RuntimeError, match="cuStreamWaitValue32 returns error 801"):
        promise.arrive()
    promise.keep()
    promise.arrive()
    assert promise.reached()


def test_numbers_begin_again_behind_the_last(driver):
    word: Word = StreamWords(host, driver).word()
    word.last = 2**32 - 2
    numbers = [word.next() for _ in range(3)]
    numbers[0].keep()
    assert [number.number for number in numbers] == [2**32 - 1, 0, 1]
    assert [number.reached() for number in numbers] == [True, False, False]
    numbers[2].keep_in_stream()
    assert all(number.reached() for number in numbers)
    numbers[1].arrive()


def test_every_word_has_memory_of_its_own(driver):
    words = StreamWords(host, driver)
    addresses = [words.word().address for _ in range(3000)]
    assert len(set(addresses)) == 3000 and all(address % 4 == 0 for address in addresses)


def test_a_driver_without_words_is_refused():
    with pytest.raises(UsageError, match="stream words: CUDA's driver lacks stream memory operations"):
        CudaStreamOperations("libc.so.6")
