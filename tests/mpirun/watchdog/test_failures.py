"""Whatever goes wrong on a rank ends the whole job, at once and with one message that says where."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from engine_scripts import PRELUDE
from examples import further
from run_results import DEPTH_FIRST

from schedgen.cli.main import main as schedgen

# The 13th forward of stage 2 is that of microbatch 4 in the second step.
INSTRUCTION = '{"op": "FWD", "stage": 2, "mb": 4}'
RAISED = {
    "raises_in_stage": "RuntimeError: thirteen is unlucky",
    "exits_in_stage": "SystemExit: thirteen is enough",
    "out_of_memory_in_stage": "RuntimeError: .*(memory|allocate).*",
}
WHERE = r"rank (\d) on \S+: step 2: line (\d+): (\{.*?\})"


def line_of(schedule: Path, line: str) -> str:
    """The instruction in a line of a schedule."""
    return schedule.read_text().splitlines()[int(line) - 1].strip(" ,")


@pytest.fixture(scope="module")
def two_ranks(compiled) -> Path:
    """A schedule of 8 microbatches and 4 stages, of which rank 1 has the last two."""
    blocks = """
    def w(s, b, d):
        return s // 2, s // 2
    """
    return compiled(blocks + DEPTH_FIRST, stages=4, microbatches=8, workers=2)


# A rank that dies


class Failure(NamedTuple):
    model: str
    schedule: Path
    rank: int  # where it happens
    result: object  # of the launch
    seconds: float  # from the trouble to the end of mpiexec


@pytest.fixture(scope="module", params=["raises_in_stage", "killed_in_stage", *further(*list(RAISED)[1:])])
def failure(launch, traces, two_ranks, text, tmp_path_factory, request) -> Failure:
    """A launch of 4 ranks in which a stage of the model fails; in one of the launches there are 2, which are cold."""
    note = tmp_path_factory.mktemp("trouble") / "at"
    cold = request.param == "raises_in_stage"
    schedule, ranks, rank = (two_ranks, 2, 1) if cold else (traces / "1f1b.json", 4, 2)
    command = [schedule, "--model", f"models_for_tests:{request.param}", "--text", text, "--steps", 5]
    result = launch(ranks, *command, env={"TROUBLE_AT": str(note), **({"COLD_RANKS": "1"} if cold else {})})
    return Failure(request.param, schedule, rank, result, result.ended - float(note.read_text()))


def test_the_job_ends_in_the_second_step_within_10_seconds_and_leaves_no_process_behind(failure, left_behind):
    assert "step 1/5" in failure.result.out and "step 2/5" not in failure.result.out
    assert failure.seconds < 10 and failure.result.code != 0
    assert left_behind(failure.result) == []


def test_a_process_that_is_forked_would_be_found(launch):
    program = "import os; from processes import MARKER, processes; print(os.getpid() in processes(os.environ[MARKER]))"
    assert launch(None, program=["-c", program]).out == "True\n"


def test_a_rank_that_is_interrupted_alone_says_so(launch, two_ranks, text):
    """If all are, as by Ctrl-C, rank 0 says it for them."""
    command = [two_ranks, "--model", "models_for_tests:interrupted_in_stage", "--text", text, "--steps", 5]
    result = launch(2, *command)
    assert result.code != 0 and len(result.ours) == 1, result.err
    assert re.fullmatch(r"mpirun: rank 1 on \S+: step \d: line \d+: \{.*\}: interrupted", result.ours[0]), result.err


def test_the_end_is_explained(failure):
    """By rank, line, instruction and reason; for a rank that is killed the watchdog explains it."""
    result = failure.result
    assert "Traceback" not in result.err
    (message,) = result.ours
    if failure.model in RAISED:
        assert result.code == 1
        found = re.fullmatch(rf"mpirun: {WHERE}: (.*) \(at (\S+):\d+: `.*`\)", message)
        assert found is not None, message
        rank, line, instruction, reason, place = found.groups()
        assert re.fullmatch(RAISED[failure.model], reason), reason
        assert place.endswith("models_for_tests.py")
    else:
        found = re.fullmatch(
            rf"mpirun: {WHERE}: ended without a word: killed, perhaps by SIGTERM or for lack of memory", message
        )
        assert found is not None, message
        rank, line, instruction = found.groups()
    assert (int(rank), instruction) == (failure.rank, INSTRUCTION)
    assert line_of(failure.schedule, line) == INSTRUCTION


# A job in which nothing moves

LIMIT = 3  # seconds
STATE = rf"  {WHERE}(?:, (\w+)|, waiting for (?:the other ranks|line (\d+): (\{{.*\}})))"
METHODS = {"evaluate": "computing", **dict(further(("save", "asleep"), ("export", "asleep")))}


# mpirun, but rank 0 leaves out the SEND of x.1.7 in the second step.
FORGETFUL = """
import itertools, sys
import mpirun.engine.core.interpreter as interpreter
from mpi4py import MPI
from mpirun.cli.main import main
class Forgetful(interpreter.Transfers):
    def send(self, row, i):
        act, steps = super().send(row, i), itertools.count()
        return (lambda: next(steps) == 1 or act()) if str(i) == '{"op": "SEND", "buf": "x.1.7", "to": 1}' else act
