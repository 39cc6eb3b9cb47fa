"""The pages of the documentation: every command and script in them runs, what they show is printed, links resolve."""

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
PACKAGES = ("schedgen", "mpirun")
FIRST = ["README.md", *(f"{package}/docs/tutorial.md" for package in PACKAGES)]  # in the order of reading
OTHERS = sorted(str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).glob("docs/**/*.md"))
PAGES = list(dict.fromkeys([*FIRST, *(f"{package}/README.md" for package in PACKAGES), *OTHERS]))
HOW_TO = [page for page in PAGES if "/how-to/" in page]  # a task each, whose commands need no other page but a script


def blocks(page: str) -> list[tuple[str, str]]:
    """The code blocks of a page: language and text."""
    return re.findall(r"```(\w*)\n(.*?)```", (ROOT / page).read_text(), flags=re.S)


BLOCKS = [block for page in PAGES for block in blocks(page)]
COMMANDS = list(dict.fromkeys(line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()))
SCRIPTS = [text for kind, text in BLOCKS if kind == "python"]
NAMED = {match[1]: text for text in SCRIPTS if (match := re.match(r"# (\w+\.py)\n", text))}  # files that commands use

Place = tuple[Path, dict[str, str]]  # a folder and an environment
TRAIN = "mpiexec -n 4 python "
# Options that shorten commands.
MORE = {
    "make run": " STEPS=1",
    f"{TRAIN}-m mpirun profile --model mpirun.examples.gpt:tiny --stages 4 --output profile.json": " --steps 1",
    "schedgen plan profile.json --workers 4 --microbatches 8 --memory 8e6 --output plan.json": " --schemes 1f1b,ddp",
}
LAST = {"make run": next(text for _, text in BLOCKS if text.startswith("verify: "))}  # the end of a command's output
EXIT = {"schedgen check broken.json": 1}  # a SEND is missing

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
    """A copy of the repository, and an environment in which the pages' commands find what they need."""
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
    for name, text in NAMED.items():
        (copy / name).write_text(text)
    mpiexec = os.environ.get("MPIEXEC", str(venv / "bin" / "mpiexec"))
    path = os.pathsep.join([str(tools), str(venv / "bin"), os.environ["PATH"]])
    inherited = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL", "MPI")}
    # MPI=system is run with this venv and its launcher in place of a site's.
    links = share_kernels(copy)
    # The pictures that the pages show are 80 columns wide.
    yield copy, {**inherited, "COLUMNS": "80", "PATH": path, "MPIEXEC": mpiexec}
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
    """Runs `mpiexec -n 4 python ...`: the first command by itself, the others in one shared launch."""
    copy, environment = place
    waiting: list[StandingLaunch] = []

    def four(command: str) -> Done:
        if not waiting:
            waiting.append(StandingLaunch(4, environment, tmp_path_factory.mktemp("launch"), copy))
            return shell(command.replace("mpiexec", environment["MPIEXEC"], 1), place)
        module, *arguments = shlex.split(command.removeprefix(TRAIN).removeprefix("-m "))
        return Done(*waiting[0].run([module.removesuffix(".py"), *arguments], 300))

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
    """Runs a command of the pages, shortened and only once, and returns how it ended."""

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


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs(command: str, ran: Callable[[str], Done]) -> None:
    done = ran(command)
    assert done.code == EXIT.get(command, 0), done.out + done.err
    assert "Traceback" not in done.err
    assert done.out.endswith(LAST.get(command, ""))


def test_every_script_is_run_by_a_command() -> None:
    """A script begins with the name of its file, for the commands, or is a file of the examples."""
    examples = {file.read_text(): file.stem for file in (ROOT / "mpirun" / "examples").glob("*.py")}
    names = [*(name.removesuffix(".py") for name in NAMED), *(examples[text] for text in SCRIPTS if text in examples)]
    assert len(names) == len(SCRIPTS)
    assert [name for name in names if not any(re.search(rf"\b{name}\b", command) for command in COMMANDS)] == []


def test_the_first_script_s_loss_falls(ran: Callable[[str], Done]) -> None:
    first, *_, last = re.findall(r"test (.*)", ran(f"{TRAIN}-m mpirun.examples.first_script").out)
    assert float(last) < float(first) / 4


def test_the_first_schedule_shows_what_is_printed(ran: Callable[[str], Done]) -> None:
    commands = [
        line for kind, text in blocks("schedgen/docs/tutorial.md") if kind == "sh" for line in text.splitlines()
    ]
    printed = "".join(done.out + done.err for done in map(ran, commands[1:]))
    shown = [text for kind, text in blocks("schedgen/docs/tutorial.md") if not kind]
    assert len(shown) == 4 and [text for text in shown if text not in printed] == []


