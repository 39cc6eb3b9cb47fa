"""diff: what it says in words, and that its hunks turn one file into the other."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedgen.report.diff import _columns


@pytest.fixture
def file(run, tmp_path):
    """A schedule's file."""

    def file(scheme, *options):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        sizes = ("--stages", "4", "--microbatches", "8")
        assert run("compile", scheme, *sizes, *options, "-o", path) == (0, "", "")
        return path

    return file


PAIRS = [
    (("1f1b",), ("gpipe",)),
    (("1f1b",), ("1f1b", "--prefetch", "0")),
    (("gpipe", "--workers", "3"), ("gpipe",)),
    (("gpipe",), ("gpipe", "--workers", "3")),
    (("fsdp", "--workers", "4"), ("fsdp", "--workers", "4", "--fan-out", "3", "--weight-slots", "1")),
    (("lpp", "--workers", "4", "--groups", "2"), ("fslpp", "--workers", "4", "--groups", "2")),
]


@pytest.mark.parametrize(("a", "b"), PAIRS, ids=["-".join([a[0], *b]) for a, b in PAIRS])
def test_its_hunks_turn_one_files_lines_into_the_others(a, b, file, run):
    a, b = file(*a), file(*b)
    result = run("diff", a, b)
    assert (result.code, result.err) == (1, "")
    listed = [[line.strip(" ,") for line in path.read_text().splitlines()] for path in (a, b)]
    lines = result.out.splitlines()
    hunks = [i for i, line in enumerate(lines) if line.startswith("@@")]
    assert hunks
    for i in hunks:
        place = re.fullmatch(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", lines[i])
        for side, (at, count) in enumerate((place.group(1, 2), place.group(3, 4))):
            at, count = int(at), int(count or 1)
            part = []
            for line in lines[i + 1 :]:
                if line[1:2] != "{":
                    break
                part += [line[1:]] if line[0] in (" -", " +")[side] else []
            assert len(part) == count
            assert part == listed[side][at - 1 : at - 1 + count]
    # And nothing else differs: every instruction that only one of them has is in a hunk.
    for side, sign in ((0, "-"), (1, "+")):
        shown = sorted(line[1:] for line in lines if line[:2] == sign + "{")
        own, other = (list(filter(lambda line: line.startswith('{"op"'), listed[k])) for k in (side, 1 - side))
        assert set(own) - set(other) <= set(shown)


def test_numbers_come_first_and_say_what_changed(file, run):
    result = run("diff", file("gpipe"), file("zb-h1"))
    words = result.out[: result.out.index("\n--- ")].splitlines()
    assert words[:2] == ["name: gpipe -> zb-h1", "n: breadth-first -> zb-h1"]
    # W = 4, S = 4, B = 8: gpipe 3 (8 + 4 - 1) = 33; zb-h1 3 B + (S - 1) (1 + 1 - 1) = 27 [Qi et al. 2023, table 2]
    assert "latency: 33 -> 27" in words
    assert "bubble: 27.2727% -> 11.1111%" in words
    assert "peak saved: 8 -> 4" in words
    assert words[-1].startswith("unchanged: ") and "messages 48" in words[-1]


def test_a_change_of_the_header_alone_is_a_difference(file, run):
    a = file("gpipe")
    b = file("gpipe", "--cost", "F=1,B=3")
    result = run("diff", a, b)
    assert result.code == 1
    assert "cost: {'F': 1, 'B': 2} -> {'F': 1, 'B': 3}" in result.out and "latency: 33 -> 44" in result.out
    assert "@@" not in result.out and "messages 48" in result.out


def test_the_directions_that_name_owners_are_a_difference(file, tmp_path, run):
    scheme, files = tmp_path / "away.py", []
    for split in (False, True):
        text = "def w(s, b, d): return s * (d == 0) + (s + 1) % 4 * (d > 0), s\ndef n(s, b, d): return b\n"
        scheme.write_text(f"{text}split = {split}\n")
        files.append(file(scheme, "--forward"))
    result = run("diff", *files)
    assert result.code == 1 and "owners named by: F B -> F I W" in result.out.splitlines()
    assert run("diff", files[0], files[0]).code == 0


def test_the_jobs_of_gpipe_and_1f1b_are_seen_on_a_screen(file, run):
    files = file("gpipe"), file("1f1b")
    result = run("diff", "--jobs", *files)
    assert result.code == 1 and len(result.out.splitlines()) < 24 < 300 < len(run("diff", *files).out.splitlines())
    assert (
        """
rank 2: 16 jobs, 6 moved
- F0 F1 F2 .. F7 B0    .. B5    B6 B7
+ F0 F1          B0 F2 .. B5 F7 B6 B7
"""
        in result.out
    )
    assert "rank" not in run("diff", "--jobs", files[0], file("gpipe", "--prefetch", "0")).out


def test_jobs_that_change_ranks_and_halves_of_backwards_are_counted(file, run):
    out = run("diff", "--jobs", file("1f1b"), file("zb-h1")).out
    assert "rank 0: 24 jobs, 0 moved, 8 from no rank" in out
    assert "\n- F0 .. F3 B0    F4 .. B3    F7 B4    .. B7\n+ F0 .. F3 I0 W0 F4 .. I3 W3 F7 I4 W4 .. I7 W7\n" in out
    assert (
        "rank 3: 16 jobs, 0 moved, 8 to rank 0, 8 from rank 0"
        in run("diff", "--jobs", file("1f1b"), file("chimera")).out
    )


@given(st.permutations(range(7)), st.integers(0, 7))
def test_what_stays_is_the_longest_common_order(order, left_out):
    old, new = [("F", 0, k) for k in range(7)], [("F", 0, k) for k in order[left_out:]]
    columns = _columns(old, new)
    assert [[job for job in side if job] for side in zip(*columns, strict=True)] == [old, new]
    longest = [0] * 7
    for k in order[left_out:]:
        longest[k] = 1 + max(longest[:k], default=0)
    assert sum(None not in column for column in columns) == max(longest)


def test_jobs_of_other_sizes_are_refused(file, run, refused, tmp_path):
    assert run("compile", "1f1b", "--stages", "4", "--microbatches", "4", "-o", tmp_path / "four.json").code == 0
    words = refused(run("diff", "--jobs", file("1f1b"), tmp_path / "four.json"), 2)
    assert "--jobs compares schedules of the same sizes, not 4 stages and 8 microbatches with 4 stages and 4" in words
