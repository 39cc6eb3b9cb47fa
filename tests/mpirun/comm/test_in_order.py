"""Lists whose messages MPI delivers as a transport in order would, one at a time in each communicator."""

from __future__ import annotations

import pytest

SCHEMES = {
    "1f1b": {"stages": 4}, "zb-v": {"stages": 8}, "interleaved-1f1b": {"stages": 8, "workers": 4},
    "fsdp": {"stages": 4, "workers": 4}, "hanayo": {"stages": 8, "workers": 4},
}  # fmt: skip
PROGRAM = ["-m", "mpi4py", "programs/in_order_ranks.py"]


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
