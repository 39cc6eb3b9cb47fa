"""Jobs, each a plain torch script and the same with an Engine: few lines change, and the losses are equal."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from examples import further

JOBS = Path(__file__).parents[1] / "jobs"
SCRIPTS = sorted(str(file.relative_to(JOBS)) for file in JOBS.glob("*/*.py") if file.name in ("ours.py", "pipeline.py"))
ALWAYS = ("cnn/pipeline.py", "gan/ours.py", "hf/ours.py")
# Of the changed lines; a pipeline has to be told where to cut, so it may have more than data parallelism.
MOST, MOST_OF = 30, {"cnn/ours.py": 12}
# Forwards in bfloat16: sums of gradients, one a microbatch, are rounded to 8 bits.
TOLERANCE, TOLERANCE_OF = 1e-5, {"vit/ours.py": 2e-2}
NUMBER = re.compile(r"\d+\.\d+(?:e-?\d+)?")


def changed_lines(before: str, after: str) -> int:
    """How many lines a user removes or writes, whichever are more; empty ones are not counted."""
    signs = [line[0] for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[1:].strip()]
    return max(signs.count("-"), signs.count("+"))


@pytest.fixture(scope="module")
def plain(launch, tmp_path_factory) -> Callable[[str], tuple[list[str], Path]]:
    """Runs a job's plain script in one process; returns its lines and the folder for its files."""

    @functools.cache
    def plain(job: str) -> tuple[list[str], Path]:
        folder = tmp_path_factory.mktemp(job)
        done = launch(None, folder, program=(str(JOBS / job / "plain.py"),))
        assert done.code == 0, done.err
        return done.out.splitlines(), folder

    return plain


@pytest.mark.parametrize("script", [*ALWAYS, *further(*(script for script in SCRIPTS if script not in ALWAYS))])
def test_a_job_has_few_changed_lines_and_the_losses_of_plain_torch(script, plain, launch, tmp_path):
    file = JOBS / script
    assert changed_lines((file.parent / "plain.py").read_text(), file.read_text()) <= MOST_OF.get(script, MOST)
    lines, folder = plain(file.parent.name)
    done = launch(2, tmp_path, program=(str(file),))
    assert done.code == 0, done.err
    ours, tolerance = done.out.splitlines(), TOLERANCE_OF.get(script, TOLERANCE)
    assert [NUMBER.sub("x", line) for line in ours] == [NUMBER.sub("x", line) for line in lines] and lines
    for line, expected in zip(ours, lines, strict=True):
        numbers, wanted = ([float(number) for number in NUMBER.findall(text)] for text in (line, expected))
        assert numbers == pytest.approx(wanted, rel=tolerance), (line, expected)
    assert sorted(saved.name for saved in tmp_path.iterdir()) == sorted(saved.name for saved in folder.iterdir())
    for saved in folder.iterdir():
        torch.testing.assert_close(torch.load(tmp_path / saved.name), torch.load(saved), rtol=1e-4, atol=1e-5)
