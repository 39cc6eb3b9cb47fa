"""Lists on MPI that delivers as a transport in order would, one message at a time in each communicator."""

from __future__ import annotations

import pytest
from examples import further
from standing_launch import MAY_FAIL

SCHEMES = {
    "1f1b": {"stages": 4}, "zb-v": {"stages": 8}, "interleaved-1f1b": {"stages": 8, "workers": 4},
    "fsdp": {"stages": 4, "workers": 4}, "hanayo": {"stages": 8, "workers": 4},
}  # fmt: skip
SCHEMES |= further(*((name, {"stages": 4, "workers": 4}) for name in ("chimera", "ddp", "gpipe", "pipedream")))
SCHEMES |= further(*((name, {"stages": 4, "workers": 4, "groups": 2}) for name in ("fslpp", "lpp")))


@pytest.fixture(scope="module")
def trained(in_one_launch, compiled, text):
    """Trains by schemes on such a transport, one step, verified; the exit code and stdout of each."""

    def trained(transport, names, *, known, timeout=60):
        """`known`: the lists are compiled for it."""
        made = {"transport": transport} if known else {}
        lists = [compiled(name, microbatches=8, **SCHEMES[name], **made) for name in names]
        more = ["--model", "mpirun.examples.mlp:tiny", "--text", text, "--steps", 1, "--canonical", "--verify"]
        more += ["--timeout", timeout]
        runs = [{"arguments": list(map(str, [file, *more])), "transport": transport} for file in lists]
        return [(code, out) for code, out, _ in in_one_launch(4, runs, env={} if known else MAY_FAIL)]

    return trained


@pytest.mark.parametrize("transport", ["in-order:one", "in-order:pair"])
def test_lists_compiled_for_a_transport_train_there_with_the_bits_of_one_process(trained, transport):
    for code, out in trained(transport, SCHEMES, known=True):
        assert code == 0 and "verify: passed: every bit" in out, out


@pytest.mark.parametrize("name", ["1f1b", *further("zb-v")])
def test_a_list_that_is_said_to_hang_hangs_and_is_ended(trained, name):
    with pytest.raises(
        RuntimeError, match=r"(?s)the launch ended: .*nothing has moved for 1 s: every rank waits for others"
    ):
        trained("in-order:pair", [name], known=False, timeout=1)


def test_messages_that_are_said_to_swap_are_swapped(trained):
    """A larger one arrives where a smaller one is expected."""
    with pytest.raises(RuntimeError, match=r"(?s)the launch ended: .*[Mm]essage truncated"):
        trained("in-order:edge", ["fsdp"], known=False)
