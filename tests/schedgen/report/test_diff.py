"""diff: what it says in words, and that its hunks turn one file into the other."""

from __future__ import annotations

import re

import pytest


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
