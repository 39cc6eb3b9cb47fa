"""The READMEs: every command in them runs, what they show is what is printed, and their links resolve."""

import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from standing_launch import StandingLaunch

import mpirun
import schedgen

ROOT = Path(__file__).parent.parent
DOCS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("*/docs/*.md"))
NAMES = ("README.md", "schedgen/README.md", "mpirun/README.md", *DOCS)
TEXT = "".join((ROOT / name).read_text() for name in NAMES)
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", TEXT, flags=re.S)
COMMANDS = list(dict.fromkeys(line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()))

LEFT_OUT = {"make test"}  # it runs this file
Place = tuple[Path, dict[str, str]]  # a folder and an environment
TRAIN = "mpiexec -n 4 python -m "
# Options that shorten commands: one golden schedule of each kind, as test_traces.py compiles all; one epoch, not three.
MORE = {
    "make run": " STEPS=1",
    "make traces": " GOLDEN='lpp-g4 zb-v 1f1b-tied 1f1b-rr fsdp-sharded 1f1b-tensor' BIN=build/tools",
    f"{TRAIN}mpirun.examples.digits zb-h1.json": " 1",
    f"{TRAIN}mpirun profile --model mpirun.examples.gpt:tiny --stages 4 --output profile.json": " --steps 1",
}
LAST = {"make run": next(text for _, text in BLOCKS if text.startswith("verify: "))}  # the end of a command's output
EXIT = {"schedgen diff 1f1b.json mine.json": 1}  # the files differ

# A stand-in for Slurm's srun: it starts the ranks with mpiexec.
SRUN = """while [ "$1" != python ]; do [ "$1" = -n ] && ranks=$2; shift; done
exec $MPIEXEC -n $ranks "$@\""""


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, warm_ranks: list[str]) -> Iterator[Place]:
    """A copy of the repository, and an environment in which the README's commands find what they need."""
    copy = tmp_path_factory.mktemp("readme") / "repository"
    skip = shutil.ignore_patterns(".venv*", "build", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=skip)
    venv = Path(sys.prefix)
    for name in (".venv", ".venv-system"):
        (copy / name).symlink_to(venv)
    tools = copy / "build" / "tools"
    tools.mkdir(parents=True)
    python = f"exec {shlex.join(warm_ranks)}"
    for name, text in {"srun": SRUN, "python": f'{python} "$@"', "schedgen": f'{python} -m schedgen "$@"'}.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    (copy / "vee.py").write_text(next(text for kind, text in BLOCKS if kind == "python" and "def w(" in text))
    mpiexec = os.environ.get("MPIEXEC", str(venv / "bin" / "mpiexec"))
    path = os.pathsep.join([str(tools), str(venv / "bin"), os.environ["PATH"]])
    inherited = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL", "MPI")}
    # MPI=system is run with this venv and its launcher in place of a site's.
    # The pictures that the READMEs show are 80 columns wide. mypy's cache outlives the copy.
    more = {"COLUMNS": "80", "MYPY_CACHE_DIR": str(ROOT / ".mypy_cache")}
    links = share_kernels(copy)
    yield copy, {**inherited, **more, "PATH": path, "MPIEXEC": mpiexec}
    for link in links:
        link.unlink()


def share_kernels(copy: Path) -> list[Path]:
    """Links by which the copy finds the repository's compiled kernels: numba names a folder by the path of sources."""
    kept, links = Path(os.environ["NUMBA_CACHE_DIR"]), []
    for folder in {file.parent.relative_to(ROOT) for file in (ROOT / "schedgen").rglob("*.py")}:
        sources = [str(root.resolve() / folder) for root in (ROOT, copy)]
        here, there = (kept / f"{folder.name}_{hashlib.sha1(path.encode()).hexdigest()}" for path in sources)
        here.mkdir(parents=True, exist_ok=True)
        if not there.exists():
            there.symlink_to(here)
            links.append(there)
    return links


@pytest.fixture(scope="module")
def four(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Done]]:
    """Runs `mpiexec -n 4 python -m MODULE ARGUMENTS`: the first command by itself, the others in one shared launch."""
    copy, environment = place
    waiting: list[StandingLaunch] = []

    def four(command: str) -> Done:
        if not waiting:
            waiting.append(StandingLaunch(4, environment, tmp_path_factory.mktemp("launch"), copy))
            return shell(command.replace("mpiexec", environment["MPIEXEC"], 1), place)
        return Done(*waiting[0].run(shlex.split(command.removeprefix(TRAIN)), 300))

    yield four
    for launch in waiting:
        launch.close()


