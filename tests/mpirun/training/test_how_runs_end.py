"""How runs of scripts end, also several at one time: closed, by exceptions, exits and SIGTERM; and what stays then."""

from __future__ import annotations

import re

import pytest
from engine_scripts import PRELUDE
from examples import further


def test_one_process_needs_no_launcher_and_an_exception_that_is_caught_ends_its_engine_alone(launch):
    """As in a notebook: Engines in turn, each a run of its own."""
    script = """
losses = []
for number in range(4):
    with engine(lr=0.1 * (number % 2)) as run:
        losses.append([run.step((x, x)).loss for _ in range(2)])
print(all(second < first for first, second in losses[1::2]), all(a == b for a, b in losses[0::2]))
for error in (ValueError("mine"), KeyboardInterrupt(), None):
    try:
        with engine(timeout=60) as run:
            run.step((x, x))
            if error is not None:
                raise error
            print("done")
    except BaseException as caught:
        assert caught is error
engine().step((x[:7], x[:7]))
"""
    done = launch(None, program=("-c", PRELUDE + script))
    assert (done.code, done.out) == (2, "True True\ndone\n")
    assert done.err.startswith("mpirun: a batch of 7 samples cannot be cut into 2 microbatches of one size")


def test_a_step_after_one_that_was_interrupted_takes_its_own_batch(execute):
    """And has the whole gradient."""
    script = """
class Stage(nn.Linear):
    def forward(self, x):
        y = super().forward(super().forward(x))  # of such a graph no backward is cut
        if self.is_last and interrupted[0] == "forward":
            self.zero_grad()
            raise KeyboardInterrupt
        if self.is_last and interrupted[0] == "backward":
            y.register_hook(interrupt)
        return y
def interrupt(gradient):
    raise KeyboardInterrupt
def train(kind, *ways):
    torch.manual_seed(0)
    stages, found = [kind(4, 4), kind(4, 4)], []
    for number, stage in enumerate(stages):
        stage.is_last = number == 1
    model = mpirun.Model(stages, mse_loss, loss_of=loss_of)
    with engine(model, scheme, loss=None, optimizer=SGD, lr=0.1, verify=True) as run:
        for number, interrupted[0] in enumerate(ways):
            x = torch.full((4, 4), float(number))
            try:
                if interrupted[0] != "left out":
                    found.append(run.step((x, 2 * x)).losses)
            except KeyboardInterrupt:
                interrupted[0] = ""
        assert run.verify()
    assert len(found) == 3
    return found
interrupted = [""]
for scheme, loss_of in (*((name, "microbatch") for name in ("gpipe", "1f1b", "zb-v")), ("gpipe", "minibatch")):
    print(train(Stage, "", "forward", "", "backward", "") == train(Stage, "", "left out", "", "left out", ""))
"""
    done = execute(1, script)
    assert [line for line in done.out.split() if line in ("True", "False")] == 4 * ["True"], done


@pytest.mark.parametrize("ranks", [*further(1), 2])
def test_a_run_that_is_closed_or_refused_leaves_nothing_behind(ranks, tmp_path, launch):
    """Neither its handlers of SIGTERM and of exceptions, nor its threads, torch's included."""
    script = """
import mpirun.engine.build
def now():
    return signal.getsignal(signal.SIGTERM), sys.excepthook, threading.active_count(), torch.get_num_threads()
torch.set_num_threads(len(os.sched_getaffinity(0)) + 1)
before = now()
stopped = [(refused(engine, 2, "1f1b", buckets=(0,), timeout=60), now() == before)]
mpirun.engine.build.ENOUGH = 0  # a thread calls MPI during every job
for _ in range(2):
    with engine(2, "1f1b", timeout=60) as run:
        for _ in range(3):
            run.step((x, x))
        during = now()
    stopped.append((during[0] != before[0], now() == before))
lines = run.comm.gather(f"{stopped} {during[1] != before[1]} {during[2] > before[2]}")
if lines:
    print(*lines, before[0] is signal.SIG_DFL, sep="\\n")
"""
    done = launch(ranks, tmp_path, program=("-c", PRELUDE + script))
    ended = f"[(2, True), (True, True), (True, True)] {ranks > 1} True"
    assert done.out.splitlines() == [ended] * ranks + ["True"], done.err
    assert done.code == 0 and "buckets" in done.err


def test_sigterm_ends_the_step_that_comes_next_in_the_main_thread_and_leaves_a_handler_of_the_script(execute):
    """It may come when a teacher is built and its student is not, or after the last step of a run; it ends one run."""
    script = """
def step(run):
    run.step((x, x))
def own(*_):
    print("own")
signal.signal(signal.SIGTERM, own)
with engine() as run:
    step(run)
    signal.raise_signal(signal.SIGTERM)
    step(run)
print(run.steps, signal.getsignal(signal.SIGTERM) is own)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
with engine() as teacher, engine() as student:
    step(teacher)
    signal.raise_signal(signal.SIGTERM)
    print(refused(step, student))
with engine() as first:
    step(first)
    signal.raise_signal(signal.SIGTERM)
for _ in range(2):
    with engine() as run:
        print(refused(step, run))
def train():
    with engine() as run:
        step(run)
        print(run.steps, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
thread = threading.Thread(target=train)
thread.start()
thread.join()
"""
    done = execute(1, script)
    ended = ["own", "2 True", "143", "143", "None", "1 True"]
    assert [line for line in done.out.splitlines() if line in ended] == ended, done


