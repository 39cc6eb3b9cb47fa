"""Trainings on a device whose kernels run late, where a value that is read too early is NaN.

`helpers/programs/late_device.py` is that device. In all of these trainings only NORM makes the host wait for it.
"""

from __future__ import annotations

import json

import pytest
from examples import further
from golden_cases import TRAINED, cases, ranks, schedule
from standing_launch import MAY_FAIL

# One of each way to send and to add up.
CHOSEN = {"1f1b-tensor": "direct", "fsdp-sharded": "staged"}
CASES = cases(CHOSEN)
MLP, SMALL = "mpirun.examples.mlp:tiny", "models_for_graphs:mlp_of_four"


SLICES = {"stages": 4, "tensor": 2, "graph": {"stages": 8, "replicated": [0]}, "microbatches": 2}
PASSED_ON = {"stages": 4, "groups": 2, "shards": 3, "fan_out": 1, "weight_slots": 1}
CALLED = {"delay": 0, "calls": True}
OTHERS = {  # scheme, options, model, and how its runs are disturbed
    "slices with a split backward": ("zb-v", SLICES, "models_for_tests:gpt_tensor", [{"late": "staged", "delay": 1}]),
    "shards that are passed on": (
        "fslpp", PASSED_ON, SMALL, [{"late": "staged", "delay": 2}, *further({"late": "direct"}, {"delay": 1})]
    ),
    "ties": ("1f1b", {"graph": {"stages": 4, "tied": [[0, 3]]}}, "models_for_tests:gpt_tied", [CALLED]),
}  # fmt: skip


@pytest.fixture(scope="module")
def disturb(inside, text):
    """Train by a schedule, undisturbed on the CPU, and disturbed: all runs have the same bits."""

    def disturb(count, schedule, model, requests, *more):
        steps = 3 if any("words" in request for request in requests) else 2
        arguments = [schedule, "--model", model, "--text", text, "--steps", steps, "--canonical", *more]
        words = ["--stream-words"]
        runs = [{"arguments": [*arguments, *words * ("words" in request)], **request} for request in requests]
        ended = inside(count, [{"arguments": arguments}, *runs])
        assert [run.code for run in ended] == [0] * len(ended), ended
        assert len({run.weights for run in ended}) == 1

    return disturb


@pytest.mark.parametrize(("name", "how"), CASES)
def test_late_devices_delays_and_calls_of_mpi_during_jobs_change_no_bit(disturb, compiled, name, how):
    """By events, and by words once the first step is done."""
    late = {"late": how, "delay": 1} if (name, how) == ("1f1b-tensor", "direct") else {"late": how}
    called = [CALLED] if name == "fsdp-sharded" else further(CALLED)  # slices send much, and take long
    disturb(ranks(name), schedule(name, compiled), TRAINED[name], [late, {"late": how, "words": True}, *called])


@pytest.mark.parametrize("name", OTHERS)
def test_other_schedules_that_are_disturbed_give_the_same_bits(disturb, compiled, name):
    scheme, options, model, requests = OTHERS[name]
    disturb(4, compiled(scheme, **{"workers": 4, "microbatches": 4, **options}), model, requests, "--clip", 1)


def test_a_run_on_a_late_device_is_verified_saved_traced_and_goes_on(inside, compiled, text, tmp_path):
    """With dropout, and recomputed forwards."""
    schedule = compiled("1f1b", stages=4, microbatches=2, recompute="all")
    arguments = [schedule, "--model", "models_for_tests:dropping", "--text", text, "--canonical"]
    verify = ["--verify", "--trace", tmp_path / "trace.json", "--save", tmp_path / "saved"]
    resume = ["--resume", tmp_path / "saved", "--steps", 2]
    plain, first, again = inside(
        4,
        [
            {"arguments": [*arguments, "--steps", 2]},
            {"arguments": [*arguments, "--steps", 1, *verify], "late": "direct"},
            {"arguments": [*arguments, *resume], "late": "staged"},
        ],
    )
    assert first.differences == {"losses": 0, "gradients": 0, "parameters": 0}
    assert again.code == 0 and again.weights == plain.weights
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any("STEP" in event["name"] for event in events)


