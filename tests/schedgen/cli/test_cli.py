"""The commands: what they print, where, and the exit code: 0 done, 1 refused, 2 wrong usage; diff has diff(1)'s."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import signal
import stat
import subprocess
import sys

import pytest
from examples import further

GOOD = {"scheme": "gpipe", "--stages": "4", "--microbatches": "8", "-o": "-"}


def command_line(**changes):
    """`schedgen compile` with options changed; None leaves one out."""
    options = {**GOOD, **{key.replace("_", "-"): value for key, value in changes.items()}}
    name = options.pop("scheme")
    return [
        "compile",
        *([] if name is None else [name]),
        *(word for pair in options.items() if pair[1] is not None for word in pair),
    ]


@pytest.fixture
def process(tmp_path):
    """`python -m schedgen ARGUMENTS` as a process of its own, with bytes as streams."""

    def process(*arguments, stdin=b"", **more):
        command = [sys.executable, "-m", "schedgen", *map(str, arguments)]
        return subprocess.run(command, input=stdin, cwd=tmp_path, capture_output=True, check=False, **more)

    return process


@pytest.fixture
def files(golden, tmp_path):
    """Every scheme's golden file in a folder; its path by the scheme's name."""
    for scheme, text in golden.items():
        (tmp_path / f"{scheme}.json").write_text(text)
    return {scheme: tmp_path / f"{scheme}.json" for scheme in golden}


@pytest.fixture
def commands(run):
    """Every command, from `schedgen --help`."""
    return re.findall(r"^    (\w+) ", run("--help").out, re.M)


BUDGET = {"search": ("--budget", 1)}  # the example's search would use all of the default budget


def test_help_of_every_command_has_an_example_that_runs(commands, files, run, monkeypatch):
    expected = {"compile", "check", "seal", "stats", "simulate", "diff", "export", "compare", "plan", "new", "schemes"}
    assert expected <= {*commands}
    folder = files["1f1b"].parent
    monkeypatch.chdir(folder)
    for name in ("old.json", "new.json"):
        (folder / name).write_bytes(files["1f1b"].read_bytes())
    (folder / "profile.json").write_text('{"F": [1, 2, 1], "B": [2, 4, 2]}')
    for command in commands:
        result = run(command, "--help")
        assert (result.code, result.err) == (0, "")
        words = shlex.split(" ".join(result.out.partition("\nexample: ")[2].split()))
        assert words[:2] == ["schedgen", command]
        done = run(*words[1:], *BUDGET.get(command, ()))
        assert (done.code, done.err) == (0, ""), words


@pytest.mark.parametrize(("name", "near"), [("1f1", "1f1b"), ("zbv", "zb-v"), ("xyz", None)])
def test_an_unknown_scheme_is_told_what_is_near(name, near, run, refused):
    said = refused(run(*command_line(scheme=name)), 2)
    assert ".py or .csv" in said and said.partition("; did you mean ")[2] == (f"{near}?" if near else "")
    assert ("1f1b-rr" in said) == (near is None)  # else the list of all


def test_check_prints_a_line_a_file_and_stops_at_the_first_bad_one(files, run, tmp_path):
    paths = list(files.values())
    result = run("check", *paths)
    assert (result.code, result.err) == (0, "")
    assert [line.split(": ")[0] for line in result.out.splitlines()] == [str(path) for path in paths]
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    result = run("check", *paths)
    assert result.code == 1 and result.out.count("\n") == 1 and str(paths[1]) in result.err


@pytest.mark.parametrize("command", ["check", "seal", "stats", "diff"])
def test_what_is_no_file_is_one_sentence(command, run, refused, tmp_path):
    for path, words in ((tmp_path / "none.json", "No such file"), (tmp_path, "Is a directory")):
        arguments, code = ([command, path, path], 2) if command == "diff" else ([command, path], 1)
        message = refused(run(*arguments), code)
        assert str(path) in message and words in message


def test_diff_is_in_trouble_where_a_file_is_refused(files, run, refused):
    path = files["gpipe"]
    path.write_bytes(path.read_bytes()[:-1])
    assert str(path) in refused(run("diff", files["1f1b"], path), 2)


@pytest.mark.parametrize("target", ["missing/out.json", "taken/out.json"])
def test_output_into_nowhere_names_what_was_asked_for(target, run, refused, tmp_path):
    (tmp_path / "taken").write_text("a file, not a folder")
    path = tmp_path / target
    result = run(*command_line(**{"-o": str(path)}))
    message = refused(result, result.code)
    assert result.code in (1, 2)
    assert f"{path}: " in message  # and not the name of a file that only the command knows


def test_output_appears_whole_or_not_at_all(files, run, tmp_path):
    path = files["gpipe"]
    before = path.read_bytes()
    path.chmod(0o640)
    assert run(*command_line(scheme="none", **{"-o": str(path)})).code == 2
    path_again = tmp_path / "again.json"
    assert run(*command_line(**{"-o": str(path)})).code == run(*command_line(**{"-o": str(path_again)})).code == 0
    assert path.read_bytes() == path_again.read_bytes() == before
    umask = os.umask(0)
    os.umask(umask)
    assert [stat.S_IMODE(p.stat().st_mode) for p in (path, path_again)] == [0o640, 0o666 & ~umask]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*(p.name for p in files.values()), "again.json"])


def test_a_full_disk_names_the_file_and_leaves_no_part_of_it(files, run, refused, tmp_path, monkeypatch):
    """A limit on the size of files emulates it."""
    (tmp_path / "full").mkdir()
    monkeypatch.chdir(tmp_path / "full")
    monkeypatch.setattr("schedgen.util.jit.SMALL", 10**9)  # nothing is compiled, and written to numba's cache
    limit, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limit[1]))
    try:
        ended = run("new", "mine"), run("simulate", files["1f1b"], "--trace", "trace.json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    said = [refused(result, 1) for result in ended]
    assert said == [f"schedgen: {name}: File too large" for name in ("mine.py", "trace.json")]
    assert list((tmp_path / "full").iterdir()) == []
    assert refused(run("simulate", files["1f1b"], "--trace", "/dev/full"), 1).startswith("schedgen: /dev/full: ")


def test_seal_leaves_a_file_it_refuses_alone(files, run, refused):
    path = files["gpipe"]
    damaged = path.read_bytes().replace(b'"FWD"', b'"FORWARD"', 1)
    path.write_bytes(damaged)
    message = refused(run("seal", path), 1)
    assert "rank 0, instruction 0: " in message and "it is no instruction" in message
    assert path.read_bytes() == damaged


def test_standard_streams_make_a_pipe(process, run, tmp_path):
    compiled = process(*command_line())
    assert (compiled.returncode, compiled.stderr) == (0, b"")
    assert compiled.stdout.decode() == run(*command_line()).out
    sealed = process("seal", "-", stdin=json.dumps(json.loads(compiled.stdout)).encode())
    assert sealed.stdout == compiled.stdout
    checked = process("check", "-", stdin=sealed.stdout)
    assert (checked.returncode, checked.stderr) == (0, b"") and checked.stdout.count(b"\n") == 1
    refused = process("stats", "-", stdin=sealed.stdout[:100])
    assert (refused.returncode, refused.stdout) == (1, b"")
    assert refused.stderr.startswith(b"schedgen: standard input:")
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_goes_away_is_no_traceback(tmp_path):
    compiling = [sys.executable, "-m", "schedgen", *command_line(**{"--microbatches": "300"})]
    first = subprocess.Popen(compiling, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    first.stdout.readline()
    first.stdout.close()
    assert first.stderr.read() == b""
    first.stderr.close()
    assert first.wait() == 1


@pytest.mark.parametrize("name", ["-", *further("/dev/stdout")])
def test_what_goes_to_standard_output_is_there_alone(name, process, files, run, tmp_path, monkeypatch):
    (tmp_path / "costs.json").write_text('{"F": [1, 2, 1, 1], "B": [2, 4, 2, 2]}')
    sizes = ("--stages", 4, "--microbatches", 4)
    plan = ("plan", "costs.json", "--workers", 2, "--microbatches", 2, "--bandwidth", 1e9)
    monkeypatch.chdir(tmp_path)
    for command in ((*plan, "--schemes", "1f1b"), *further(("search", "1f1b", *sizes, "--budget", 1))):
        out = run(*command, "-o", name).out if name == "-" else process(*command, "-o", name).stdout.decode()
        (tmp_path / "printed").write_text(out)
        assert run("check", tmp_path / "printed").code == 0
    assert json.loads(process("simulate", "1f1b.json", "--trace", name).stdout)["traceEvents"]


def test_no_command_writes_over_a_file_that_it_reads(files, run, refused, graph_file, tmp_path, monkeypatch):
    """Its contents would be lost. A link to it is the same file; the name of a scheme is no file."""
    monkeypatch.chdir(tmp_path)
    schedule, link = files["1f1b"], tmp_path / "link"
    link.symlink_to(schedule)
    (tmp_path / "own.py").write_text("def w(s, b, d):\n    return s, s\n")
    (tmp_path / "costs.json").write_text('{"F": [1, 2, 1, 1], "B": [2, 4, 2, 2]}')
    graph = graph_file(stages=4)
    own = ("own.py", "--stages", 4, "--microbatches", 4)
    for command in (
        ("simulate", schedule, "--trace", link),
        ("simulate", schedule, "--profile", "costs.json", "--trace", "costs.json"),
        ("export", schedule, "--to", "torch-jobs", "-o", schedule),
        ("compile", *own, "--n", "1f1b", "-o", "own.py"),
        ("compile", "1f1b", "--graph", graph, "--microbatches", 4, "-o", graph),
        ("search", *own, "--budget", 1, "-o", "./own.py"),
        ("plan", "costs.json", "--workers", 2, "--microbatches", 2, "-o", tmp_path / "costs.json"),
    ):
        before = {file: file.read_bytes() for file in tmp_path.iterdir()}
        assert "would be overwritten, but it is read, too" in refused(run(*command), 2)
        assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    for _ in range(2):
        assert run("compile", "1f1b", "--stages", 4, "--microbatches", 8, "-o", "1f1b").code == 0