def shell(command: str, place: Place) -> Done:
    copy, environment = place
    done = subprocess.run(
        ["bash", "-c", command], cwd=copy, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def ran(place: Place, four: Callable[[str], Done]) -> Callable[[str], Done]:
    """Runs a command of the READMEs, shortened and only once, and returns how it ended."""

    @functools.cache
    def ran(command: str) -> Done:
        assert command in COMMANDS
        more = MORE.get(command, "")
        if command.startswith("make"):
            more += " VENV=.venv --old-file=.venv/installed"  # nothing is to be installed
        if "--steps 5" in command:
            more += " --steps 1"
        if command.startswith("schedgen search"):
            more += " --budget 1"
        command = command.replace(" Makefile ", " .ci/constraints.txt ")  # a shorter text
        return four(command + more) if command.startswith(TRAIN) else shell(command + more, place)

    return ran


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in LEFT_OUT])
def test_a_command_of_the_readme_runs(command: str, ran: Callable[[str], Done]) -> None:
    done = ran(command)
    assert done.code == EXIT.get(command, 0), done.out + done.err
    assert "Traceback" not in done.err
    assert done.out.endswith(LAST.get(command, ""))


def test_the_readme_quotes_the_golden_1f1b_file() -> None:
    quoted = next(text for kind, text in BLOCKS if '"op": "RECV"' in text)
    assert "  [\n" + quoted in (ROOT / "traces" / "1f1b.json").read_text()


def test_the_readme_shows_a_whole_script_whose_loss_falls(ran: Callable[[str], Done]) -> None:
    quoted = next(text for kind, text in BLOCKS if kind == "python")
    assert quoted == (ROOT / "mpirun" / "examples" / "first_script.py").read_text()
    first, *_, last = re.findall(r"test (.*)", ran(f"{TRAIN}mpirun.examples.first_script").out)
    assert float(last) < float(first) / 4


def test_the_readme_shows_what_is_printed(ran: Callable[[str], Done]) -> None:
    for command in (
        "schedgen compile 1f1b --stages 4 --microbatches 8 --output 1f1b.json",
        "schedgen new mine",
        "schedgen compile mine.py --stages 4 --microbatches 8 --output mine.json",
        "schedgen check 1f1b.json",
        "schedgen draw 1f1b.json",
        "schedgen diff 1f1b.json mine.json",
        "schedgen plan tests/data/vgg16.txt --workers 4 --bandwidth 1e9 --partition-only",
    ):
        printed = ran(command).out
        if "compile" not in command and "new" not in command:
            assert f"```\n{printed}```" in TEXT, command


def test_the_page_on_one_microbatch_shows_what_the_passes_make(place: Place, ran: Callable[[str], Done]) -> None:
    ran("schedgen compile 1f1b --stages 2 --microbatches 2 --dump-passes passes --output two.json")
    written = "".join(file.read_text() for file in sorted((place[0] / "passes").iterdir()))
    page = (ROOT / "schedgen" / "docs" / "one-microbatch.md").read_text()
    shown = [text for kind, text in re.findall(r"```(\w*)\n(.*?)```", page, flags=re.S) if not kind]
    assert len(shown) == 2 and all(text in written for text in shown)


def test_every_scheme_is_in_the_readme_s_table() -> None:
    from schedgen.schemes import SCHEMES

    (chapter,) = re.findall(r"^## Schemes$(.*?)^###? ", TEXT, flags=re.M | re.S)
    assert re.findall(r"^\| `([^`]+)` \|", chapter, flags=re.M) == list(SCHEMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_link_to_a_file_resolves(name: str) -> None:
    def anchors(file: Path) -> set[str]:
        headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
        return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}

    readme = ROOT / name
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", readme.read_text()) if "://" not in link]
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        file = readme.parent / path if path else readme
        assert file.exists(), link
        assert not anchor or anchor in anchors(file), link


def test_every_file_of_mpirun_is_in_its_map() -> None:
    text = (ROOT / "mpirun" / "README.md").read_text()
    files = [f"{file.parent.name}/{file.name}" for file in (ROOT / "mpirun").glob("*/*.py")]
    listed = [file for file in files if f"({file})" in text]
    left_out = [file for file in files if file not in listed and not file.endswith("__init__.py")]
    assert listed and all(file.startswith("examples/") for file in left_out), left_out


def test_every_public_name_of_mpirun_is_in_its_table() -> None:
    table = (ROOT / "mpirun" / "README.md").read_text().split("## Public names")[1].split("\n## ")[0]
    assert [name for name in mpirun.__all__ if f"`{name}`" not in table] == []
    assert mpirun.UsageError is schedgen.UsageError


def test_the_readme_s_commands_are_found() -> None:
    """Guards the pattern above: a README whose blocks are written otherwise would test nothing."""
    words = {shlex.split(command)[0] for command in COMMANDS}
    assert {"make", "schedgen", "mpiexec", "srun", "git"} <= words