def test_the_page_of_the_file_quotes_the_golden_1f1b() -> None:
    golden, (_, form) = (ROOT / "traces" / "1f1b.json").read_text(), blocks("schedgen/docs/file.md")[0]
    instructions = re.findall(r'^   \{"op.*\n', form, flags=re.M)
    assert len(instructions) == 3 and "  [\n" + "".join(instructions) in golden


def test_the_page_on_one_microbatch_shows_what_the_passes_make(place: Place, ran: Callable[[str], Done]) -> None:
    ran("schedgen compile 1f1b --stages 2 --microbatches 2 --dump-passes passes --output two.json")
    written = "".join(file.read_text() for file in sorted((place[0] / "passes").iterdir()))
    shown = [text for kind, text in blocks("schedgen/docs/one-microbatch.md") if not kind]
    assert len(shown) == 2 and all(text in written for text in shown)


def test_the_changed_lines_that_pages_show_are_those_of_the_jobs() -> None:
    jobs = ROOT / "tests" / "jobs"
    before, after = "", ""
    for file in jobs.glob("*/*.py"):
        if file.name == "plain.py":
            before += file.read_text()
        else:
            after += file.read_text()
    shown = [line for kind, text in BLOCKS if kind == "diff" for line in text.splitlines()]
    assert shown and [line for line in shown if line[0] in "- " and f"{line[1:]}\n" not in before] == []
    assert [line for line in shown if line[0] in "+ " and f"{line[1:]}\n" not in after] == []


def test_every_scheme_is_in_the_table() -> None:
    from schedgen.schemes import SCHEMES

    page = (ROOT / "schedgen" / "docs" / "reference.md").read_text()
    (chapter,) = re.findall(r"^## Schemes$(.*?)^## ", page, flags=re.M | re.S)
    named = [
        name for row in re.findall(r"^\| (`[^|]+) \|", chapter, flags=re.M) for name in row.strip("`").split("`, `")
    ]
    assert sorted(named) == sorted(SCHEMES)


@pytest.mark.parametrize("page", PAGES)
def test_every_link_to_a_file_resolves(page: str) -> None:
    def anchors(file: Path) -> set[str]:
        headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
        return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}

    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()) if "://" not in link]
    for link in links:
        path, _, anchor = link.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), link
        assert not anchor or anchor in anchors(file), link


def test_every_page_is_reached_from_the_readme() -> None:
    reached, new = set[Path](), {ROOT / "README.md"}
    while new:
        reached |= new
        links = [(page.parent, link) for page in new for link in re.findall(r"\]\(([^)#\s]+\.md)", page.read_text())]
        new = {(folder / link).resolve() for folder, link in links} - reached
    assert reached == {ROOT / page for page in PAGES}


def test_a_how_to_is_short() -> None:
    words = {page: len((ROOT / page).read_text().split()) for page in HOW_TO}
    assert len(words) == 15 and max(words.values()) <= 300, words


@pytest.mark.parametrize("package", PACKAGES)
def test_the_table_of_changes_names_files_that_exist(package: str) -> None:
    table = (ROOT / package / "README.md").read_text().split("| to change or add | begin in |")[1]
    files = re.findall(r"`([\w/]+\.py)`", table)
    assert len(files) > 25 and [file for file in files if not (ROOT / package / file).exists()] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_room_is_in_its_map(package: str) -> None:
    text = (ROOT / package / "README.md").read_text()
    rooms = {file.parent.relative_to(ROOT / package) for file in (ROOT / package).glob("*/**/__init__.py")}
    depth = {"schedgen": 1, "mpirun": 2}[package]
    assert [str(room) for room in rooms if len(room.parts) <= depth and f"]({room})" not in text] == []


def test_every_public_name_of_mpirun_is_in_the_reference() -> None:
    page = (ROOT / "mpirun" / "docs" / "reference.md").read_text()
    chapter = page.split("## Public names")[1].split("\n## ")[0]
    assert [name for name in mpirun.__all__ if f"`{name}`" not in chapter] == []
    assert {*mpirun.__all__} <= {*dir(mpirun)}  # for completion, though each is imported on first use
    assert mpirun.UsageError is schedgen.UsageError


def test_the_commands_are_found() -> None:
    """Guards the patterns above: pages whose blocks are written otherwise would test nothing."""
    words = {shlex.split(command)[0] for command in COMMANDS}
    assert {"make", "schedgen", "mpiexec", "srun", "python", "sed"} <= words and len(NAMED) == 6
