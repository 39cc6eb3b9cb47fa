"""What the tests share: the command in-process, golden files, random schemes, and the reference machine."""

from __future__ import annotations

import contextlib
import io
import json
import re
from typing import NamedTuple

import drawn_programs
import pytest
from examples import examples
from hypothesis import HealthCheck, settings
from reference_machine import execute as run_program

from schedgen.checker import RULES, Memory, check
from schedgen.cli.main import main
from schedgen.schemes import SCHEMES

# The same examples every time; a slow machine fails nothing; every example writes its files anew.
settings.register_profile(
    "schedgen",
    max_examples=examples(100),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("schedgen")

FOUR_STAGES = (
    "ddp", "fsdp", "gpipe", "1f1b", "lpp", "fslpp", "zb-h1", "zb-h2", "chimera", "1f1b-rr", "pipedream",
    "pipedream-2bw",
)  # fmt: skip
# Compiled with W=4, S=4, B=8, the sizes of the pictures in Rahimi 2025.
GOLDEN = {
    "ddp": ("--workers", "4"),
    "fsdp": ("--workers", "4", "--fan-out", "3"),  # gradients go straight to the owner
    "gpipe": ("--workers", "4"),
    "1f1b": ("--workers", "4", "--prefetch", "0"),  # a RECV stands beside its SEND
    "lpp": ("--workers", "4", "--groups", "2"),
    "fslpp": ("--workers", "4", "--groups", "2"),
}
# The schemes with two stages a worker have 8 stages.
GOLDEN |= {name: ("--workers", "4") for name in SCHEMES if name not in GOLDEN}


class Result(NamedTuple):
    code: int
    out: str
    err: str


def _run(*arguments: object) -> Result:
    """`schedgen ARGUMENTS` in this process, with the streams a terminal would give it."""
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit:
            code = exit.code
    return Result(code, out.buffer.getvalue().decode(), err.buffer.getvalue().decode())


@pytest.fixture(scope="session")
def run():
    return _run


@pytest.fixture(scope="session")
def refused():
    """Assert that a command ends with `code`, nothing on stdout and one line on stderr; return that line."""

    def refused(result: Result, code: int) -> str:
        assert (result.code, result.out) == (code, ""), result
        assert result.err.endswith("\n") and result.err[:-1].isprintable(), repr(result.err)
        return result.err[:-1]

    return refused


@pytest.fixture
def graph_file(tmp_path_factory):
    """Write a graph file with these keys and values; its path."""

    def graph_file(**values):
        path = tmp_path_factory.mktemp("graph") / "model.graph"
        path.write_text(json.dumps(values))
        return path

    return graph_file


@pytest.fixture
def judge(run, tmp_path):
    """Write edited JSON, seal it and check it, as a user would; return the result and the sealed file."""

    def judge(file):
        path = tmp_path / "edited.json"
        path.write_text(json.dumps(file))
        assert run("seal", path) == (0, "", "")
        return run("check", path), path

    return judge


@pytest.fixture
def refused_where_it_is(judge, refused):
    """Assert that `check` refuses a file by this rule and in these words, on the line of what it quotes."""

    def refused_where_it_is(file, rule, words):
        result, path = judge(file)
        message = refused(result, 1)
        match = re.fullmatch(rf"schedgen: {re.escape(str(path))}:(\d+): rank (\d+): (.*) \(rule (\d+): (.*)\)", message)
        assert match, message
        line, rank, reason = int(match[1]), int(match[2]), match[3]
        assert words in reason, message
        assert (int(match[4]), match[5]) == (rule, RULES[rule]), message
        # The line named is the instruction quoted, or the end of the list that lacks one, on the rank named.
        lines = path.read_text().splitlines()
        assert lines[: line - 1].count("  [") == rank + 1
        here = lines[line - 1].strip().rstrip(",")
        assert reason.startswith(f"{here}: ") if reason.startswith("{") else here == "]"

    return refused_where_it_is


@pytest.fixture(scope="session")
def golden() -> dict[str, str]:
    """The text of every scheme's file at W=4, S=4, B=8."""
    texts = {}
    for scheme, options in GOLDEN.items():
        stages = 4 if scheme in FOUR_STAGES else 8
        sizes = ("--stages", str(stages), "--microbatches", "8", "-o", "-")
        texts[scheme] = _run("compile", scheme, *options, *sizes).out
    return texts


@pytest.fixture(scope="session")
def cases():
    return drawn_programs.cases()


@pytest.fixture(scope="session")
def execute():
    """Executes a program; returns, by rank, the peak of each kind of buffer, under the names that `check` uses."""
    return lambda program: [dict(zip(Memory._fields, most.values(), strict=True)) for most in run_program(program)]


@pytest.fixture(scope="session")
def runs_as_proved(execute):
    """Assert that a program is proved, and runs with the peaks that the checker reports."""

    def runs_as_proved(program):
        memory = check(program)
        assert execute(program) == [
            {field: int(peak[rank]) for field, peak in memory._asdict().items()}
            for rank in range(program.header.workers)
        ]

    return runs_as_proved
