"""What scripts save and where, and what SIGTERM saves after that."""

from __future__ import annotations

import re

from engine_scripts import PRELUDE


def test_how_many_checkpoints_stay_is_what_each_save_says(tmp_path, execute):
    script = """
with engine() as run:
    for keep in (2, 2, 2, 9, 9):
        run.step((x, x))
        run.save(folder / "kept", keep=keep)
    assert [refused(run.save, folder / "kept", keep=keep) for keep in (None, 0, True, 1.0)] == [2] * 4
assert steps("kept") == [2, 3, 4, 5], steps("kept")
"""
    sentences = [f"mpirun: keep should be a whole number of at least 1, not {keep!r}" for keep in (None, 0, True, 1.0)]
    execute(1, script, tmp_path, err=sentences)


def test_a_disk_that_is_full_costs_neither_the_run_nor_a_checkpoint_of_the_same_step(tmp_path, launch):
    """A limit on the size of files emulates it: only the manifest, which is written last, exceeds it."""
    script = """
import resource
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
loader = run.loader(rows, 4)
assert run.save(saved, data=loader, keep=1) and engine().resume(saved, data=loader)
run.step((x, x))
assert run.save(saved, data=loader, keep=2)
print(*sorted(path.name for path in saved.iterdir()))
"""
    done = launch(None, tmp_path, program=("-c", PRELUDE + script))
    sentence = r"mpirun: no checkpoint of step 1: \S+: File too large; the last one is that of step 1"
    assert (done.code, done.out.splitlines()[-1]) == (0, ".lock step-00000001 step-00000002"), done.err
    assert re.fullmatch(sentence, done.err.strip()), done.err


def test_a_run_saves_to_one_folder_which_is_new_or_that_it_resumed_from(tmp_path, execute):
    """And which no other run saves to meanwhile."""
    script = """
run = engine()
for _ in range(2):
    run.step((x, x))
    run.save(folder / "mine")
assert refused(lambda: run.save(folder / "best")) == 2
other = engine()
other.resume(folder / "mine")
assert refused(lambda: other.save(folder / "mine")) == 2
run.close()
other.step((x, x))
assert other.save(folder / "mine") and steps("mine") == [1, 2, 3]
other.close()
with engine() as third:
    assert refused(lambda: third.save(folder / "mine")) == 2
assert steps("mine") == [1, 2, 3]
"""
    mine = tmp_path / "mine"
    begin, (first, second, third) = f"mpirun: saving to {mine}: ", execute(1, script, tmp_path).err.splitlines()
    assert first == f"mpirun: save: this run saves to {mine}, and a run has one folder: export the best"
    assert second == f"{begin}another run saves there, or an earlier Engine of this script, which is not closed"
    assert third == f"{begin}it has checkpoints of another run: resume from it, move it, or save elsewhere"


def test_a_run_that_has_trained_saves_and_exports_beside_a_folder_that_it_cannot_use(tmp_path, execute):
    """It never ends for one; before the first step it is refused."""
    script = """
for name in ("mine", "mine-2"):
    (folder / name).write_text("taken")
with engine(2, "1f1b") as run:
    run.step((x, x))
    assert run.save(folder / "mine") and run.save(folder / "mine") and steps("mine-3") == [1]
    run.export(folder / "mine")
    assert refused(run.save, folder / "mine-2") == 2
assert (folder / "mine-4" / "model.safetensors.index.json").exists()
with engine(2, "1f1b") as run:
    run.step((x, x))
    assert not run.save(folder / "mine" / "inside")
    assert refused(run.export, folder / "mine" / "inside") == 1
for method in ("save", "export"):
    with engine(2, "1f1b") as run:
        assert refused(getattr(run, method), folder / "mine")
"""
    mine = tmp_path / "mine"
    done = execute(2, script, tmp_path)
    beside = "so that no step is lost"
    assert done.err.splitlines() == [
        f"mpirun: note: {mine}: File exists; this goes to {mine}-3, {beside}",
        f"mpirun: note: export {mine}: it is not empty: export to a new directory; this goes to {mine}-4, {beside}",
        f"mpirun: save: this run saves to {mine}, and a run has one folder: export the best",
        f"mpirun: note: {mine}/inside: Not a directory; nothing is saved",
        f"mpirun: {mine}/inside: File exists",
        f"mpirun: {mine}: File exists",
        f"mpirun: export {mine}: it is not empty: export to a new directory",
    ]


def test_a_run_that_is_asked_to_leave_saves_as_it_did_last(tmp_path, execute):
    """Evaluations go on to their end; the next step leaves. One rank is asked."""
    script = """
data, seen = [(row, row) for row in torch.cat([x] * 10)], []
def each(number, output):
    seen.append(number)
    if number == 5:
        signal.raise_signal(signal.SIGTERM)
def train(run, loader):
    for batch in loader:
        run.step(batch)
for found in (False, True):
    with engine(2) as run:
        loader = run.loader(data, 2)
        assert run.resume(folder / "last", data=loader) == found
        run.step(next(iter(loader)))
        run.save(folder / "last", data=loader, keep=2)
        run.predict(loader, each=each)
        assert len(seen) == (40 * (1 + found) if run.rank == 1 else 0), seen
        print(refused(lambda: train(run, loader)), steps("last"))
"""
    done = execute(2, script, tmp_path)
    assert [line for line in done.out.splitlines() if line[0].isdigit()] == ["143 [1, 2]", "143 [3, 4]"] * 2


def test_what_a_script_saves_of_its_own_is_resumed(execute, tmp_path):
    """Of each rank its own, unless all have the same: then any number of ranks gets it. SIGTERM saves the newest."""
    begins = """
def run_of(name, own):
    with engine(2) as run:
        known = {"best": 1.5, "names": ["a", {"b": None}], "average": x[:2] + rank * own}
        if not run.resume(folder / name):
            assert run.state == {}
            run.step((x, x))
            run.state.update({"names": [], "best": 0.0})
            run.save(folder / name, state=known)
            run.state["best"] = 2.5
            signal.raise_signal(signal.SIGTERM)
            assert refused(run.step, (x, x)) == 143
            files = [sorted(path.name for path in step.glob("*.pt")) for step in sorted((folder / name).glob("step-*"))]
            run.print(name, *files)
        else:
            assert run.state.pop("average").equal(known.pop("average")) and run.state == {**known, "best": 2.5}
            run.print(name, run.state["best"])
"""
    script = "run_of('same', 0)\nrun_of('differ', 1)"
    done = execute(2, begins + script, tmp_path)
    names = ["['state-0.pt']", "['state-0.pt', 'state-1.pt']"]
    assert [line for line in done.out.splitlines() if "state" in line] == [
        f"{name} {files} {files}" for name, files in zip(("same", "differ"), names, strict=True)
    ], done
    again = execute(2, begins + script, tmp_path)
    assert [line for line in again.out.splitlines() if line.endswith(" 2.5")] == ["same 2.5", "differ 2.5"], again
    alone = execute(1, begins + "run_of('same', 0)\nrun_of('differ', 1)", tmp_path, code=2)
    folder = tmp_path / "differ" / "step-00000002"
    differ = f"mpirun: {folder}: the states of its 2 ranks differ, and there are 1 ranks: resume with 2"
    assert alone.out.splitlines()[-1] == "same 2.5" and alone.err.splitlines()[-1] == differ, alone
