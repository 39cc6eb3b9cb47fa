"""What scripts save and where, what SIGTERM saves after that, and the order of inputs after a restart."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch.utils._pytree as pytree
from engine_scripts import SAVING
from mpi4py import MPI

from mpirun.data.loader import Batch
from mpirun.data.microbatches import Microbatch
from mpirun.training.batches import InputOrder
from mpirun.training.saving import Checkpoints, Saving

DATA: Any = object()


def saving(name: str) -> Saving:
    """A capital letter: with the position in the data."""
    return Saving(Path(name.lower()), DATA if name.isupper() else None, 3)


@pytest.mark.parametrize(
    ("resumed", "calls", "saved"),
    [
        ("", "l", "l"),
        ("", "bl", "b"),
        ("l", "bl", "l"),
        ("l", "b", "b"),
        ("", "bL", "L"),
        ("", "Lb", "L"),
        ("", "Ll", "L"),
        ("b", "Lb", "L"),
        ("l", "LBl", "B"),
        ("L", "b", "L"),
        ("L", "l", "L"),
        ("L", "N", "N"),
        ("L", "bNb", "N"),
    ],
)
def test_sigterm_saves_what_a_restart_resumes(resumed, calls, saved):
    nothing: Any = None
    checkpoints = Checkpoints(nothing, nothing)
    checkpoints.restart = saving(resumed) if resumed else None
    for call in map(saving, calls):
        checkpoints.at_sigterm = checkpoints.at_sigterm_after(call)
    assert checkpoints.at_sigterm == saving(saved)


@pytest.mark.parametrize(
    ("before", "first", "arranged"),
    [("ab", "bca", "abc"), ("ab", "ca", "ca"), ("", "ba", "ba"), ("abc", "ca", "ac")],
)
def test_a_resumed_run_has_the_order_of_inputs_of_the_run_before(before, first, arranged):
    """It has its own if an input has other keys."""
    order = InputOrder(MPI.COMM_SELF)
    order.resume(paths := [f"['{key}']" for key in before])
    assert order.to_save == paths
    leaves, structure = pytree.tree_flatten({key: key for key in first})
    batch = Batch(0, 0, [1], {0: Microbatch(leaves, None, 1.0, structure=structure)})
    assert "".join(order.arranged(batch).microbatches[0].leaves) == arranged
    assert {*order.to_save} >= {f"['{key}']" for key in arranged}


def test_how_many_checkpoints_stay_is_what_each_save_says(tmp_path, scripts):
    script = """
with engine() as run:
    for keep in (2, 2, 2, 9, 9, None, 0, True, 1.0):
        if type(keep) is int and keep:
            run.step((x, x))
            run.save(folder / "kept", keep=keep)
        else:
            assert refused(lambda: run.save(folder / "kept", keep=keep)) == 2
assert steps("kept") == [2, 3, 4, 5], steps("kept")
"""
    (done,) = scripts(1, [[SAVING + script, tmp_path]])
    sentences = [f"mpirun: keep should be a whole number of at least 1, not {keep!r}" for keep in (None, 0, True, 1.0)]
    assert (done.code, done.err.splitlines()) == (0, sentences)


def test_a_checkpoint_stays_until_another_of_its_step_is_whole(tmp_path, launch):
    """A limit on the size of files emulates a full disk: only the manifest, which is written last, exceeds it."""
    script = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
run, saved = engine(), folder / "saved"
run.step((x, x))
assert run.save(saved, keep=1)
*others, size = sorted(path.stat().st_size for path in (saved / "step-00000001").iterdir())
before = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, before[1]))
assert (saved / "step-00000001" / "manifest.json").stat().st_size == size > others[-1]
assert not run.save(saved, keep=1)
assert engine().resume(saved)
resource.setrlimit(resource.RLIMIT_FSIZE, before)
loader = run.loader([(row, row) for row in x], 4)
assert run.save(saved, data=loader, keep=1) and engine().resume(saved, data=loader)
print(*sorted(path.name for path in saved.iterdir()))
"""
    done = launch(None, tmp_path, program=("-c", SAVING + script))
    sentence = r"mpirun: no checkpoint of step 1: \S+: File too large; the last one is that of step 1"
    assert (done.code, done.out.splitlines()[-1]) == (0, ".lock step-00000001"), done.err
    assert re.fullmatch(sentence, done.err.strip()), done.err