if MPI.COMM_WORLD.rank == 0:
    interpreter.Transfers = Forgetful
sys.exit(main(sys.argv[1:]))
"""
# Rank 1 computes for ever in an evaluation, or sleeps where it should write a file.
OUTSIDE = """
from mpirun.checkpoint import disk_format, pretrained
method, timeout = sys.argv[2:]
class Block(nn.Linear):
    def forward(self, x):
        while method == "evaluate" and rank == 1 and not self.training and x.device.type != "meta":
            pass
        return super().forward(x)
if rank == 1:
    disk_format.write_file = pretrained.save_tensors = lambda *_: time.sleep(1000)
run = engine([Block(4, 4), Block(4, 4)], "1f1b", timeout=float(timeout), example=None)
run.evaluate([(x, x)]) if method == "export" else run.step((x, x))
getattr(run, method)([(x, x)] if method == "evaluate" else folder)
"""


@pytest.fixture(scope="module")
def hangs(launch, two_ranks, text, tmp_path_factory) -> dict[str, object]:
    """Launches of 2 ranks in which nothing moves, by name: two at a time, for they mostly wait."""
    train = [two_ranks, "--text", text, "--timeout", LIMIT, "--model"]
    folder, outside = tmp_path_factory.mktemp("hangs"), ("-c", PRELUDE + OUTSIDE)
    with ThreadPoolExecutor(2) as pool:
        started = {
            "stopped": pool.submit(launch, 2, *train, "models_for_tests:stopped_in_stage"),
            "lost": pool.submit(launch, 2, *train, "mpirun.examples.mlp:tiny", program=("-c", FORGETFUL)),
            **{how: pool.submit(launch, 2, folder / how, how, LIMIT, program=outside) for how in METHODS},
        }
    return {name: launched.result() for name, launched in started.items()}


def explained(result: object, ranks: int) -> tuple[str, list[re.Match[str]]]:
    """Why nothing moves, and where each rank is, from the one message that the launch ends with."""
    lines = result.err.splitlines()
    (start,) = [at for at, line in enumerate(lines) if line.startswith("mpirun: ")]
    reason = re.fullmatch(f"mpirun: nothing has moved for {LIMIT} s: (.*)", lines[start])
    states = [re.fullmatch(STATE, line) for line in lines[start + 1 : start + 1 + ranks]]
    assert reason and all(states), result.err
    assert [int(state[1]) for state in states] == list(range(ranks))
    return reason[1], states


def test_a_rank_that_stops_answering_is_named(hangs, two_ranks, left_behind):
    result = hangs["stopped"]
    reason, states = explained(result, 2)
    assert re.fullmatch(r"rank 1 on \S+ is stopped", reason)
    for state in states:
        _, line, instruction, _, waits, what = state.groups()
        assert line_of(two_ranks, line) == instruction
        assert waits is None or line_of(two_ranks, waits) == what
    assert [state[4] for state in states].count("stopped") == 1
    assert result.code != 0 and left_behind(result) == []


def test_a_message_that_is_never_sent_is_named(hangs):
    result = hangs["lost"]
    _, states = explained(result, 2)
    assert states[1][6] == '{"op": "RECV", "buf": "x.1.7", "from": 0}'
    assert result.code != 0


@pytest.mark.parametrize(("method", "doing"), METHODS.items())
def test_the_rank_that_hangs_outside_of_a_step_is_named(hangs, method, doing):
    """Rank 1 hangs in a method that all ranks are in."""
    result = hangs[method]
    (reason,) = result.ours
    start = f"mpirun: nothing has moved for {LIMIT} s: "
    assert re.fullmatch(rf"{start}rank 1 on \S+ is {doing}", reason), result.err
    assert re.search(r"^  rank 0 on .*, waiting for the other ranks$", result.err, re.M), result.err


# Ends that all ranks agree on


@pytest.fixture(scope="module")
def agreed(mistakes, two_ranks, text, tmp_path_factory):
    """Runs that end early, by name, all in one launch; and the folder of the files that they write."""
    folder = tmp_path_factory.mktemp("agreed")
    runs = {
        "nan loss": ["nan_loss"],
        "infinite gradient": ["infinite_gradient"],
        "asked to leave": ["asked_to_leave_in_stage", "--save", folder / "left"],
        "asked to leave, nothing to save to": ["asked_to_leave_in_stage", "--trace", folder / "early", "--verify"],
        "asked to leave, traced": [
            "asked_to_leave_in_stage",
            "--trace",
            folder / "trace",
            "--trace-steps",
            3,
            "--memory",
        ],
    }
    command = [two_ranks, "--text", text, "--steps", 4, "--model"]
    commands = [[*command, f"models_for_tests:{name}", *options] for name, *options in runs.values()]
    return dict(zip(runs, mistakes(2, commands), strict=True)), folder


def test_a_loss_that_is_not_finite_ends_the_run(agreed):
    ended = agreed[0]["nan loss"]
    assert (ended.code, ended.err) == (1, "mpirun: step 2: the loss of microbatch 4 is nan\n")
    assert "step 1/4" in ended.out and "step 2/4" not in ended.out


def test_a_gradient_that_is_not_finite_ends_the_run(agreed):
    """Stage 2's gradient is the last of the model that is not finite: stage 3's is finite."""
    ended = agreed[0]["infinite gradient"]
    what = r"the norm of the gradient of linear\.bias, stage 2, is (inf|nan)"
    assert re.fullmatch(rf"mpirun: step 2: {what}\n", ended.err) and ended.code == 1, ended


def test_a_rank_that_is_asked_to_leave_takes_all_along_after_the_step(agreed):
    ended = agreed[0]["asked to leave"]
    assert (ended.code, ended.err) == (143, "mpirun: asked to leave (SIGTERM): saved after step 2\n")
    assert [folder.name for folder in (agreed[1] / "left").glob("step-*")] == ["step-00000002"]
    ended = agreed[0]["asked to leave, nothing to save to"]
    *notes, last = ended.err.splitlines()
    assert (ended.code, last) == (143, "mpirun: asked to leave (SIGTERM): nothing is saved after step 2")
    assert notes == [
        f"mpirun: note: trace: no step is done, so {agreed[1] / 'early'} is not written",
        "mpirun: note: --verify: nothing is compared, for the run is not done",
    ]


def test_a_run_that_is_asked_to_leave_writes_what_it_has(agreed, two_ranks):
    """Of steps 2 to 4, which would be traced, it writes the second; it also prints the bytes of memory."""
    ended = agreed[0]["asked to leave, traced"]
    assert ended.code == 143 and "memory: most bytes of tensors at once, by rank: " in ended.out
    assert schedgen(["stats", str(two_ranks), "--measured", str(agreed[1] / "trace")]) == 0
    events = json.loads((agreed[1] / "trace").read_text())["traceEvents"]
    assert {event["args"]["pass"] for event in events if event["ph"] == "X"} == {0}


def test_a_rank_that_is_asked_to_leave_after_the_steps_does_so_at_once(launch, two_ranks, text):
    """In the last step the signal changes nothing; when rank 0 repeats that step to verify, it gets the signal."""
    command = [two_ranks, "--model", "models_for_tests:asked_to_leave_in_stage", "--text", text]
    result = launch(2, *command, "--steps", 2, "--verify")
    assert "step 2/2" in result.out and result.code != 0 and len(result.ours) == 1, result.err
    assert re.fullmatch(r"mpirun: rank 0 on \S+: verifying: ended without a word: .*", result.ours[0]), result.err
