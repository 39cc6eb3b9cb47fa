"""new: a scheme's file that compiles for any sizes as it stands, and is never written over another."""

from __future__ import annotations

import json

import pytest


@pytest.mark.parametrize(
    ("S", "B", "W"), [(1, 1, None), (1, 4, 1), (4, 8, None), (8, 8, 4), (5, 3, 2), (2, 9, 1), (3, 2, 5)]
)
def test_what_it_writes_compiles_for_any_sizes(S, B, W, run, tmp_path):
    result = run("new", tmp_path / "mine")
    assert (result.code, result.err) == (0, "") and str(tmp_path / "mine.py") in result.out
    workers = () if W is None else ("--workers", W)
    sizes = ("--stages", S, "--microbatches", B, *workers)
    assert run("compile", tmp_path / "mine.py", *sizes, "-o", tmp_path / "mine.json") == (0, "", "")
    assert run("check", tmp_path / "mine.json").code == 0
    scheme = json.loads(run("stats", tmp_path / "mine.json", "--json").out)["scheme"]
    assert scheme == {"name": "mine", "workers": W or S, "stages": S, "microbatches": B}


def test_it_is_one_forward_one_backward(run, golden, tmp_path):
    run("new", tmp_path / "mine")
    (tmp_path / "1f1b.json").write_text(golden["1f1b"])
    sizes = ("--stages", 4, "--microbatches", 8)
    assert run("compile", tmp_path / "mine.py", *sizes, "--prefetch", 0, "-o", tmp_path / "mine.json").code == 0
    out = run("diff", tmp_path / "mine.json", tmp_path / "1f1b.json").out
    assert "@@" not in out and out.startswith("name: mine -> 1f1b\n")


def test_its_first_lines_say_how_to_compile_it(run, tmp_path):
    run("new", tmp_path / "mine.py")
    words = (tmp_path / "mine.py").read_text()
    assert words.startswith('"""mine: ') and "schedgen compile mine.py --stages 4" in words
    assert "NAME" not in words


def test_it_overwrites_nothing(run, refused, tmp_path):
    (tmp_path / "mine.py").write_text("precious")
    assert "is there already" in refused(run("new", tmp_path / "mine"), 1)
    assert (tmp_path / "mine.py").read_text() == "precious"
    assert "nowhere" in refused(run("new", tmp_path / "nowhere" / "mine"), 1)
    for name in ("", ".py", "a\nb", "a b", 'a"', "a\\", "-a"):
        assert "the name should be letters" in refused(run("new", "--", name), 2)
