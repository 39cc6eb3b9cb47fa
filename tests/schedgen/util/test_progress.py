"""Progress bars: on a terminal, of commands that take long, erased in the end; nowhere else, never in the output."""

from __future__ import annotations

import io
import sys

import pytest

from schedgen.cli.main import main
from schedgen.util import progress

SIZES = ("--stages", "4", "--microbatches", "8")
SLOW = "def w(s, b, d): return (b, b) if s >= 0 else None\ndef n(s, b, d): return b * 9 + s + 8 * d\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def on_terminal(monkeypatch):
    """What a command writes to stderr, if that is a terminal and bars appear after so many seconds."""

    def on_terminal(*arguments, patience=0.0):
        monkeypatch.setattr(progress, "PATIENCE", patience)
        monkeypatch.setattr(sys, "stderr", Terminal())
        assert main([str(argument) for argument in arguments]) == 0
        return sys.stderr.getvalue()

    yield on_terminal
    progress.allow(quiet=True)


def seen(text):
    """The titles of bars, in order, and the line that remains in the end."""
    shown = [line.split(":")[0] for line in text.split("\r") if line.strip()]
    return list(dict.fromkeys(shown)), text.rpartition("\r")[2]


def test_what_takes_long_says_how_far_it_is_and_leaves_nothing(on_terminal, tmp_path):
    file = tmp_path / "1f1b.json"
    assert seen(on_terminal("compile", "1f1b", *SIZES, "-o", file)) == (["lower", "check"], "")
    assert seen(on_terminal("check", file)) == (["check"], "")
    shown = on_terminal("compare", "--stages", 2, "--microbatches", 2, "--workers", 2)
    assert "compare:   0%|" in shown and seen(shown)[1] == ""


def test_a_scheme_that_is_called_job_by_job_does_so_too(on_terminal, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    shown = on_terminal("compile", tmp_path / "slow.py", *SIZES, "-o", tmp_path / "slow.json")
    assert seen(shown)[0][0] == "w"


def test_bars_wait_for_two_seconds(on_terminal, tmp_path):
    assert progress.PATIENCE == 2
    assert on_terminal("compile", "1f1b", *SIZES, "-o", tmp_path / "1f1b.json", patience=60.0) == ""


def test_quiet_and_no_terminal_have_none(on_terminal, run, monkeypatch, tmp_path):
    file = tmp_path / "1f1b.json"
    assert on_terminal("compile", "1f1b", *SIZES, "-o", file, "--quiet") == ""
    assert on_terminal("check", "-q", file) == ""
    monkeypatch.setitem(sys.modules, "tqdm", None)  # not even looked for
    assert run("compile", "1f1b", *SIZES, "-o", tmp_path / "again.json") == (0, "", "")
    assert run("check", file).err == ""
    assert (tmp_path / "again.json").read_bytes() == file.read_bytes()
