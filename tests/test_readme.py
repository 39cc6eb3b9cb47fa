"""The README: every command in it runs, and the schedule it shows is the one that is compiled."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README + (ROOT / "mpirun" / "README.md").read_text(), flags=re.S)
COMMANDS = list(dict.fromkeys(line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()))

LEFT_OUT = {"make test"}  # what runs this
EXIT = {"schedgen diff 1f1b.json mine.json": 1}  # asked to find differences

# There is no Slurm to test with: srun's ranks are started by mpiexec.
SRUN = """#!/bin/sh
while [ "$1" != python ]; do [ "$1" = -n ] && ranks=$2; shift; done
exec $MPIEXEC -n $ranks "$@"
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A copy of the repository, and an environment in which the README's commands find what they need."""
    copy = tmp_path_factory.mktemp("readme") / "repository"
    skip = shutil.ignore_patterns(".venv*", "build", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=skip)
    venv = Path(sys.prefix)
    for name in (".venv", ".venv-system"):
        (copy / name).symlink_to(venv)
    for name in ("pyproject.toml", ".ci/constraints.txt"):  # older than the venv: make must not install the copy in it
        os.utime(copy / name, (0, 0))
    tools = copy / "build" / "tools"
    tools.mkdir(parents=True)
    (tools / "srun").write_text(SRUN)
    (tools / "srun").chmod(0o755)
    (copy / "vee.py").write_text(next(text for kind, text in BLOCKS if kind == "python"))
    mpiexec = os.environ.get("MPIEXEC", str(venv / "bin" / "mpiexec"))
    path = os.pathsep.join([str(tools), str(venv / "bin"), os.environ["PATH"]])
    inherited = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL", "MPI")}
    # MPI=system is run with this venv and its launcher in the place of a site's.
    return copy, {**inherited, "PATH": path, "MPIEXEC": mpiexec}


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in LEFT_OUT])
def test_a_command_of_the_readme_runs(command: str, place: tuple[Path, dict[str, str]]) -> None:
    copy, environment = place
    if command.startswith("make"):
        command += " VENV=.venv"
    elif command.startswith("mpiexec"):
        command = command.replace("mpiexec", environment["MPIEXEC"], 1)
    done = subprocess.run(
        ["bash", "-c", command], cwd=copy, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == EXIT.get(command, 0), done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_the_readme_quotes_the_golden_1f1b_file() -> None:
    quoted = next(text for kind, text in BLOCKS if '"op": "RECV"' in text)
    assert "  [\n" + quoted in (ROOT / "traces" / "1f1b.json").read_text()


def test_the_readme_shows_the_plan_that_is_made(place: tuple[Path, dict[str, str]]) -> None:
    copy, environment = place
    command = next(command for command in COMMANDS if command.startswith("schedgen plan"))
    done = subprocess.run(shlex.split(command), cwd=copy, env=environment, capture_output=True, text=True, check=True)
    assert f"```\n{done.stdout}```" in README


def test_the_readme_shows_what_is_printed(place: tuple[Path, dict[str, str]]) -> None:
    copy, environment = place
    for command in (
        "schedgen compile 1f1b --stages 4 --microbatches 8 --output 1f1b.json",
        "schedgen new mine || true",
        "schedgen compile mine.py --stages 4 --microbatches 8 --output mine.json",
        "schedgen check 1f1b.json",
        "schedgen draw 1f1b.json",
        "schedgen diff 1f1b.json mine.json",
    ):
        assert command.removesuffix(" || true") in COMMANDS
        done = subprocess.run(
            ["bash", "-c", command], cwd=copy, env=environment | {"COLUMNS": "80"}, capture_output=True, text=True
        )
        if "compile" not in command and "new" not in command:
            assert f"```\n{done.stdout}```" in README, command


def test_every_scheme_is_in_the_readme_s_table() -> None:
    from schedgen.schemes import SCHEMES

    assert re.findall(r"^\| `([^`]+)` \|", README, flags=re.M) == list(SCHEMES)


def test_the_readme_s_commands_are_found() -> None:
    """Guards the pattern above: a README whose blocks are written otherwise would test nothing."""
    words = {shlex.split(command)[0] for command in COMMANDS}
    assert {"make", "schedgen", "mpiexec", "srun", "git"} <= words
