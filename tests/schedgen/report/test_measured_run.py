"""stats --measured: a trace is read against its schedule, and time adds up."""

from __future__ import annotations

import json

import pytest

from schedgen.checker import checked
from schedgen.ir.instructions import Op
from schedgen.report.chrome_trace import read_trace, run_numbers

CAUSES = {
    "activation",
    "gradient",
    "weight",
    "weight_gradient",
    "send",
    "reduction",
    "offload",
    "overhead",
    "begin",
    "end",
}


@pytest.fixture
def pair(run, tmp_path):
    """A schedule of 2 stages and 1 microbatch, and a measured trace of it, in microseconds.

    Rank 0 begins 10 late, works 100 in FWD and 200 in BWD, for which it waits 70; rank 1 waits 115 for its
    FWD of 20, BWD is 30. SENDs are 5, all else 1. Rank 1 ends where its list does.
    """
    schedule = tmp_path / "schedule.json"
    assert run("compile", "gpipe", "--stages", 2, "--microbatches", 1, "-o", schedule).code == 0
    program = checked(str(schedule))
    length = {"FWD 0": 100, "BWD 0": 200, "FWD 1": 20, "BWD 1": 30, "SEND": 5}
    waits = {"BWD 0": (70, "gradient"), "FWD 1": (115, "activation"), "NORM 1": (205, "reduction")}
    events = []
    for rank, clock in ((0, 10), (1, 0)):
        for i in program.instructions(rank):
            text = str(i)
            op = json.loads(text)["op"]
            wait, cause = waits.get(f"{op} {rank}", (0, ""))
            args = {"instruction": text, "wait": wait, **({"cause": cause} if wait else {})}
            dur = length.get(f"{op} {rank}", length.get(op, 1))
            events.append({"name": op, "ph": "X", "pid": 1, "tid": rank, "ts": clock + wait, "dur": dur, "args": args})
            clock += wait + dur
    return schedule, events


def written(events, tmp_path):
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": events}))
    return file


def test_the_numbers_of_a_trace_that_was_written_by_hand(pair, run, tmp_path):
    schedule, events = pair
    result = run("stats", schedule, "--measured", written(events, tmp_path), "--json")
    numbers = json.loads(result.out)
    others = [sum(e["tid"] == rank and e["name"] not in ("FWD", "BWD", "SEND") for e in events) for rank in (0, 1)]
    ends = [10 + 300 + 70 + 5 + others[0], 115 + 50 + 205 + 5 + others[1]]
    makespan = max(ends)
    assert numbers["passes"] == 1
    assert numbers["makespan"] == pytest.approx(1e-6 * makespan)
    assert [worker["busy"] for worker in numbers["workers"]] == pytest.approx([300e-6, 50e-6])
    idle = [{key: us for key, us in worker["idle"].items() if us} for worker in numbers["workers"]]
    expected = [
        {"gradient": 70, "overhead": 5 + others[0], "begin": 10, "end": makespan - ends[0]},
        {"activation": 115, "reduction": 205, "overhead": 5 + others[1], "end": makespan - ends[1]},
    ]
    for seconds, of_rank in zip(idle, expected, strict=True):
        assert seconds == pytest.approx({key: 1e-6 * us for key, us in of_rank.items() if us})
    assert set(numbers["idle"]) == CAUSES
    total = sum(numbers["idle"].values()) + sum(worker["busy"] for worker in numbers["workers"])
    assert total == pytest.approx(2 * numbers["makespan"])
    assert numbers["seconds"]["FWD"] == pytest.approx(60e-6)
    assert numbers["seconds"]["SEND"] == pytest.approx(5e-6)
    assert numbers["profile"]["F"] == pytest.approx([100e-6, 20e-6])
    assert numbers["profile"]["B"] == pytest.approx([200e-6, 30e-6])
    assert numbers["profile"]["step"] == pytest.approx([1e-6, 1e-6])


def test_numbers_are_means_over_passes(pair, run, tmp_path):
    """A second pass twice as slow: one and a half times the time of the first."""
    schedule, events = pair
    end = max(event["ts"] + event["dur"] for event in events)
    slow = [
        {**e, "ts": 2 * e["ts"] + end, "dur": 2 * e["dur"], "args": {**e["args"], "wait": 2 * e["args"]["wait"]}}
        for e in events
    ]
    once, both = (
        json.loads(run("stats", schedule, "--measured", written(each, tmp_path), "--json").out)
        for each in (events, events + slow)
    )
    assert (once["passes"], both["passes"]) == (1, 2)
    for key in ("makespan", "latency"):
        assert both[key] == pytest.approx(1.5 * once[key])
    assert both["idle"] == pytest.approx({cause: 1.5 * seconds for cause, seconds in once["idle"].items()})
    assert both["bubble"] == pytest.approx(once["bubble"])


