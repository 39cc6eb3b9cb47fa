"""A file is its program and nothing else: same program, same bytes; any other byte is refused."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys

import hypothesis.strategies as st
import pytest
from drawn_programs import cases
from edited_programs import written
from examples import ASKED, examples
from hypothesis import given
from processes import ROOT

from schedgen.ir.file import VERSION, line_of, parse, read
from schedgen.ir.limits import Limits
from schedgen.ir.line_codec import OPEN, State, read_lines, write_lines
from schedgen.schemes import SCHEMES
from schedgen.util.errors import RefusedFile

SKIP = [[0, 1], [0, 2], [1, 2]]


@pytest.fixture(scope="module")
def small(run) -> bytes:
    """The smallest file with every kind of buffer and message in it."""
    small = run("compile", "fsdp", "--stages", 2, "--microbatches", 2, "-o", "-").out.encode()
    assert all(f'"{kind}.0' in small.decode() for kind in ("x", "g", "w", "dw"))
    return small


@given(cases(), st.sampled_from([None, 0, 7]))
def test_layout_is_not_content(case, indent):
    text = written(case.compile())
    other = json.dumps(json.loads(text), indent=indent)
    assert written(parse(other, "file")) == text
    with pytest.raises(RefusedFile, match=r"^file:\d+: "):
        read(io.BytesIO(other.encode()), "file")


@given(cases())
def test_an_instruction_stands_on_its_line(case):
    program = case.compile()
    lines = written(program).decode().splitlines()
    for row in range(len(program)):
        assert lines[line_of(program, row) - 1].strip().rstrip(",") == str(program.instruction(row))


@given(st.data(), cases())
def test_a_line_is_read_only_as_it_is_written(data, case):
    program = case.compile()
    row = data.draw(st.integers(0, len(program) - 1))
    line = written(program).splitlines(keepends=True)[line_of(program, row) - 1]
    place = data.draw(st.integers(0, len(line) - 1))
    line = (
        line[:place] + data.draw(st.sampled_from([b"", b"0", b"9", b"@1", b"/0", b".1", b' "', b", "])) + line[place:]
    )
    header = program.header
    groups, versions = len(header.groups), header.microbatches + 1 if header.weight_versions else 0
    limits = Limits(header.workers, header.stages, header.microbatches, groups, len(header.tied), versions)
    taken = read_lines(line, State(0, OPEN), limits)
    assert taken.wrong if not taken.lines else write_lines(taken.rows, not line.endswith(b",\n")) == line


@given(cases())
def test_one_instruction_more_is_one_line_more(case):
    """No running numbers: `git diff` shows what changed, the hash, and nothing else."""
    file = json.loads(written(case.compile()))
    before = written(parse(json.dumps(file), "file")).decode().splitlines()
    file["programs"][0].insert(0, file["programs"][0][0])
    after = written(parse(json.dumps(file), "file")).decode().splitlines()
    place = before.index("  [") + 1
    assert after[:place] + after[place + 1 : -2] == before[:-2]


COMPILE_ALL = """
import json, sys
from schedgen.cli.main import main
sys.exit(any([main(command) for command in json.load(sys.stdin)]))
"""


def test_same_bytes_whatever_the_hash_seed(golden, tmp_path):
    """With another seed than that of this process, which made the golden files."""
    commands = []
    for scheme in SCHEMES:
        header = json.loads(golden[scheme])
        options = [
            f"--{key}={','.join(map(str, value)) if isinstance(value, list) else value}"
            for key, value in header["scheme"].items()
            if key != "name"
        ]
        options += [f"--{key.replace('_', '-')}={header['lowering'][key]}" for key in ("fan_out", "prefetch")]
        commands.append(["compile", scheme, *options, "-o", str(tmp_path / scheme)])
    command, environment = [sys.executable, "-c", COMPILE_ALL], {**os.environ, "PYTHONHASHSEED": "1"}
    subprocess.run(command, input=json.dumps(commands), cwd=tmp_path, env=environment, text=True, check=True)
    for scheme in SCHEMES:
        assert (tmp_path / scheme).read_text() == golden[scheme], scheme


def test_a_file_cut_anywhere_is_refused_with_its_line(small, run, refused, tmp_path):
    path = tmp_path / "cut.json"
    lines = small.splitlines(keepends=True)
    for number, line in list(enumerate(lines))[:: 1 if ASKED else 3]:
        for kept, words in ((0, "the file ends here"), (len(line) // 2, "the file ends within this line")):
            path.write_bytes(b"".join(lines[:number]) + line[:kept])
            message = refused(run("check", path), 1)
            assert message.startswith(f"schedgen: {path}:{number + 1}: ")
            assert words in message if kept else words in message or "not a schedule" in message


def test_a_flipped_byte_is_refused(small, run, refused, tmp_path):
    path = tmp_path / "flipped.json"
    chance = random.Random(0)
    for _ in range(examples(200)):
        data = bytearray(small)
        place = chance.randrange(len(data))
        data[place] ^= chance.randrange(1, 256)
        path.write_bytes(data)
        message = refused(run("check", path), 1)
        assert message.startswith(f"schedgen: {path}:"), f"byte {place} as {data[place]}"


@pytest.mark.parametrize("version", [VERSION + 1, 10**8, 0, "1", None, 1.5])
@pytest.mark.parametrize("command", ["check", "seal"])
def test_another_format_version_is_refused(small, version, command, run, refused, tmp_path):
    path = tmp_path / "version.json"
    path.write_bytes(small.replace(b'{"schedgen": 2,', f'{{"schedgen": {json.dumps(version)},'.encode()))
    message = refused(run(command, path), 1)
    assert ("newer" in message) if command == "check" and version in (VERSION + 1, 10**8) else str(path) in message


@pytest.mark.parametrize(
    ("name", "options", "graph"),
    [
        ("per-consumer", ("gpipe", "--stages", 3, "--workers", 3), {"stages": 3, "edges": SKIP, "per_consumer": [0]}),
        ("tensor", ("1f1b", "--stages", 2, "--workers", 4, "--tensor", 2), {"stages": 4, "replicated": [0]}),
    ],
)
def test_a_file_of_version_1_is_the_same_program(name, options, graph, run, graph_file):
    """Its keys had other names: apart, parts, whole. Its hash and its canonical form are checked as they are."""
    new = run("compile", *options, "--microbatches", 2, "--graph", graph_file(**graph), "-o", "-").out.encode()
    old = (ROOT / "tests/data/version-1" / f"{name}.json").read_bytes()
    program, fault = read(io.BytesIO(old), "file")
    assert fault is None and written(program) == written(parse(old.decode(), "file")) == new != old
    assert "does not match" in read(io.BytesIO(old.replace(b'"strict"', b'"greedy"')), "file")[1]
    with pytest.raises(RefusedFile, match=r"file:\d+: not in canonical form"):
        read(io.BytesIO(old.replace(b'"tied": [', b'"tied":  [')), "file")


@pytest.mark.parametrize("data", [b"", b"\n", b"{}", b"[]", b"null", b"\xff\xfe\0", b"[" * 100_000, b"1" * 5000])
@pytest.mark.parametrize("command", ["check", "seal", "stats"])
def test_what_is_no_schedule_is_refused(data, command, run, refused, tmp_path):
    path = tmp_path / "other.json"
    path.write_bytes(data)
    assert refused(run(command, path), 1).startswith(f"schedgen: {path}:")
    assert path.read_bytes() == data


def test_the_sha_is_said_to_be_wrong_only_where_nothing_else_is(small, run, refused, tmp_path):
    path = tmp_path / "edited.json"
    path.write_bytes(small.replace(b'"n": "depth-first"', b'"n": "depth-fjrst"'))
    assert "SHA-256" in refused(run("check", path), 1)
    path.write_bytes(small.replace(b'   {"op": "NORM", "group": 0},\n', b"", 1))
    assert "rule 6" in refused(run("check", path), 1)


@pytest.mark.parametrize("name", ["\ud800", "two\nlines", "\x1b[2J", "größe", '"}'])
def test_a_name_from_a_file_cannot_break_the_output(small, name, run, refused, tmp_path):
    plain, path = tmp_path / "plain.json", tmp_path / "named.json"
    plain.write_bytes(small)
    path.write_bytes(small.replace(b'"fsdp"', json.dumps(name).encode()))
    sealed = run("seal", path)
    if sealed.code:
        refused(sealed, 1)
        return
    for command, code, length in (("check", path), 0, 1), (("diff", plain, path), 1, 2), (("stats", path), 0, None):
        result = run(*command)
        lines = result.out.split("\n")[:-1]
        assert result.code == code and all(line.isprintable() for line in lines)
        assert length is None or len(lines) == length
