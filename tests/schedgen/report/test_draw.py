"""draw: what is drawn is what is simulated; the three pictures of Rahimi 2025; the terminal; the command."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from compiled import compiled
from terminal import in_terminal

from schedgen.checker import checked
from schedgen.report.draw.colours import HELD, LOOKS, SHARE_COLOURS, TRACK, colours
from schedgen.report.draw.scene import build_scene
from schedgen.schemes.scheme import Sizes
from schedgen.simulator.machine import Machine
from schedgen.simulator.simulate import simulate


def drawn(name, sizes, machine=None, **options):
    program = compiled(name, sizes, **options)
    machine = machine or Machine()
    run = simulate(program, program.header.cost, machine)
    return build_scene(name, f"{name}.json", program, run.timeline(), run.sizes, False)


def cells(scene):
    """By worker, as the pictures of Rahimi 2025 have them: (start, length, text, microbatch)."""
    bars = scene.bars
    rows = [[] for _ in range(scene.program.header.workers)]
    for start, length, look, stage, mb, worker in zip(
        bars.start, bars.length, bars.look, bars.stage, bars.mb, bars.worker, strict=True
    ):
        rows[worker].append((start, length, f"{LOOKS[look].letter}{stage}", mb))
    return rows


# The pictures of [Rahimi 2025, "Formal definitions of distributed schedules"]: a row a worker, a column a unit of
# time, colour the batch, text the direction and the stage; F takes 1 and B takes 2.


def test_the_seed_s_picture_of_gpipe():
    """A row a stage; "no two mini-batches can simultaneously be in the same stage"; the bubble in the middle."""
    scene = drawn("gpipe", Sizes(4, 8, 4))
    for s, row in enumerate(cells(scene)):
        forwards = [(s + b, 1, f"F{s}", b) for b in range(8)]
        backwards = [(11 + 2 * (3 - s) + 2 * b, 2, f"B{s}", b) for b in range(8)]
        assert row == forwards + backwards
    assert scene.latency == 33


def test_gaps_are_the_idle_time(tmp_path):
    """Also for workers with empty lists: 0 and 3 of the second scene."""
    (tmp_path / "inner.py").write_text("def w(s, b, d):\n    return s + 1, s + 1\n\ndef n(s, b, d):\n    return b\n")
    for scene in (
        drawn("fslpp", Sizes(4, 8, 4, 2), Machine(alpha=0.2, weight=3)),
        drawn(f"{tmp_path}/inner.py", Sizes(2, 8, 4), forward=True),
    ):
        gaps = scene.gaps()
        idle = np.zeros_like(scene.breakdown.time)
        np.add.at(idle, (gaps.worker, gaps.share), gaps.end - gaps.start)
        assert np.allclose(idle[:, 1:], scene.breakdown.time[:, 1:])


# Colours


def grey(colour):
    """Relative luminance [WCAG 2.1]."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    low, high = sorted((grey(a), grey(b)))
    return (high + 0.05) / (low + 0.05)


def test_kinds_of_jobs_differ_without_colour_and_labels_can_be_read():
    jobs = [look for look in LOOKS if look.chroma]
    for look in jobs:
        assert min(contrast(colour, look.ink) for colour in colours(look, 16)) > 4.5  # WCAG's least for text
    for a in jobs:
        for b in jobs:
            differ = min(contrast(*pair) for pair in zip(colours(a, 16), colours(b, 16), strict=True)) > 1.2
            assert a is b or differ or a.hatch != b.hatch
    assert len({look.letter for look in LOOKS}) == len(LOOKS)


def test_why_a_worker_waits_can_be_seen():
    assert min(contrast(colour, TRACK) for colour in SHARE_COLOURS) > 3  # WCAG's least for graphics
    assert len({*SHARE_COLOURS, HELD, TRACK}) == len(SHARE_COLOURS) + 2


# The terminal

PICTURE = """\
0 |F0F1F2F3............B0--F4B1--F5B2--F6B3--F7B4--..B5--..B6--..B7--|  73%    4
1 |..F0F1F2........B0--F3B1--F4B2--F5B3--F6B4--F7B5--..B6--..B7--....|  73%    3
2 |....F0F1....B0--F2B1--F3B2--F4B3--F5B4--F6B5--F7B6--..B7--........|  73%    2
3 |......F0B0--F1B1--F2B2--F3B3--F4B4--F5B5--F6B6--F7B7--............|  73%    1
"""


