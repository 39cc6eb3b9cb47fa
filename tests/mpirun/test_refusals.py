"""The golden table of refusals: whatever is wrong ends all ranks with one sentence, and none with a traceback."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from refusals import COMMANDS, MODEL, SCRIPT, SCRIPTS, TESTS, Table

TOWERS = {"graph": {"stages": 4, "edges": [[0, 3], [1, 2], [2, 3]]}, "microbatches": 8, "workers": 2}
SCHEDULES: dict[str, tuple[str, dict[str, Any]]] = {
    "two": ("1f1b", {"stages": 2, "microbatches": 2}),
    "chain": ("1f1b", {"stages": 4, "microbatches": 4, "workers": 2}),
    "pipedream": ("pipedream", {"stages": 2, "microbatches": 4}),
    "tensor2": ("1f1b", {"stages": 1, "microbatches": 2, "tensor": 2, "graph": {"stages": 2}}),
    "tensor8": ("1f1b", {"stages": 1, "microbatches": 2, "tensor": 2, "graph": {"stages": 8}}),
    "forwards": ("1f1b", {"stages": 2, "microbatches": 2, "forward": True}),
    "1f1b": ("1f1b", TOWERS),
    "ddp": ("ddp", TOWERS),
}
LAUNCHED = [(2, 2, f"{{two}} {TESTS}without_values"), (None, 1, f"{{two}} {MODEL}")]
# Files that are `two` with something changed. Of `byte` only the hash shows it: that byte has no meaning for a run.
CHANGED = {
    "empty": (r"(?s).*", ""),
    "job": (r'\{"op": "FWD", "stage": 1, "mb": 1\}', '{"op": "FWD", "stage": 1, "mb": 0}'),
    "byte": ('"generator": "schedgen', '"generator": "schedgem'),
    "newer": (r'\{"schedgen": 2,', '{"schedgen": 3,'),
}


@pytest.fixture(scope="module")
def files(compiled, text, tmp_path_factory) -> dict[str, Path]:
    """What the names in braces stand for."""
    folder = tmp_path_factory.mktemp("refusals")
    files = {name: compiled(scheme, **sizes) for name, (scheme, sizes) in SCHEDULES.items()}
    files |= {name: folder / name for name in (*CHANGED, "short", "folder", "text")}
    for name, (before, after) in CHANGED.items():
        sound = files["two"].read_text()
        files[name].write_text(re.sub(before, after, sound, count=1))
        assert files[name].read_text() != sound
    files["short"].write_bytes(b"x" * 16)  # of context, and none to predict
    files["folder"].mkdir()
    shutil.copy(text, files["text"])
    return files


def cases(table: Table) -> pytest.MarkDecorator:
    """Ranks, what is done, the sentence and the exit code of each row."""
    rows = [(ranks, what, why, code) for (ranks, code), rows in table.items() for what, why in rows.items()]
    return pytest.mark.parametrize(("ranks", "what", "why", "code"), rows, ids=[row[1][:70] for row in rows])


def check(ended: Any, why: str, code: int) -> None:
    """Assert that a run ended so; notes do not count."""
    (line,) = [line for line in ended.err.splitlines() if "note:" not in line]
    assert re.fullmatch(re.escape(f"mpirun: {why}").replace(r"\.\.\.", ".*"), line), line
    assert (ended.code, ended.out) == (code, "")


@cases(COMMANDS)
def test_a_command_line_is_refused_with_one_sentence(ranks, what, why, code, mistakes, files):
    (ended,) = mistakes(ranks, [shlex.split(what.format(**files))])
    check(ended, why.format(**files), code)


@cases(SCRIPTS)
def test_a_script_is_refused_with_one_sentence(ranks, what, why, code, scripts, files):
    (ended,) = scripts(ranks, [[SCRIPT + what, files["folder"]]])
    check(ended, why, code)


@pytest.mark.parametrize(("launched", "ranks", "what"), LAUNCHED)
def test_the_job_ends_with_that_sentence(launch, files, launched, ranks, what):
    """mpiexec's exit code is that of the ranks, and nothing else is printed; None: without mpiexec."""
    ended = launch(launched, *shlex.split(what.format(**files)))
    assert "Traceback" not in ended.err
    check(ended._replace(err="\n".join(ended.ours)), COMMANDS[ranks, 2][what].format(**files), 2)
