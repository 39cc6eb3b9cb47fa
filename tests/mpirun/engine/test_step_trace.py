"""A trace has every instruction of every rank, in the order of the list, on one clock."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from schedgen.checker import checked
from schedgen.report.chrome_trace import read_trace, run_numbers

MLP = "mpirun.examples.mlp:tiny"
RUNS = {"1f1b": (3, 2), "fsdp": (2, 1), "zb-h1": (1, 5)}  # steps, and of these traced
PASSES = {"1f1b": 2, "fsdp": 1, "zb-h1": 1}
CAUSES = {  # what ranks of a scheme can wait for
    "1f1b": {"activation", "gradient", "send", "reduction"},
    "fsdp": {"weight", "weight_gradient", "send", "reduction"},
    "zb-h1": {"activation", "gradient", "send", "reduction"},
}
Event = dict[str, Any]


@pytest.fixture(scope="module")
def traced(several, traces, text, tmp_path_factory) -> dict[str, list[Event]]:
    """The events of a traced run of each schedule."""
    folder = tmp_path_factory.mktemp("traced")
    runs = [
        [
            *(traces / f"{name}.json", "--model", MLP, "--text", text, "--steps", steps),
            *("--trace", folder / name, "--trace-steps", last, "--verify"),
        ]
        for name, (steps, last) in RUNS.items()
    ]
    for code, out in several(4, runs):
        assert code == 0, out
    assert sorted(path.name for path in folder.iterdir()) == sorted(RUNS)  # nothing beside them
    return {name: json.loads((folder / name).read_text())["traceEvents"] for name in RUNS}


def slices(events: list[Event], rank: int) -> list[Event]:
    return [event for event in events if event["ph"] == "X" and event["tid"] == rank]


def lists(file: Path) -> list[list[str]]:
    """The instructions of every rank, as the file has them."""
    return [[json.dumps(i) for i in program] for program in json.loads(file.read_text())["programs"]]


@pytest.mark.parametrize("name", RUNS)
def test_every_rank_s_list_is_there_once_a_pass_in_order_and_with_its_lines_in_the_file(traced, traces, name):
    for rank, listed in enumerate(lists(traces / f"{name}.json")):
        rank_slices = slices(traced[name], rank)
        assert [event["args"]["instruction"] for event in rank_slices] == PASSES[name] * listed
        assert [event["args"]["pass"] for event in rank_slices] == [k for k in range(PASSES[name]) for _ in listed]
    lines = (traces / f"{name}.json").read_text().splitlines()
    for event in traced[name]:
        if event["ph"] == "X":
            assert lines[event["args"]["line"] - 1].strip().rstrip(",") == event["args"]["instruction"]


@pytest.mark.parametrize("name", RUNS)
def test_a_rank_does_one_thing_after_the_other_and_waits_in_between(traced, name):
    starts = [slices(traced[name], rank)[0] for rank in range(4)]
    assert min(event["ts"] - event["args"]["wait"] for event in starts) == 0  # the step's start
    for rank in range(4):
        rank_slices = slices(traced[name], rank)
        assert all(event["dur"] >= 0 and event["args"]["wait"] >= 0 for event in rank_slices)
        for before, after in pairwise(rank_slices):
            assert after["ts"] - after["args"]["wait"] >= before["ts"] + before["dur"] - 1e-3  # nanoseconds are written


@pytest.mark.parametrize("name", RUNS)
def test_who_waits_has_a_cause(traced, name):
    events = [event for event in traced[name] if event["ph"] == "X"]
    assert all((event["args"]["wait"] > 0) == ("cause" in event["args"]) for event in events)
    causes = {event["args"]["cause"] for event in events if event["args"]["wait"]}
    assert causes and causes <= CAUSES[name]
    for event in events:
        if event["name"].startswith("ADD") and event["args"]["wait"]:
            assert event["args"]["cause"] == "weight_gradient"


@pytest.mark.parametrize("name", RUNS)
def test_a_message_is_sent_before_its_receiver_is_done_with_it(traced, name):
    """Every SEND has an arrow into the first instruction to use its message; this needs clocks that agree."""
    sends = {(e["tid"], e["ts"]) for e in traced[name] if e["ph"] == "X" and e["name"].startswith("SEND")}
    begins = {event["id"]: event for event in traced[name] if event["ph"] == "s"}
    ends = {event["id"]: event for event in traced[name] if event["ph"] == "f"}
    assert {(event["tid"], event["ts"]) for event in begins.values()} == sends
    assert len(begins) == len(ends) == len(sends) > 0
    for number, begin in begins.items():
        end = ends[number]
        assert begin["ts"] <= end["ts"]
        assert any(user["ts"] <= end["ts"] <= user["ts"] + user["dur"] for user in slices(traced[name], end["tid"]))


@pytest.mark.parametrize("name", RUNS)
def test_schedgen_reads_it_and_all_time_is_accounted_for(traced, traces, tmp_path, name):
    program = checked(str(traces / f"{name}.json"))
    numbers = run_numbers(program, read_trace(json.dumps({"traceEvents": traced[name]}), name, program))
    assert numbers["passes"] == PASSES[name]
    for worker in numbers["workers"]:
        assert worker["busy"] > 0 and min(worker["idle"].values()) >= 0
        assert worker["busy"] + sum(worker["idle"].values()) == pytest.approx(numbers["makespan"])


def test_clocks_of_ranks_are_compared(execute):
    """Ranks of one host share a clock; some are set ahead here."""
    script = """
from mpirun.comm.transport import Transport
from mpirun.engine.step_trace import clock_ahead
transport, ahead = Transport(MPI.COMM_WORLD, []), [0.0, 5.0, -3600.0, 0.5][rank]
assert clock_ahead(transport) == 0
assert abs(clock_ahead(transport, lambda: time.perf_counter() + ahead) + ahead) < 0.01
"""
    execute(4, script)


def test_a_profiler_of_torch_shows_the_instructions(execute):
    script = """
from schedgen.ir.instructions import Op
from torch.profiler import ProfilerActivity, profile
with engine(2, "1f1b") as run:
    run.step((x, x))
    with profile(activities=[ProfilerActivity.CPU]) as shown:
        run.step((x, x))
    counts = {event.key: event.count for event in shown.key_averages()}
    ranges = {name: count for name, count in counts.items() if name.split()[0] in Op.__members__}
    assert sum(ranges.values()) == len(run.session.instructions), ranges
    print(*sorted(name for name in ranges if re.match("FWD|SEND|NORM|STEP", name)), sep=", ")
    run.step((x, x))
"""
    first = "FWD 0.0, FWD 0.1, NORM, SEND x.0.0, SEND x.0.1, STEP 0"
    last = "FWD 1.0, FWD 1.1, NORM, SEND g.0.0, SEND g.0.1, STEP 1"
    assert sorted(execute(2, script).out.splitlines()) == [first, last]
