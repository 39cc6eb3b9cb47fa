"""How runs of scripts end, also several at one time: closed, by exceptions, exits and SIGTERM; and what stays then."""

from __future__ import annotations

import re

import pytest
from examples import further


def test_one_process_needs_no_launcher(launch):
    """As in a notebook: 60 Engines in turn, each a run of its own, on a schedule of one worker."""
    script = """
import torch, mpirun
from torch.nn.functional import mse_loss
x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
losses = []
for number in range(60):
    with mpirun.Engine("gpipe", [torch.nn.Linear(4, 4)], stages=1, microbatches=2, loss=mse_loss, timeout=0,
                       lr=0.1 * (number % 2)) as run:
        losses.append([run.step((x, x)).loss for _ in range(2)])
print(all(second < first for first, second in losses[1::2]), all(a == b for a, b in losses[0::2]))
"""
    done = launch(None, program=("-c", script))
    assert done.code == 0 and done.out.split() == ["True", "True"], done.err


def test_an_exception_that_is_caught_ends_its_engine_alone(launch):
    """As in a notebook, which catches all exceptions: the watchdog lets the process live; another Engine follows."""
    script = """
import torch, mpirun
from torch.nn.functional import mse_loss
x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
for error in (ValueError("mine"), KeyboardInterrupt(), None):
    try:
        with mpirun.Engine("gpipe", [torch.nn.Linear(4, 4)], stages=1, microbatches=2, loss=mse_loss) as run:
            watchdog = run.session.watchdog.process
            run.step((x, x))
            if error is not None:
                raise error
            print("done")
    except BaseException as caught:
        assert caught is error
    assert watchdog.wait(60) == 0
mpirun.Engine("gpipe", [torch.nn.Linear(4, 4)], stages=1, microbatches=2, loss=mse_loss,
              lr=lambda step: float("nan")).step((x, x))
"""
    done = launch(None, program=("-c", script))
    sentence = "mpirun: the learning rate of step 1 is nan, not a number\n"
    assert (done.code, done.out, done.err) == (2, "done\n", sentence)


INTERRUPTED = """
import math, torch, mpirun
from torch import nn
from torch.nn.functional import mse_loss
class Stage(nn.Linear):
    def forward(self, x):
        y = super().forward(super().forward(x))  # of such a graph no backward is cut
        if self.is_last and interrupted[0] == "forward":
            self.zero_grad()
            raise KeyboardInterrupt
        if self.is_last and interrupted[0] == "backward":
            y.register_hook(interrupt)
        return y
class Counting(Stage):
    def __init__(self, *size):
        super().__init__(*size)
        self.register_buffer("calls", torch.zeros(1))
    def forward(self, x):
        self.calls.add_(1)
        return self.calls.clone() * super().forward(x)
def interrupt(gradient):
    raise KeyboardInterrupt
def train(kind, *ways):
    torch.manual_seed(0)
    stages, found = [kind(4, 4), kind(4, 4)], []
    for number, stage in enumerate(stages):
        stage.is_last = number == 1
    sgd = lambda named: torch.optim.SGD([entry.parameter for entry in named], 0.1)
    with mpirun.Engine(scheme, mpirun.Model(stages, mse_loss, loss_of=loss_of), microbatches=2, optimizer=sgd,
                       on_nan="skip", verify=True) as run:
        for number, interrupted[0] in enumerate(ways):
            x = torch.full((4, 4), math.nan if interrupted[0] == "skipped" else float(number))
            try:
                if interrupted[0] != "left out":
                    found.append(run.step((x, 2 * x)).losses)
            except KeyboardInterrupt:
                interrupted[0] = ""
        assert run.verify()
    found = [losses for losses in found if math.isfinite(losses[0])]
    assert len(found) == 3
    return found
interrupted = [""]
for scheme, loss_of in (*((name, "microbatch") for name in ("gpipe", "1f1b", "zb-v")), ("gpipe", "minibatch")):
    print(train(Stage, "", "forward", "", "backward", "") == train(Stage, "", "left out", "", "left out", ""))
    print(train(Counting, "", "skipped", "", "skipped", "") == train(Counting, "", "left out", "", "left out", ""))
"""


def test_a_step_after_one_that_was_interrupted_takes_its_own_batch(scripts):
    """And has the whole gradient; so has a step after one that was skipped, which leaves buffers as they were."""
    (done,) = scripts(1, [[INTERRUPTED]])
    assert done.code == 0 and [line for line in done.out.split() if line in ("True", "False")] == 8 * ["True"], done