FAILING = """
def loss(output, target):
    if sys.argv[1] == "exit" and run.steps:
        sys.exit("enough")
    return mse_loss(output, target) / (run.steps or 1) if sys.argv[1] != "loss" or not run.steps else [][0]
run = engine(2, "1f1b", loss=loss, timeout=60, example=None)
if sys.argv[1] == "set-up" and run.rank == 1:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
run.step((x, x))
if sys.argv[1] == "evaluate":
    run.step((x, x)) if run.rank == 0 else run.evaluate([(x, x)])
if sys.argv[1] == "block":
    try:
        with run:
            [][0]
    except IndexError:
        time.sleep(60)
if sys.argv[1] == "end":
    sys.exit(3) if run.rank == 1 else run.step((x, x))
if run.rank == 0 or sys.argv[1] in ("loss", "exit"):
    run.step((x, x))
[][run.rank]
"""


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("set-up", r"mpirun: rank 1 on \S+: setting up: ended without a word: killed, perhaps by SIGTERM"),
        ("evaluate", r"rank 0 on \S+ calls step, but rank 1 on \S+ calls evaluate: all ranks"),
        ("block", r"mpirun: rank \d on \S+: IndexError: .* \(at .*fails.py:16: `\[\]\[0\]`\)"),
        ("loss", r"mpirun: rank 1 on .*: step 2: line \d+: .*FWD.*: IndexError: .* \(at .*fails.py:5: `return.*`\)"),
        *further(
            ("loop", 'fails.py", line 23'),
            ("end", r"mpirun: rank 0 on \S+ calls step, but rank 1 on \S+ has ended: all ranks call the methods of"),
            ("exit", r"mpirun: rank 1 on .*: step 2: line \d+: .*FWD.*: SystemExit: enough \(at .*fails.py:4: "),
        ),
    ],
)
def test_a_script_that_fails_on_one_rank_ends_all_and_says_where(where, words, tmp_path, launch):
    script = tmp_path / "fails.py"
    script.write_text(f"exec({PRELUDE!r}){FAILING}")
    done = launch(2, where, program=(str(script),))
    assert done.code != 0 and (where not in ("loop", "loss") or "IndexError" in done.err), done.err
    assert re.search(words, done.err) and ("ended without a word" in done.err) == (where == "set-up"), done.err


def test_a_fault_in_a_loader_s_process_is_told_once_and_in_short(tmp_path, launch):
    """In that of a script's own DataLoader, too; whether the script iterates or `evaluate` does."""
    script = tmp_path / "faulty.py"
    script.write_text(f"""exec({PRELUDE!r})
class Faulty(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index == 5:
            raise ValueError(f"no sample {{index}}:\\nit is lost")
        return x[index], x[index]
run = engine(2, "ddp")
own = torch.utils.data.DataLoader(Faulty(), batch_size=4, num_workers=1)
if sys.argv[1] == "evaluate":
    run.evaluate(own)
for batch in run.loader(Faulty(), 1, workers=1) if sys.argv[1] == "loader" else own:
    run.step(batch)
""")
    for how in ("loader", *further("own"), "evaluate"):
        (line,) = (done := launch(2, how, program=(str(script),))).ours
        where = rf".*{script}.*line 7,.*ValueError: no sample 5: it is lost \(at {script}:"
        said = rf"mpirun: rank \d on \S+: ValueError: {where}"
        assert done.code != 0 and re.match(said, line), line


def test_what_a_script_s_function_raises_in_the_trial_has_its_line_and_with_traceback_the_whole_stack(tmp_path, launch):
    script = tmp_path / "wrong.py"
    script.write_text(f"""exec({PRELUDE!r})
class Wrong(nn.Linear):
    def forward(self, x):
        return super().forward(x) @ x
engine([Wrong(4, 4)], "ddp", example=(x[:3], x[:3]), traceback=sys.argv[1] == "whole")
""")
    line = f"{script}:4: `return super().forward(x) @ x`"
    for how in ("short", "whole"):
        (said,) = (done := launch(None, how, program=(str(script),))).ours
        assert done.code == 2 and said.startswith("mpirun: stage 0 fails on the shapes it gets: RuntimeError: ")
        assert said.endswith(f" (at {line})") and ("Traceback" in done.err) == (how == "whole"), done.err


def test_one_process_has_no_watchdog_and_its_error_has_the_step(scripts):
    """So that a breakpoint may take any time."""
    script = """
def loss(output, target):
    return mse_loss(output, target) if run.steps < 2 else [][0]
with engine(example=None, loss=loss, timeout=60) as run:
    assert (run.session.watchdog.process is not None) == (run.comm.size == 2 and run.rank == 0)
    for _ in range(2):
        run.step((x, x))
    if run.comm.size == 1:
        try:
            run.step((x, x))
        except IndexError as error:
            print(*error.__notes__)
"""
    alone, two = (scripts(ranks, [[script.replace("engine(", f"engine({ranks}, '1f1b', ")]])[0] for ranks in (1, 2))
    assert (alone.code, two.code) == (0, 0), (alone, two)
    assert re.fullmatch(r"mpirun: in step 3: line \d+: .*FWD.*\n", alone.out)
