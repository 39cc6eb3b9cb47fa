"""Ties in files and commands: an invalid tie is refused on its line, a changed one is shown by diff."""

from __future__ import annotations

import json

import pytest


@pytest.fixture(scope="module")
def tied_file(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("graph") / "tied.graph"
    path.write_text('{"stages": 4, "tied": [[0, 3]]}')
    return json.loads(run("compile", "1f1b", "--graph", path, "--microbatches", 2, "-o", "-").out)


@pytest.mark.parametrize(
    "tied",
    [None, [0, 3], [[0]], [[3, 0]], [[0, 4]], [[0, 3.0]], [[0, 3], [0, 3]], [[1, 2], [0, 3]]],
    ids=str,
)
def test_ties_that_are_none_are_refused_on_their_line(tied, tied_file, run, refused, tmp_path):
    path = tmp_path / "tied.json"
    file = {**tied_file, "tied": tied}
    path.write_text(json.dumps(file))
    assert "tied must " in refused(run("seal", path), 1)
    path.write_text(json.dumps(tied_file))
    run("seal", path)
    path.write_text(path.read_text().replace('"tied": [[0, 3]]', f'"tied": {json.dumps(tied)}'))
    message = refused(run("check", path), 1)
    assert message.startswith(f"schedgen: {path}:7: tied must ")


def test_a_file_without_ties_says_so(tied_file, run, refused, tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps({key: value for key, value in tied_file.items() if key != "tied"}))
    assert "tied must be a list" in refused(run("seal", path), 1)


@pytest.mark.parametrize(
    ("instruction", "words"),
    [
        ({"op": "ALLREDUCE", "buf": "t.1", "group": 1}, "there is no such tie"),
        ({"op": "ALLREDUCE", "buf": "t.0.0", "group": 1}, "ALLREDUCE is written as one of"),
        ({"op": "SEND", "buf": "t.0", "to": 1}, "SEND is written as one of"),
        ({"op": "FREE", "buf": "t.0"}, "FREE is written as one of"),
    ],
)
def test_a_buffer_that_no_tie_has_is_refused(instruction, words, tied_file, run, refused, tmp_path):
    path = tmp_path / "buffer.json"
    path.write_text(json.dumps(tied_file))
    run("seal", path)
    lines = path.read_text().splitlines(keepends=True)
    place = lines.index("  [\n") + 1
    lines.insert(place, f"   {json.dumps(instruction)},\n")
    path.write_text("".join(lines))
    message = refused(run("check", path), 1)
    assert message.startswith(f"schedgen: {path}:{place + 1}: rank 0: ") and words in message


def test_diff_shows_ties(run, graph_file, tmp_path):
    for name, tied in (("plain", []), ("tied", [[0, 3], [2, 1]])):
        path = tmp_path / f"{name}.json"
        run("compile", "1f1b", "--graph", graph_file(stages=4, tied=tied), "--microbatches", 2, "-o", path)
    result = run("diff", tmp_path / "plain.json", tmp_path / "tied.json")
    assert result.code == 1
    assert result.out.startswith("tied: () -> ((0, 3), (1, 2))\n")
    assert result.out.count('\n+{"op": "ALLREDUCE", "buf": "t.') == 4


def test_stats_count_a_tie_as_one_collective(run, graph_file, tmp_path):
    path = tmp_path / "tied.json"
    for tied, collectives in (([], 1), ([[0, 3]], 2)):
        run("compile", "1f1b", "--graph", graph_file(stages=4, tied=tied), "--microbatches", 2, "-o", path)
        numbers = json.loads(run("stats", path, "--json").out)
        assert numbers["collectives"] == collectives