@pytest.mark.parametrize("scheme", ["1f1b", "fsdp", "zb-h1", "fslpp", "dualpipe-v", "chimera"])
def test_a_simulation_s_trace_gives_the_simulation_s_numbers(golden, run, tmp_path, scheme):
    schedule, profile, trace = (tmp_path / name for name in ("schedule.json", "profile.json", "trace.json"))
    schedule.write_text(golden[scheme])
    program = checked(str(schedule))
    times = dict.fromkeys(program.header.directions, 0.5)
    profile.write_text(json.dumps({**times, "alpha": 0.125, "beta": 0.25, "activation": 2, "weight": 3, "step": 2}))
    plan = json.loads(run("simulate", schedule, "--profile", profile, "--json", "--trace", trace).out)
    numbers = json.loads(run("stats", schedule, "--measured", trace, "--json").out)
    for key in ("latency", "makespan", "bubble"):
        assert numbers[key] == pytest.approx(plan[key])
    for worker, planned in zip(numbers["workers"], plan["workers"], strict=True):
        assert worker["busy"] == pytest.approx(planned["busy"])
        assert {cause: worker["idle"][cause] for cause in planned["idle"]} == pytest.approx(planned["idle"])
        steps = [i for i in program.instructions(worker["worker"]) if i.op == Op.STEP]
        assert worker["idle"]["overhead"] == pytest.approx(2 * len(steps))
        assert worker["idle"]["begin"] == 0
    for direction, seconds in times.items():
        assert numbers["profile"][direction] == pytest.approx([seconds] * len(numbers["profile"][direction]))


def test_a_plan_takes_the_jobs_that_were_measured(pair, run, tmp_path):
    """In one trace with the measured jobs; as messages take no time, ranks wait only for other ranks' work."""
    schedule, events = pair
    reality, both, profile = written(events, tmp_path), tmp_path / "both.json", tmp_path / "profile.json"
    plan = json.loads(run("simulate", schedule, "--measured", reality, "--trace", both, "--json").out)
    assert plan["latency"] == pytest.approx(350e-6)
    assert [worker["busy"] for worker in plan["workers"]] == pytest.approx([300e-6, 50e-6])
    profile.write_text(json.dumps(json.loads(run("stats", schedule, "--measured", reality, "--json").out)["profile"]))
    assert json.loads(run("simulate", schedule, "--profile", profile, "--json").out) == plan
    merged = json.loads(both.read_text())["traceEvents"]
    names = [e["args"]["name"] for e in merged if e["ph"] == "M" and e["name"] == "process_name"]
    assert names == ["simulated", "measured"]
    assert [sum(e["ph"] == "X" and e["pid"] == pid for e in merged) for pid in (0, 1)] == [len(events)] * 2
    lengths = [{e["args"]["instruction"]: e["dur"] for e in merged if e["ph"] == "X" and e["pid"] == k} for k in (0, 1)]
    for instruction, length in lengths[0].items():
        takes_time = '"mb"' in instruction or '"STEP"' in instruction
        assert length == pytest.approx(lengths[1][instruction] if takes_time else 0)
    arrows = [(e["id"], e["ph"]) for e in merged if e["ph"] in "sf"]
    assert len(set(arrows)) == len(arrows)
    again = [run("stats", schedule, "--measured", trace).out for trace in (reality, both)]
    assert again[0] == again[1]


def change(events, at, **to):
    return [*events[:at], {**events[at], **to}, *events[at + 1 :]]


def change_args(events, at, **to):
    return change(events, at, args={**events[at]["args"], **to})


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda e: [], "not a trace that"),
        (lambda e: e[:-1], "rank 1 has"),
        (lambda e: e[1:], "instruction 1 of rank 0 is"),
        (lambda e: [e[1], e[0], *e[2:]], "instruction 1 of rank 0 is"),
        (lambda e: change(e, 0, tid=2), "it has a rank 2, but the schedule has 2 workers"),
        (lambda e: change(e, 0, tid="0"), "not a trace that"),
        (lambda e: change(e, 1, ts=None), "not a trace that"),
        (lambda e: change(e, 1, dur=-1), "not a trace that"),
        (lambda e: change(e, 1, dur=float("nan")), "not a trace that"),
        (lambda e: change(e, 1, ts=10**400), "not a trace that"),
        (lambda e: change(e, 1, args=[]), "not a trace that"),
        (lambda e: change_args(e, 1, wait=3, cause="boredom"), "not a trace that"),
    ],
)
def test_a_trace_of_something_else_is_refused(pair, run, refused, tmp_path, damage, reason):
    schedule, events = pair
    sentence = refused(run("stats", schedule, "--measured", written(damage(events), tmp_path)), 1)
    assert sentence.startswith(f"schedgen: {tmp_path / 'trace.json'}: ") and reason in sentence


def test_a_stage_with_whole_backwards_only_gives_both_halves(run, tmp_path):
    """Stage 0 runs BWD where the others run BWD_I and BWD_W; every instruction takes 4 microseconds."""
    schedule = tmp_path / "schedule.json"
    assert run("compile", "zb-h1", "--stages", 3, "--microbatches", 4, "-o", schedule).code == 0
    unsplit = json.loads(schedule.read_text())
    first = [i for i in unsplit["programs"][0] if i["op"] != "BWD_I"]
    unsplit["programs"][0] = [{**i, "op": "BWD"} if i["op"] == "BWD_W" else i for i in first]
    schedule.write_text(json.dumps(unsplit))
    assert run("seal", schedule).code == 0
    program = checked(str(schedule))
    events = []
    for rank in range(3):
        for at, i in enumerate(program.instructions(rank)):
            args = {"instruction": str(i), "wait": 0}
            events.append({"name": "", "ph": "X", "pid": 0, "tid": rank, "ts": 4 * at, "dur": 4, "args": args})
    numbers = run_numbers(program, read_trace(json.dumps({"traceEvents": events}), "trace", program))
    assert numbers["profile"]["F"] == pytest.approx([4e-6] * 3)
    for half in "IW":
        assert numbers["profile"][half] == pytest.approx([2e-6, 4e-6, 4e-6])
    assert numbers["profile"]["B"] == pytest.approx([4e-6, 8e-6, 8e-6])
