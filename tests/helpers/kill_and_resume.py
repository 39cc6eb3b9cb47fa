"""Runs of which a rank is killed at a random moment, and which are then resumed by the same command.

`python tests/helpers/kill_and_resume.py --count 50` (`make test-crash`) does 50 of each kind:

anywhen   one time in four at any moment of the launch, most of which is startup, else after a random step
writing   while a checkpoint is being written

Each must end with the same bits as an undisturbed run; every kill must end all ranks soon, leave no damaged
checkpoint, and lose none.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from processes import environment, mpiexec, processes
from safetensors.torch import load_file

from mpirun.checkpoint import disk_format
from schedgen.cli.main import main as schedgen

STEPS = 30  # of `make test-crash`
ATTEMPTS = 50  # runs at most until one is killed at its moment
LONGEST = 60.0  # seconds after a kill in which all should have ended
KINDS = ("anywhen", "writing")
MODEL = "mpirun.examples.mlp:tiny"


class Crash(NamedTuple):
    """The result of one run that was killed and resumed."""

    lasted: float  # seconds from the kill to the end of the last process
    steps: int  # of the newest checkpoint when all had ended
    whole: bool  # all checkpoints are complete, and none was lost
    same: bool  # the last checkpoint is that of the undisturbed run


class Crasher:
    """Kills and resumes runs by one schedule, and compares each with an undisturbed one."""

    def __init__(self, folder: Path, seed: int, ranks: int, steps: int = STEPS) -> None:
        """Do the undisturbed run."""
        self.folder, self.random, self.ranks, self.steps = folder, random.Random(seed), str(ranks), steps
        self.schedule = folder / "1f1b.json"
        command = ["compile", "1f1b", "--stages", self.ranks, "--microbatches", "4", "-o", str(self.schedule)]
        assert schedgen(command) == 0
        begin = time.monotonic()
        assert self.start(folder / "undisturbed", cold=False).wait() == 0
        self.seconds = time.monotonic() - begin
        self.end = self.result(folder / "undisturbed")

    def start(self, save: Path, marker: str = "", cold: bool = True) -> subprocess.Popen[bytes]:
        """Start a run that resumes from the checkpoints in `save`; `cold`: each rank imports torch itself."""
        command = [*mpiexec(), "-n", self.ranks, sys.executable, "-m", "mpirun", str(self.schedule)]
        command += ["--model", MODEL, "--steps", str(self.steps), "--every", "1", "--save", str(save)]
        command += ["--resume", str(save)]
        return subprocess.Popen(
            command,
            env=environment(marker, {"COLD_RANKS": "1"} if cold else {}),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def result(self, save: Path) -> dict[str, bytes]:
        """All entries of the last checkpoint."""
        manifest = disk_format.read_manifest(disk_format.step_folder(save, self.steps))
        files = [load_file(manifest.folder / file.name) for file in manifest.files]
        return {name: value.numpy().tobytes() for entries in files for name, value in entries.items()}

    def crash(self, kind: str) -> Crash:
        """Repeat `attempt` until a run is killed before it ends; `kind`: one of KINDS."""
        for _ in range(ATTEMPTS):
            if crash := self.attempt(kind):
                return crash
        raise RuntimeError(f"of {ATTEMPTS} runs each was over before a rank could be killed ({kind})")

    def attempt(self, kind: str) -> Crash | None:
        """Kill a run at a random moment, and resume it; None if it ended before that moment."""
        save, marker = self.folder / uuid.uuid4().hex, uuid.uuid4().hex
        job = self.start(save, marker, cold=kind == "anywhen")
        moment = self.while_writing(save)
        if kind == "anywhen":
            moment = self.in_the_launch() if self.random.random() < 0.25 else self.behind_a_step(save)
        while job.poll() is None and not moment():
            pass
        had = newest(save)
        ranks = [pid for pid, words in processes(marker).items() if is_rank(words)]
        if not ranks:
            job.wait()
            return None
        begin = time.monotonic()
        os.kill(self.random.choice(ranks), signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(LONGEST)
        while (left := processes(marker)) and time.monotonic() - begin < LONGEST:
            time.sleep(0.01)
        lasted = time.monotonic() - begin
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        job.wait()
        steps, whole = newest(save), all_whole(save)
        ended_well = self.start(save, cold=False).wait() == 0
        return Crash(lasted, steps, whole and steps >= had, ended_well and self.result(save) == self.end)

    def in_the_launch(self) -> Callable[[], bool]:
        """Any moment of the launch."""
        moment = time.monotonic() + self.random.uniform(0, self.seconds)
        return lambda: time.sleep(0.001) or time.monotonic() > moment

    def behind_a_step(self, save: Path) -> Callable[[], bool]:
        """Up to 50 ms after the checkpoint of some step."""
        return self.after(disk_format.step_folder(save, self.random.randint(1, self.steps - 1)), 0.05)

    def while_writing(self, save: Path) -> Callable[[], bool]:
        """While the checkpoint of some step is being written: up to 20 ms after its folder has appeared."""
        return self.after(disk_format.draft_folder(save, self.random.randint(1, self.steps - 1)), 0.02)

    def after(self, folder: Path, seconds: float) -> Callable[[], bool]:
        """Up to so many seconds after a folder has appeared."""

        def moment() -> bool:
            if not folder.exists():
                time.sleep(0.002)
                return False
            time.sleep(self.random.uniform(0, seconds))
            return True

        return moment


def is_rank(words: list[str]) -> bool:
    """Whether a command line is that of a rank, or of the process that stands for a warm one."""
    return words[1:3] == ["-m", "mpirun"] or words[4:5] == ["rank"]


def newest(save: Path) -> int:
    """The number of steps of the newest checkpoint, 0 without one."""
    whole = [folder for folder in disk_format.step_folders(save) if (folder / disk_format.MANIFEST).exists()]
    return disk_format.read_manifest(whole[0]).step if whole else 0


def all_whole(save: Path) -> bool:
    """Whether all checkpoints that have a manifest match it."""
    for folder in disk_format.step_folders(save):
        if (folder / disk_format.MANIFEST).exists():
            for file in disk_format.read_manifest(folder).files:
                disk_format.verify_file(folder, file)
    return True


def main() -> int:
    """Kill and resume runs; return the exit code, 1 if a run did not end well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kind", choices=KINDS, action="append")
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        crasher = Crasher(Path(folder), options.seed, options.ranks)
        for kind in options.kind or KINDS:
            crashes = []
            for number in range(options.count):
                crash = crasher.crash(kind)
                crashes.append(crash)
                print(
                    f"{kind} {number + 1}: after {crash.steps} steps, all ended in {crash.lasted:.2f} s, "
                    f"{'' if crash.whole else 'not '}whole, {'same bits' if crash.same else 'other bits'}",
                    flush=True,
                )
            good = sum(crash.whole and crash.same for crash in crashes)
            failed += options.count - good + sum(crash.lasted > 5 for crash in crashes)
            print(
                f"{kind}: {good} of {options.count} whole and with the same bits; "
                f"all ended within {max(crash.lasted for crash in crashes):.2f} s",
                flush=True,
            )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
