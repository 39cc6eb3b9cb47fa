"""draw -o .svg, .png: labels, determinism, the pages' pictures, and the message without matplotlib."""

from __future__ import annotations

import re
import shlex
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

matplotlib = pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[3]
PICTURES = re.findall(r"schedgen draw (.*\.svg)$", (ROOT / "Makefile").read_text(), flags=re.M)
PINNED = re.search(r"^matplotlib==(.*)$", (ROOT / ".ci" / "constraints.txt").read_text(), flags=re.M)[1]


@pytest.fixture
def schedules(golden, tmp_path):
    for name in ("gpipe", "zb-h1", "fsdp"):
        (tmp_path / f"{name}.json").write_text(golden[name])
    return tmp_path


def texts(file):
    return [element.text for element in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")]


def test_an_svg_has_every_job_s_label_and_the_share_of_time(run, schedules):
    file = schedules / "a.svg"
    assert run("draw", schedules / "gpipe.json", "-o", file).code == 0
    said = texts(file)
    labels = Counter(text for text in said if re.fullmatch(r"[FB]\d", text))
    assert labels == {f"{kind}{b}": 4 for kind in "FB" for b in range(8)}
    assert said.count("73%") == 4 and "latency 33, busy 72.7%, peak 8 activations" in said
    assert "microbatch 0 to 7" in said
    assert run("draw", schedules / "gpipe.json", "--by", "stage", "-o", file).code == 0
    assert Counter(text for text in texts(file) if re.fullmatch(r"[FB]\d", text)) == labels
    assert "stage 0 to 3; number: microbatch" in texts(file)


def test_a_picture_of_many_jobs_is_wider_and_its_labels_fit(run, schedules):
    """8 workers with 32 forwards and backwards each: a label that does not fit loses its letter before its number."""
    plan, file = schedules / "many.json", schedules / "a.svg"
    assert run("compile", "1f1b", "--stages", 8, "--microbatches", 32, "-o", plan).code == 0
    assert run("draw", plan, "-o", file).code == 0
    width = float(re.search(r'width="([\d.]+)pt"', file.read_text())[1])
    assert 9 * 72 < width <= 14 * 72
    said = texts(file)
    assert "B31" in said and "9" in said and "F9" not in said
    unit = (width - 72 * (0.42 + 1.7)) / 117  # (32 + 8 - 1) (1 + 2)
    for text in {text for text in said if re.fullmatch(r"[FB]?\d+", text) and text in ("B31", "9")}:
        assert points(text) < unit * (2 if text[0] == "B" else 1)


def points(text):
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    return TextPath((0, 0), text, size=6.5, prop=FontProperties(family="DejaVu Sans")).get_extents().width


def test_kinds_of_jobs_are_told_apart_by_hatching(run, schedules):
    file = schedules / "a.svg"
    assert run("draw", schedules / "zb-h1.json", "-o", file).code == 0
    patterns = set(re.findall(r'<pattern id="(\w+)"', file.read_text()))
    assert len(patterns) == 4  # I and W, as bars and in the legend
    assert {"F  forward", "I  backward, inputs", "W  backward, weights"} <= set(texts(file))


def test_the_same_schedule_gives_the_same_svg(run, schedules):
    files = [schedules / name for name in ("a.svg", "b.svg")]
    for file in files:
        assert run("draw", schedules / "fsdp.json", "--alpha", "0.1", "--transfers", "-o", file).code == 0
    first, second = (file.read_bytes() for file in files)
    assert first == second and b"<dc:date>" not in first


def test_transfers_are_drawn_where_they_are_asked_for(run, schedules):
    with_them, without = schedules / "a.svg", schedules / "b.svg"
    assert run("draw", schedules / "fsdp.json", "--transfers", "-o", with_them).code == 0
    assert run("draw", schedules / "fsdp.json", "-o", without).code == 0
    said = set(texts(with_them)) - set(texts(without))
    assert said == {"sends w", "sends dw"}  # FSDP sends neither activations nor their gradients
    assert "LineCollection" in with_them.read_text() and "LineCollection" not in without.read_text()


def test_without_matplotlib_the_extra_is_named(run, refused, schedules, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "schedgen.report.draw.figure", raising=False)
    words = refused(run("draw", schedules / "gpipe.json", "-o", schedules / "a.svg"), 2)
    assert "pip install 'schedgen[draw]'" in words and not (schedules / "a.svg").exists()


@pytest.mark.skipif(matplotlib.__version__ != PINNED, reason=f"the pictures are made by matplotlib {PINNED}")
@pytest.mark.parametrize("command", PICTURES)
def test_the_pages_pictures_are_those_of_today(run, tmp_path, monkeypatch, command):
    *arguments, _, committed = shlex.split(command)
    monkeypatch.chdir(ROOT)
    assert run("draw", *arguments, "-o", tmp_path / "again.svg").code == 0
    assert (tmp_path / "again.svg").read_bytes() == (ROOT / committed).read_bytes(), "make pictures"
    pages = [ROOT / "README.md", ROOT / "schedgen" / "docs" / "tutorial.md"]
    assert any(f"/{Path(committed).name})" in page.read_text() for page in pages)
