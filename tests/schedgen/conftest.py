"""What the tests share: the command in-process, golden files, and files that are edited and checked."""

from __future__ import annotations

import json
import re

import command
import pytest
from damage import BASES
from examples import examples
from hypothesis import HealthCheck, settings
from processes import ROOT

from schedgen.checker import RULES

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


@pytest.fixture(scope="session")
def run():
    return command.run


@pytest.fixture(scope="session")
def refused():
    return command.refused


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
    """The text of every golden schedule, two of them with other options: without prefetch a RECV stands beside its
    SEND, and with a fan-out of 3 gradients go straight to the owner."""
    texts = {path.stem: path.read_text() for path in (ROOT / "traces").glob("*.json")}
    for name, *options in ("1f1b", "--prefetch", 0), ("fsdp", "--workers", 4, "--fan-out", 3):
        texts[name] = command.run("compile", name, *options, "--stages", 4, "--microbatches", 8, "-o", "-").out
    return texts


@pytest.fixture(scope="session")
def bases(golden, tmp_path_factory) -> dict[str, str]:
    """The texts of schedules that are damaged: the golden ones, and small ones with every feature."""
    texts, graph = {}, tmp_path_factory.mktemp("graph") / "graph"
    for name, (words, values) in BASES.items():
        graph.write_text(json.dumps(values))
        texts[name] = command.run("compile", *words.split(), *["--graph", graph] * bool(values), "-o", "-").out
    return golden | texts