def test_a_run_saves_to_two_directories_in_turn(tmp_path, scripts):
    """As the last and the best; no other run saves there until it ends. It may also save to where it resumed from."""
    script = """
run = engine()
for _ in range(3):
    run.step((x, x))
    run.save(folder / "last")
    run.save(folder / "best", keep=1)
assert (steps("last"), steps("best")) == ([1, 2, 3], [3])
other = engine()
other.resume(folder / "last")
other.step((x, x))
assert refused(lambda: other.save(folder / "last")) == 2
assert not (folder / "last" / ".seen").exists()
run.close()
other.save(folder / "other")
other.save(folder / "last")
assert steps("last") == [2, 3, 4]
other.close()
with engine() as third:
    third.step((x, x))
    for _ in range(2):
        assert refused(lambda: third.save(folder / "last")) == 2
"""
    (done,) = scripts(1, [[SAVING + script, tmp_path]])
    begin = f"mpirun: saving to {tmp_path / 'last'}: "
    others = "it has checkpoints of another run: resume from it, move it, or save elsewhere"
    refused = ["another run saves there: run ", others, others]
    lines = done.err.splitlines()
    assert done.code == 0 and len(lines) == 3, done.err
    assert all(line.startswith(begin + words) for line, words in zip(lines, refused, strict=True)), done.err
    assert lines[0].endswith(", which is this script: close its earlier Engine")


def test_a_folder_that_is_replaced_during_a_run_is_locked_anew(tmp_path, scripts):
    """Another run may save there by then, and the checkpoints are that run's."""
    script = """
from mpirun.checkpoint.lock import FolderLock
run = engine()
run.step((x, x))
run.save(folder / "saved")
(folder / "saved").rename(folder / "moved")
(folder / "saved" / ".writing-00000009").mkdir(parents=True)
other = FolderLock(folder / "saved", "other")
run.step((x, x))
assert not run.save(folder / "saved")
assert sorted(path.name for path in (folder / "saved").iterdir()) == [".lock", ".writing-00000009"]
other.release()
assert run.save(folder / "saved") and steps("saved") == [2]
(folder / "saved" / ".lock").unlink()
assert run.save(folder / "saved")
(folder / "saved").rename(folder / "elsewhere")
(folder / "saved").symlink_to(folder / "elsewhere")
assert run.save(folder / "saved")
run.close()
assert [path.name for path in (folder / "saved").iterdir()] == ["step-00000002"]
"""
    (done,) = scripts(1, [[SAVING + script, tmp_path]])
    begin = f"mpirun: no checkpoint of step 2: saving to {tmp_path / 'saved'}: another run saves there: run other on "
    assert (done.code, done.err.count("\n")) == (0, 1) and done.err.startswith(begin), done.err


def test_checkpoints_that_were_saved_since_a_run_resumed_are_named(tmp_path, scripts):
    script = """
with engine() as first:
    first.step((x, x))
    first.save(folder)
with engine() as run:
    run.resume(folder)
    with engine() as other:
        other.resume(folder)
        for _ in range(3):
            other.step((x, x))
        other.save(folder)
    run.step((x, x))
    run.save(folder)
"""
    (done,) = scripts(1, [[SAVING + script, tmp_path]])
    said = "has a checkpoint of step 4, but this run went on from step 1"
    assert (done.code, done.err) == (0, f"mpirun: note: {tmp_path} {said}\n")


def test_names_are_those_of_the_working_directory_at_the_call_and_no_trace_overwrites_the_schedule(tmp_path, scripts):
    script = """
import os
before = os.getcwd()
for name in ("here", "there"):
    (folder / name).mkdir()
(folder / "mine.py").write_text("def w(s, b, d): return s, s\\ndef n(s, b, d): return b\\n")
with engine() as other:
    other.step((x, x))
    other.save(folder / "there" / "saved")
os.chdir(folder)
with mpirun.Engine("mine.py", [torch.nn.Linear(4, 4)], stages=1, microbatches=2, loss=mse_loss, timeout=0) as run:
    run.step((x, x))
    os.chdir(folder / "here")
    run.save("saved")
    with run.trace("trace"):
        run.step((x, x))
        os.chdir(folder / "there")
    assert (folder / "here" / "trace").exists()
    assert refused(lambda: run.save("saved")) == 2
    assert refused(lambda: run.trace("../mine.py").__enter__()) == 2
os.chdir(before)
assert (steps("here/saved"), steps("there/saved")) == ([1], [1])
"""
    (done,) = scripts(1, [[SAVING + script, tmp_path]])
    path = tmp_path / "there" / "saved"
    assert (done.code, done.err.splitlines()) == (0, [
        f"mpirun: saving to {path}: it has checkpoints of another run: resume from it, move it, or save elsewhere",
        f"mpirun: {path.parent}/../mine.py would be overwritten, but it is read, too: give the output another name",
    ])  # fmt: skip