@pytest.fixture
def schedules(golden, tmp_path):
    for name in ("1f1b", "gpipe", "zb-h1"):
        (tmp_path / f"{name}.json").write_text(golden[name])
    return tmp_path


def test_a_file_or_a_pipe_gets_plain_text(run, schedules, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    result = run("draw", schedules / "1f1b.json")
    assert result.code == 0 and PICTURE in result.out and "\x1b" not in result.out and not result.err
    assert "busy 72.7%, warm-up 4.5%, dependency 13.6%, cool-down 9.1%" in " ".join(result.out.split())


@pytest.mark.parametrize("columns", [40, 53, 80, 200])
@pytest.mark.parametrize("scheme", ["1f1b", "zb-h1"])
def test_it_fits_the_width_and_jobs_stay_in_order(run, schedules, monkeypatch, columns, scheme):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = run("draw", schedules / f"{scheme}.json").out.splitlines()
    assert max(map(len, lines)) <= columns
    rows = [line for line in lines if re.match(r"\d \|", line)]
    assert len(rows) == 4 and len(set(map(len, rows))) == 1
    program = checked(str(schedules / f"{scheme}.json"))
    letters = {"FWD": "F", "BWD": "B", "BWD_I": "I", "BWD_W": "W"}
    if columns >= 53:  # a column for every job
        for rank, row in enumerate(rows):
            jobs = [json.loads(str(i))["op"] for i in program.instructions(rank) if i.mb >= 0 and i.kind == 0]
            assert re.findall("[FBIW]", row) == [letters[op] for op in jobs]


def test_a_terminal_gets_colour(schedules):
    pytest.importorskip("rich")
    text = in_terminal("draw", schedules / "1f1b.json", TERM="xterm-256color", COLORTERM="truecolor", COLUMNS="80")
    first = colours(LOOKS[0], 8)[0]
    red, green, blue = (int(first[at : at + 2], 16) for at in (1, 3, 5))
    assert f"48;2;{red};{green};{blue}mF0" in text
    bare = re.sub("\x1b\\[[0-9;]*m", "", text)
    assert "0 |F0F1F2F3............B0  F4B1  " in bare
    assert max(map(len, bare.splitlines())) <= 80


@pytest.mark.parametrize(
    "environment", [{"NO_COLOR": "1", "TERM": "xterm-256color"}, {"TERM": "dumb"}], ids=["NO_COLOR", "dumb"]
)
def test_a_terminal_without_colour_gets_plain_text(schedules, environment):
    text = in_terminal("draw", schedules / "1f1b.json", COLUMNS="80", **environment)
    assert PICTURE in text and "\x1b" not in text


def test_two_schedules_have_one_time_axis(run, schedules, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    both = run("draw", schedules / "gpipe.json", schedules / "zb-h1.json").out
    first, second = (re.findall(r"^\d \|(.*)\|", part, flags=re.M) for part in both.split("\n\n")[:2])
    assert {len(row) for row in first} == {2 * 33} and {len(row) for row in second} == {2 * 27}
    assert "gpipe: 4 workers" in both and "zb-h1: 4 workers" in both
    ends = {line.rindex("%") for line in both.splitlines() if re.match(r"\d \|", line)}
    assert len(ends) == 1  # what stands on the right is one column


def test_a_measured_run_is_drawn_over_its_simulation(run, schedules, tmp_path):
    profile, trace = tmp_path / "profile.json", tmp_path / "trace.json"
    profile.write_text(json.dumps({"F": 0.5, "B": 1, "alpha": 0.25}))
    assert run("simulate", schedules / "1f1b.json", "--profile", profile, "--trace", trace).code == 0
    out = " ".join(run("draw", schedules / "1f1b.json", "--measured", trace).out.split())
    latencies = re.findall(r"(measured|simulated)\. 1f1b: [^.]*\. Latency ([\d.]+) s", out)
    # (m + p - 1)(F + B) and, where messages take time, more; a plan from a trace has messages without time.
    assert latencies[1] == ("simulated", "16.5") and latencies[0][0] == "measured" and float(latencies[0][1]) > 16.5


def test_what_is_no_file_to_draw_is_one_sentence(run, refused, schedules, tmp_path):
    file = schedules / "1f1b.json"
    assert "not a trace" in refused(run("draw", file, "--measured", file), 1)
    assert "No such file" in refused(run("draw", tmp_path / "missing.json"), 1)
