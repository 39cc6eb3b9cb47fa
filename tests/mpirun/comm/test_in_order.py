"""Lists whose messages MPI delivers as a transport in order would, one at a time in each communicator."""

from __future__ import annotations

import pytest
from examples import further
from golden_cases import MODEL, SIZES

SCHEMES = {
    "1f1b": {"stages": 4}, "zb-v": {"stages": 8}, "interleaved-1f1b": {"stages": 8, "workers": 4},
    "fsdp": {"stages": 4, "workers": 4}, "hanayo": {"stages": 8, "workers": 4},
}  # fmt: skip
PROGRAM = ["-m", "mpi4py", "programs/in_order_ranks.py"]
TRAINING = ["-m", "mpi4py", "programs/in_order_training.py"]


@pytest.mark.parametrize("transport", ["in-order:one", "in-order:pair"])
def test_lists_compiled_for_a_transport_end_there(launch, compiled, transport):
    lists = [compiled(name, microbatches=8, transport=transport, **sizes) for name, sizes in SCHEMES.items()]
    result = launch(4, transport, 100, *lists, program=PROGRAM)
    assert (result.code, result.out.splitlines()) == (0, [f"{path}: 0 swapped" for path in lists]), result


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_list_that_is_said_to_hang_hangs(launch, compiled, name):
    result = launch(4, "in-order:pair", 3, compiled(name, microbatches=8, **SCHEMES[name]), program=PROGRAM)
    assert result.code and " waits at {" in result.out, result


def test_messages_that_are_said_to_swap_are_swapped(launch, compiled):
    path = compiled("fsdp", microbatches=8, **SCHEMES["fsdp"])
    assert launch(4, "in-order:edge", 100, path, program=PROGRAM).out.splitlines() == [f"{path}: 2 swapped"]


@pytest.mark.parametrize("name", ["1f1b", *further(*sorted(SIZES.keys() - {"1f1b", "1f1b-tensor"}))])
def test_a_list_compiled_for_a_transport_trains_there_with_the_bits_of_one_process(launch, compiled, text, name):
    scheme, workers = name.removesuffix("-tied").removesuffix("-sharded"), 2 if name == "zb-v" else 4
    path = compiled(scheme, workers=workers, microbatches=8, **SIZES[name], transport="in-order:pair")
    arguments = ["--model", MODEL[name], "--text", text, "--steps", 1, "--canonical", "--verify"]
    result = launch(workers, "in-order:pair", path, *arguments, program=TRAINING)
    assert result.code == 0 and "verify: passed" in result.out, result


def test_a_run_of_a_list_that_is_said_to_hang_hangs_and_is_ended(launch, compiled, text):
    path = compiled("1f1b", microbatches=8, stages=4)
    arguments = ["--model", MODEL["1f1b"], "--text", text, "--steps", 1, "--timeout", 5]
    result = launch(4, "in-order:pair", path, *arguments, program=TRAINING)
    assert result.code and "waits" in result.err, result