def test_a_planned_place_has_one_of_the_host_s_however_many_messages_arrive_in_it(inside, compiled, text):
    """16 microbatches pass through places for four or fewer."""
    schedule = compiled("1f1b", stages=4, microbatches=16)
    arguments = [schedule, "--model", MLP, "--text", text, "--steps", 1]
    (run,) = inside(4, [{"arguments": arguments, "late": "staged", "pinned": True}])
    assert run.code == 0
    (line,) = (line for line in run.out.splitlines() if line.startswith("pinned: "))
    for pinned, planned in json.loads(line.removeprefix("pinned: ")):
        assert 0 < pinned <= 1.1 * planned, line


def test_a_late_device_is_profiled(inside, text, tmp_path):
    options = ["--model", "models_for_graphs:mlp_of_four", "--stages", 2, "--text", text, "--steps", 1]
    (run,) = inside(2, [{"arguments": ["profile", *options, "-o", tmp_path / "profile.json"], "late": "staged"}])
    profile = json.loads((tmp_path / "profile.json").read_text())
    assert run.code == 0 and profile["machine"]["levels"][0]["name"] == "host"


# Lines that are executed where the host must not wait for the device that x is on.
REFUSALS = {
    "x.detach().numpy()": "TypeError: a tensor of the device has no numpy array",
    "torch.ones(3) + x": "RuntimeError: aten.add.Tensor of tensors on the device and in the host's memory",
    "x.sum().item()": "RuntimeError: aten._local_scalar_dense.default makes the host wait for the device",
    "x.tolist()": "RuntimeError: tolist makes the host wait for the device",
    "x.cpu()": "RuntimeError: cpu makes the host wait for the device",
    "x.nonzero()": "RuntimeError: aten.nonzero.default makes the host wait for the device",
    "x.copy_(torch.ones(3))": "RuntimeError: a copy that is not of pinned memory makes the host wait for the device",
    "2 * x + torch.tensor(1.0)": "allowed",
    "x.copy_(torch.ones(3).pin_memory(), non_blocking=True)": "allowed",
}
REFUSE = """
import ctypes, sys
sys.path.append("programs")
from late_device import Late
device = Late(direct=True)
with device.working():
    x = torch.ones(3, device=device.torch)
    y = x + 1
    device.streams.strict = "a test"
    for line in sys.argv[1:]:
        try:
            exec(line)
            print("allowed")
        except (RuntimeError, TypeError) as error:
            print(f"{type(error).__name__}: {error}")
    device.streams.strict = ""
    print(ctypes.string_at(y.data_ptr(), 12) == b"\\xff" * 12, y.tolist())
"""


def test_a_late_device_refuses_what_a_gpu_cannot_do(scripts):
    (done,) = scripts(1, [[REFUSE, *REFUSALS]])
    *said, values = done.out.splitlines()
    assert len(said) == len(REFUSALS), done.err
    assert all(line.startswith(refusal) for line, refusal in zip(said, REFUSALS.values(), strict=True)), said
    assert values == "True [2.0, 2.0, 2.0]"  # y had no values before the host waited


ALONE = """
sys.path.append("programs")
from late_device import Late
from mpirun.comm.gpu_transport import QueuedTransport
from mpirun.comm.ordered_allreduce import AllreduceQueue, OrderedAllreduce
from mpirun.comm.ordered_allreduce import Section
device = Late(sys.argv[1] == "direct", rank)
with device.working():
    transport = QueuedTransport(MPI.COMM_WORLD, [[0, 1]], device=device)
    rows = torch.zeros((1, 4000), device=device.torch).view(torch.uint8)
    keys, sections = [[0], [1]], [Section(0, 16000, torch.float32)]
    summed, sums = OrderedAllreduce(transport, transport.group(0), rows, keys, sections), AllreduceQueue(transport)
    for again in range(2):
        rows.view(torch.float32).fill_(10 * again + rank)
        sums.start(summed)
        end = time.monotonic() + 30
        while not summed.done and time.monotonic() < end:
            time.sleep(1e-3)
        done = summed.done
        sums.finish()
        values = rows.view(torch.float32) + 0.5
        sys.stdout.write(f"{done} {values.unique().tolist()}\\n")
    transport.free()
"""