def test_a_restarted_run_saves_to_both_directories_again(tmp_path, scripts):
    """To those of the run that it resumed, or of one that resumed the same; to no others, nor with other settings."""
    script = """
def run(resume, saves, clip=None):
    with engine(clip=clip) as of_one:
        assert of_one.resume(folder / resume) == (resume != "none")
        for names in saves:
            of_one.step((x, x))
            for name in names:
                of_one.save(folder / name)
run("none", [["last"], ["best"], ["last"], ["best"]])
run("last", [["best"], ["best"], ["last"]], 0.2)  # the third step was the last that was saved
run("last", [["best"]], 0.2)
run("last", [["best"]], 0.2)  # it ended before it came to save the last one again
run("last", [["tuned"]])
assert (steps("last"), steps("best"), steps("tuned")) == ([1, 3, 6], [4, 5, 7], [7])
for resume, name in (("last", "best"), ("none", "best"), ("none", "tuned")):
    assert refused(lambda: run(resume, [[name]])) == 2
assert (steps("best"), steps("tuned")) == ([4, 5, 7], [7])
"""
    (done,) = scripts(1, [[SAVING + script, tmp_path]])
    said = [line.replace(f"{tmp_path}/", "") for line in done.err.splitlines() if " was made with " not in line]
    ahead = "has a checkpoint of step 7, but this run went on from step 6"
    others = "it has checkpoints of another run: resume from it, move it, or save elsewhere"
    assert done.code == 0, done.err
    assert said == [
        "mpirun: note: best has a checkpoint of step 4, but this run went on from step 3",
        f"mpirun: note: best {ahead}",
        *(f"mpirun: saving to {name}: {others}" for name in ("best", "best", "tuned")),
    ]


def test_a_run_that_is_asked_to_leave_saves_to_the_directory_that_is_resumed(tmp_path, scripts):
    """With the position in the data, wherever it saved last: a restart does not resume the best, which has none."""
    script = """
import signal
def train(run, loader, saves):
    for batch in loader:
        run.step(batch)
        for name, options in saves:
            run.save(folder / name, **options)
        saves = ()
        signal.raise_signal(signal.SIGTERM)
data, best = [(row, row) for row in torch.cat([x] * 3)], ("best", {"keep": 1})
for number, name in enumerate(("last", "last", "best", "last")):
    with engine() as run:
        loader = run.loader(data, 2)
        assert run.resume(folder / name, data=loader if name == "last" else None) == (number > 0)
        assert loader.step == [0, 2, 0, 2][number]
        last = "last", {} if number == 1 else {"data": loader}
        saves = [best] if number == 3 else [best, last, best]
        print(refused(lambda: train(run, loader, saves)), steps("last"), steps("best"))
for found in (False, True):
    with engine() as run:
        assert run.resume(folder / "new", data=(loader := run.loader(data, 2))) == found
        assert loader.step == 2 * found
        print(refused(lambda: train(run, loader, [("new best", {"keep": 1})])), steps("new"), steps("new best"))
"""
    (done,) = scripts(1, [[SAVING + script, tmp_path]])
    found = [line for line in done.out.splitlines() if line.startswith("143")]
    wanted = ["143 [1, 2] [1]", "143 [2, 3, 4] [3]", "143 [3, 4, 5] [4]", "143 [3, 4, 5, 7] [6]"]
    wanted += ["143 [2] [1]", "143 [2, 4] [3]"]
    assert (done.code, found) == (0, wanted), done.err


def test_a_run_that_is_asked_to_leave_while_it_evaluates_saves_and_leaves_between_two_batches(tmp_path, scripts):
    """One rank is asked. The batch that waits for its step is repeated, though the evaluation reads the same loader."""
    script = """
import signal
data, seen = [(row, row) for row in torch.cat([x] * 10)], []
def each(number, output):
    seen.append(number)
    if number == 5:
        signal.raise_signal(signal.SIGTERM)
with engine(2) as run:
    loader = run.loader(data, 2)
    for batch in loader:
        if run.steps == 2:
            print(refused(lambda: run.predict(loader, each=each)), steps("last"))
            assert seen == (list(range(8)) if run.rank == 1 else []), seen
            break
        run.step(batch)
        if run.steps == 1:
            run.save(folder / "last", data=loader)
with engine(2) as run:
    loader = run.loader(data, 2)
    assert run.resume(folder / "last", data=loader)
    print(run.steps, loader.step)
"""
    (done,) = scripts(2, [[SAVING + script, tmp_path]])
    found = [line for line in done.out.splitlines() if line[0].isdigit()]
    assert (done.code, found) == (0, ["143 [1, 2]", "2 2"] * 2), done.err