AGAIN = """
import os, signal, sys, threading, torch, mpirun
from torch.nn.functional import mse_loss
import mpirun.engine.first_step
def engine(**options):
    torch.manual_seed(0)
    stages = [torch.nn.Linear(4, 4) for _ in range(2)]
    return mpirun.Engine("1f1b", stages, stages=2, microbatches=2, loss=mse_loss, **options)
def now():
    return signal.getsignal(signal.SIGTERM), sys.excepthook, threading.active_count(), torch.get_num_threads()
torch.set_num_threads(len(os.sched_getaffinity(0)) + 1)
before, x = now(), torch.zeros(8, 4)
stopped = []
try:
    engine(buckets=(0,))
except SystemExit as error:
    stopped.append((error.code, now() == before))
mpirun.engine.first_step.needs_calls = lambda seconds, size: True  # a thread calls MPI during every job
for _ in range(2):
    with engine(log=sys.argv[1]) as run:
        for _ in range(3):
            run.step((x, x))
        during = now()
    stopped.append((during[0] != before[0], now() == before))
lines = run.comm.gather(f"{stopped} {during[1] != before[1]} {during[2] > before[2]}")
if lines:
    print(*lines, before[0] is signal.SIG_DFL, sep="\\n")
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_is_closed_or_refused_leaves_nothing_behind(ranks, tmp_path, launch):
    """Neither its handlers of SIGTERM and of exceptions, nor its threads, TensorBoard's and torch's included."""
    done = launch(ranks, tmp_path, program=("-c", AGAIN))
    ended = f"[(2, True), (True, True), (True, True)] {ranks > 1} True"
    assert done.out.splitlines() == [ended] * ranks + ["True"], done.err
    assert done.code == 0 and "buckets" in done.err


HANDLERS = """
import os, signal, sys, threading, torch, mpirun
from torch.nn.functional import mse_loss
def engine():
    return mpirun.Engine("gpipe", [torch.nn.Linear(4, 4)], stages=1, microbatches=2, loss=mse_loss, timeout=0)
def step(run):
    run.step((torch.zeros(8, 4), torch.zeros(8, 4)))
def own(*_):
    print("own")
"""


def test_a_handler_of_the_scripts_own_stays(scripts):
    script = """
signal.signal(signal.SIGTERM, own)
with engine() as run:
    step(run)
    signal.raise_signal(signal.SIGTERM)
    step(run)
print(signal.getsignal(signal.SIGTERM) is own)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
"""
    (done,) = scripts(1, [[HANDLERS + script]])
    assert (done.code, done.out.split()) == (0, ["own", "True"]), done.err


@pytest.mark.parametrize("last_first", [False, True])
def test_runs_at_one_time_give_back_sigterm_and_threads_in_whatever_order_they_end(last_first, scripts):
    """Runs that have not ended keep them: SIGTERM ends the next one that steps."""
    script = """
last_first, threads = sys.argv[1] == "True", torch.get_num_threads()
torch.set_num_threads(len(os.sched_getaffinity(0)) + 1)
before, runs = torch.get_num_threads(), [engine() for _ in range(3)]
for run in runs:
    step(run)
last = runs.pop(1)
for run in reversed(runs) if last_first else runs:
    run.close()
print(torch.get_num_threads() < before)
signal.raise_signal(signal.SIGTERM)
try:
    step(last)
except SystemExit as end:
    print(end.code)
last.close()
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, torch.get_num_threads() == before)
torch.set_num_threads(threads)
"""
    (done,) = scripts(1, [[HANDLERS + script, last_first]])
    assert (done.code, done.out.split()) == (0, ["True", "143", "True", "True"]), done.err


def test_runs_at_one_time_give_back_excepthook_in_whatever_order_they_end(scripts):
    script = """
def engine():
    stages = [torch.nn.Linear(4, 4) for _ in range(2)]
    return mpirun.Engine("gpipe", stages, stages=2, microbatches=2, loss=mse_loss, timeout=0)
before = sys.excepthook
for order in ("012", "102", "210"):
    hooks = {}
    for number in range(3):
        run = engine()
        hooks[run] = sys.excepthook
    assert len({before, *hooks.values()}) == 4
    for run in [list(hooks)[int(number)] for number in order]:
        run.close()
        del hooks[run]
        assert sys.excepthook is [before, *hooks.values()][-1], order
"""
    (done,) = scripts(2, [[HANDLERS + script]])
    assert done.code == 0, done.err


def test_the_steps_of_a_run_can_be_read_when_it_has_ended(scripts):
    script = """
with engine() as run:
    step(run)
    step(run)
print(run.steps)
"""
    (done,) = scripts(1, [[HANDLERS + script]])
    assert (done.code, done.out.split()) == (0, ["2"]), done.err


def test_sigterm_ends_a_run_that_begins_after_it_came_unless_another_has_left(scripts):
    """It comes when a teacher is built and its student is not, or after the last step of a run that another follows."""
    script = """