@pytest.mark.parametrize("how", ["direct", "staged"])
def test_a_sum_goes_on_while_the_launching_thread_does_something_else(scripts, how):
    """Both phases, and the addition between them: that thread polls nothing and does not call MPI."""
    (done,) = scripts(2, [[ALONE, how]])
    assert sorted(done.out.splitlines()) == sorted(2 * ["True [1.5]", "True [21.5]"]), done.out + done.err


# Faults in the order of transfers and kernels (helpers/programs/broken_order.py), and the path of messages with each.
BREAKS = [
    ("a place is received into while kernels read it", "staged"),
    ("a copy to the host waits for no kernel", "staged"),
    ("a kernel waits for no copy from the host", "staged"),
    *further(
        ("no marks", "direct"),
        ("no marks", "staged"),
        ("copies in another stream than their marks", "staged"),
        ("what is received is used before it has come", "direct"),
        ("a place is received into while kernels read it", "direct"),
        ("what is received is used before it has come", "staged"),
    ),
]
SUM = "a sum is used before its copies from the host"
Case = tuple[str, str | None, str | None]  # a scheme, a fault or None, the path of messages or None: on the CPU
# Gpipe receives gradients into a place whose last ones may not have been read yet; ddp sums gradients; a sliced stage
# sums activations. Unless messages are staged in host memory, all kernels of a sum have run before its messages leave.
IN_ORDER: list[Case] = [("gpipe", None, how) for how in (None, "direct", "staged")]
IN_ORDER += [(scheme, None, how) for scheme in ("ddp", "1f1b-tensor") for how in (None, "staged")]
IN_ORDER += further(("ddp", None, "direct"))
ONE_THREAD = (
    ("gpipe", "direct"),
    ("ddp", "staged"),
    *further(("gpipe", "staged"), ("ddp", "direct"), ("1f1b-tensor", "staged")),
)
BROKEN: list[Case] = [*(("gpipe", *how) for how in BREAKS), ("1f1b-tensor", SUM, "staged")]


@pytest.fixture(scope="module")
def arguments(compiled, text) -> dict[str, list[str]]:
    """By scheme, the arguments of a run on 2 ranks: of two steps where the second reads what the first has summed."""
    split = {"stages": 1, "tensor": 2, "graph": {"stages": 4, "replicated": [0]}, "microbatches": 3}
    options = ["--text", str(text), "--canonical", "--steps"]
    return {
        name: [str(compiled(scheme, workers=2, **sizes)), "--model", model, *options, str(steps)]
        for name, model, scheme, sizes, steps in (
            ("gpipe", SMALL, "gpipe", {"stages": 2, "microbatches": 4}, 1),
            ("ddp", SMALL, "ddp", {"stages": 2, "microbatches": 4}, 2),
            ("1f1b-tensor", "models_for_tests:halves_of_a_block", "1f1b", split, 1),
        )
    }


@pytest.fixture(scope="module")
def ended(in_one_launch, arguments) -> dict[Case, tuple[int, str]]:
    """By case, how its run ends: exit code, hash of weights. No other test is in the launch."""
    cases, ended = [*IN_ORDER, *BROKEN], {}
    for scheme, name, how in cases:
        run = {"arguments": arguments[scheme], "break": name, "late": how}
        ((code, _, weights),) = in_one_launch(2, [run], env=MAY_FAIL)
        ended[scheme, name, how] = code, weights
    return ended


@pytest.mark.parametrize("case", IN_ORDER)
def test_in_order_all_is_well(ended, case):
    assert ended[case] == (0, ended[case[0], None, None][1])


def test_in_order_all_is_well_where_mpi_lets_one_thread_in(in_one_launch, arguments, ended):
    runs = [{"arguments": arguments[scheme], "late": how} for scheme, how in ONE_THREAD]
    results = in_one_launch(2, runs, env={"MPI4PY_RC_THREAD_LEVEL": "serialized"})
    assert [(code, weights) for code, _, weights in results] == [ended[scheme, None, None] for scheme, _ in ONE_THREAD]


@pytest.mark.parametrize("case", BROKEN, ids=", ".join)
def test_order_that_is_broken_is_seen(ended, case):
    """Otherwise the other tests would show nothing."""
    assert ended[case] != ended[case[0], None, None]