@pytest.mark.parametrize("exchanged", ["parameter.data.neg_()", "parameter.data = -parameter.data"])
def test_weights_that_a_script_exchanges_for_an_evaluation_are_not_saved_as_those_of_the_step(
    tmp_path, scripts, exchanged
):
    """A step that is saved is not saved again; after an unsaved one the run goes on to the next, and leaves then.

    `data` changes a parameter unseen by autograd, as many implementations of an average do.
    """
    script = """
import signal
from safetensors.torch import load_file
def asked(number, output):
    if number == 1:
        signal.raise_signal(signal.SIGTERM)
def weights(step):
    (file,) = (folder / "last" / f"step-{step:08}").glob("weights*")
    return load_file(file)["stage0.weight"]
def exchanged(run):
    for stage in run.session.interpreter.stages.values():
        for parameter in stage.parameters:
            exec(sys.argv[2])
for unsaved in (False, True):
    with engine() as run:
        run.resume(folder / "last")
        run.step((x, x))
        run.save(folder / "last")
        if unsaved:
            run.step((x, x))
        before = {number: weights(number) for number in steps("last")}
        exchanged(run)
        print(refused(lambda: run.predict([(x, x)] * 4, each=asked)))
        if unsaved:
            exchanged(run)
            print(refused(lambda: run.step((x, x))))
        print(steps("last"), all(weights(number).equal(value) for number, value in before.items()))
"""
    (done,) = scripts(1, [[SAVING + script, tmp_path, exchanged]])
    found = [line for line in done.out.splitlines() if not line.startswith(("checkpoint", "resumed"))]
    wanted = ["143", "[1] True", "None", "143", "[1, 2, 4] True"]
    assert (done.code, found) == (0, wanted), done.err


def test_what_has_no_position_in_the_data_is_not_saved_and_not_resumed(tmp_path, scripts):
    script = """
with engine() as run:
    run.step((x, x))
    data = torch.utils.data.DataLoader([0])
    print(refused(lambda: run.save(folder / "new", data=data)))
with engine() as run:
    print(refused(lambda: run.resume(folder / "new", data=[data])))
assert not (folder / "new").exists()
"""
    (done,) = scripts(1, [[SAVING + script, tmp_path]])
    sentences = [f"mpirun: data: give what loader(...) returns, not a {kind}" for kind in ("DataLoader", "list")]
    assert (done.code, done.out.split(), done.err.splitlines()) == (0, ["2", "2"], sentences)


CENTRED = """
from torch import nn
class Centred(nn.Linear):
    def __init__(self, persistent):
        super().__init__(4, 4)
        self.register_buffer("mean", torch.zeros(4), persistent)
    def forward(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return super().forward(x - self.mean.clone())
class Cloned(Centred):
    def state_dict(self, **options):
        return {name: x.clone() for name, x in super().state_dict(**options).items()}
def losses(make, at, persistent):
    torch.manual_seed(0)
    net = make(persistent)
    for count in at:
        with mpirun.Engine("gpipe", [net], stages=1, microbatches=2, loss=mse_loss, timeout=0) as run:
            name = folder / f"{make.__name__} {len(at)}"
            run.resume(name)
            while run.steps < count:
                loss = run.step((x + run.steps, x)).loss
            run.save(name)
    return loss
"""


def test_buffers_that_forwards_change_and_checkpoints_lack_are_named(tmp_path, scripts):
    (done,) = scripts(1, [[SAVING + CENTRED + "losses(Centred, [1], True), losses(Centred, [1, 2], False)", tmp_path]])
    what = "which checkpoints do not have (persistent=False): after a restart they begin anew"
    note = f"mpirun: note: forwards change the buffers stage0.mean, {what}"
    assert done.code == 0 and done.err.splitlines() == [note, note], done.err


def test_checkpoints_have_the_tensors_of_which_a_module_saves_copies(tmp_path, scripts):
    script = "assert losses(Cloned, [2], True) == losses(Cloned, [1, 2], True)"
    (done,) = scripts(1, [[SAVING + CENTRED + script, tmp_path]])
    assert done.code == 0, done.err