def ended(run):
    try:
        step(run)
    except SystemExit as end:
        return end.code
with engine() as teacher, engine() as student:
    step(teacher)
    signal.raise_signal(signal.SIGTERM)
    print(ended(student))
with engine() as first:
    step(first)
    signal.raise_signal(signal.SIGTERM)
for _ in range(2):
    with engine() as run:
        print(ended(run))
"""
    (done,) = scripts(1, [[HANDLERS + script]])
    assert (done.code, done.out.split()) == (0, ["143", "143", "None"]), done.err


def test_a_run_in_another_thread_leaves_sigterm_alone(scripts):
    """Only the main thread can set what a signal does."""
    script = """
def train():
    with engine() as run:
        step(run)
        print(run.steps, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
thread = threading.Thread(target=train)
thread.start()
thread.join()
"""
    (done,) = scripts(1, [[HANDLERS + script]])
    assert (done.code, done.out.split()) == (0, ["1", "True"]), done.err


def test_scripts_that_exit_on_all_ranks_end_with_their_code(scripts):
    """Inside a step, in a function that every rank calls; the Engine is closed then."""
    script = """
import sys, torch, mpirun
from torch.nn.functional import mse_loss
x, stages = torch.zeros(8, 4), [torch.nn.Linear(4, 4) for _ in range(2)]
with mpirun.Engine("ddp", stages, stages=2, microbatches=2,
                   loss=lambda output, target: sys.exit(3) if run.steps else mse_loss(output, target)) as run:
    run.step((x, x))
    run.step((x, x))
"""
    (done,) = scripts(2, [[script]])
    assert (done.code, done.out, done.err) == (3, "", "")


FAILING = """
import os, signal, sys, time, torch, mpirun, mpirun.training.session
from torch.nn.functional import mse_loss
def loss(output, target):
    if sys.argv[1] == "exit" and run.steps:
        sys.exit("enough")
    return mse_loss(output, target) / (run.steps or 1) if sys.argv[1] != "loss" or not run.steps else [][0]
mpirun.training.session.EXIT_APART = 0.5
torch.manual_seed(0)
stages = [torch.nn.Linear(4, 4) for _ in range(2)]
run = mpirun.Engine("1f1b", stages, stages=2, microbatches=2, loss=loss)
if sys.argv[1] == "set-up" and run.rank == 1:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
run.step((x, x))
if sys.argv[1] == "evaluate":
    run.step((x, x)) if run.rank == 0 else run.evaluate([(x, x)])
if sys.argv[1] == "block":
    try:
        with run:
            [][0]
    except IndexError:
        time.sleep(60)
if sys.argv[1] == "shape":
    for batch in run.loader(lambda step, mb, rng: (torch.zeros(4 + step, 4), torch.zeros(4 + step, 4)), 4):
        run.step(batch)
if sys.argv[1] == "end":
    sys.exit(3) if run.rank == 1 else run.step((x, x))
if run.rank == 0 or sys.argv[1] in ("loss", "exit"):
    run.step((x, x))
[][run.rank]
"""


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("loop", 'fails.py", line 32'),
        ("set-up", r"mpirun: rank 1 on \S+: setting up: ended without a word: killed, perhaps by SIGTERM"),
        ("evaluate", r"rank 0 on \S+ calls step, but rank 1 on \S+ calls evaluate: all ranks"),
        ("end", r"mpirun: rank 0 on \S+ calls step, but rank 1 on \S+ has ended: all ranks call the methods of an E"),
        (
            "shape",
            r"the microbatches of step 3 have shape \(5, 4\), not \(4, 4\) as the first: declare sizes with buckets=",
        ),
        ("block", r"mpirun: rank \d on \S+: IndexError: .* \(at .*fails.py:22\)"),
        ("loss", r"mpirun: rank 1 on .*: line \d+: .*FWD.*: IndexError: .* \(at .*fails.py:7\)"),
        *further(("exit", r"mpirun: rank 1 on .*: line \d+: .*FWD.*: SystemExit: enough \(at .*fails.py:6\)")),
    ],
)
def test_a_script_that_fails_on_one_rank_ends_all_and_says_where(where, words, tmp_path, launch):
    script = tmp_path / "fails.py"
    script.write_text(FAILING)
    done = launch(2, where, program=(str(script),))
    assert done.code != 0 and (where not in ("loop", "loss") or "IndexError" in done.err), done.err
    assert re.search(words, done.err) and ("ended without a word" in done.err) == (where == "set-up"), done.err
