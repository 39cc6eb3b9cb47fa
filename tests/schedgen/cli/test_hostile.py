"""Hostile input (`make test-fuzz` tries 100,000), and small input that asked for much memory, time, or output."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import fuzz
import pytest
from examples import examples, further
from hypothesis import given, settings

import schedgen.cli.main
import schedgen.simulator.memory_plan
import schedgen.util.jit
from schedgen.checker import check
from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.schemes import load
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.simulator.machine import Machine
from schedgen.simulator.simulate import simulate
from schedgen.util.errors import clip

VGG16 = Path(__file__).parents[2] / "data" / "vgg16.txt"


def star(producers, descending):
    """A program in which the last stage, on another worker, reads all others, and the order in which these run."""
    last, sign = producers, -1 if descending else 1
    scheme = Scheme(
        "star",
        2,
        lambda s, b, d: ((s == last) + 0 * b * d, (s == last) + 0 * b * d),
        lambda s, b, d: sign * s + 10 * last * (d + (s == last)) + 0 * b,
        "star",
        "strict",
        edges=tuple((s, last) for s in range(last)),
    )
    return compile(scheme, Sizes(last + 1, 1, 2))


def steps(function):
    """The number of lines of Python that are executed: the work, on any machine."""
    count = 0

    def line(*_):
        nonlocal count
        count += 1
        return line

    before = sys.gettrace()
    sys.settrace(line)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("reader", [check, lambda program: simulate(program, {"F": 1, "B": 2}, Machine(alpha=1))])
def test_a_stage_that_reads_many_takes_linear_time(reader, descending, monkeypatch):
    monkeypatch.setattr(schedgen.util.jit, "SMALL", 10**12)
    small, large = (star(size, descending) for size in (60, 240))
    assert steps(lambda: reader(large)) < 6 * steps(lambda: reader(small))


@pytest.mark.parametrize(("cap", "memory"), [(None, 2), (lambda s: 2, None)], ids=["memory", "cap"])
def test_forwards_that_a_limit_holds_back_take_less_than_squared_time(cap, memory, monkeypatch):
    monkeypatch.setattr(schedgen.util.jit, "SMALL", 10**12)

    def work(microbatches):
        sizes = Sizes(2, microbatches)
        scheme = load("gpipe", sizes)._replace(cap=cap)
        return steps(lambda: compile(scheme, sizes, Options(mode="greedy", memory_limit=memory)))

    assert work(160) < 5 * work(40)


@pytest.mark.parametrize(
    "command",
    [
        ("stats", "{}", "--profile", "/dev/zero"),
        *further(("seal", "/dev/zero"), ("simulate", "{}", "--measured", "/dev/zero")),
    ],
    ids=" ".join,
)
def test_a_file_without_end_is_refused(command, run, refused, tmp_path):
    path = tmp_path / "gpipe.json"
    run("compile", "gpipe", "--stages", 2, "--microbatches", 2, "-o", path)
    message = refused(run(*(word.format(path) for word in command)), 1)
    assert message == "schedgen: /dev/zero: it has more than 256 MiB: too long to be read at once"


@pytest.fixture
def file(run, tmp_path):
    path = tmp_path / "file.json"
    run("compile", "zb-h1", "--stages", 2, "--microbatches", 2, "-o", path)
    return path


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("compile zb-v --stages 200000000 --microbatches 1", "more than 134217728 jobs: too many"),
        ("compile zb-v --stages 60000000 --microbatches 1", "30000000 workers are too many: 1048576 at the most"),
        ("compile dualpipe-v --stages 200000 --microbatches 200000000", "more than 134217728 jobs: too many"),
        ("compile pipedream --stages 2000000000 --microbatches 2", "more than 134217728 jobs: too many"),
        ("compile 1f1b-rr --stages 60000000 --microbatches 1", "60000000 workers are too many"),
        ("compile gpipe --stages 20000 --microbatches 2", "20000 workers x 20000 stages are too many"),
        ("compare --stages 8 --microbatches 8 --workers 2000000000", "2000000000 workers are too many"),
        ("plan {vgg16} --workers 200000000 --bandwidth 1 --microbatches 2", "1 to 4096 workers, not 200000000"),
    ],
)
def test_large_numbers_are_refused_before_anything_is_made_of_them(command, words, run, refused):
    output = () if command.startswith("compare") else ("-o", "-")
    with fuzz.memory(2**28):
        assert words in refused(run(*command.format(vgg16=VGG16).split(), *output), 2)


def test_an_entry_that_stands_twice_is_refused(file, run, refused, tmp_path):
    """Python's json takes the last one, and would silently drop the other."""
    twice = tmp_path / "twice.json"
    twice.write_text('{"F": 1, "B": 2, "F": 3}')
    sentence = f"{twice}: not JSON: an object has 'F' twice"
    assert sentence in refused(run("stats", file, "--profile", twice), 1)
    plan = run("plan", twice, "--workers", 2, "--microbatches", 4, "--bandwidth", 1e9, "-o", "-")
    assert "an object has 'F' twice" in refused(plan, 1)
    twice.write_text('{"stages": 2, "tied": [], "tied": [[0, 1]]}')
    assert "an object has 'tied' twice" in refused(
        run("compile", "1f1b", "--graph", twice, "--microbatches", 4, "-o", "-"), 1
    )
    text = file.read_text()
    twice.write_text(text.replace('"op": "FWD"', '"op": "BWD", "op": "FWD"', 1))
    assert f"{twice}: not JSON: an object has 'op' twice" in refused(run("seal", twice), 1)


def test_costs_that_stats_would_not_take_are_refused_by_check(file, run, refused):
    file.write_text(file.read_text().replace('"F": 1,', '"F": 10000000,'))
    for command in ("check", "stats", "simulate"):
        assert "a million times as long as the shortest" in refused(run(command, file), 1)


@pytest.mark.parametrize("text", ["\x1b[2J", " " * 200 + "\0", "a" * 79 + "\n", "\ud800" * 10**6, "a" * 81])
def test_what_is_quoted_is_short_and_printable(text):
    assert clip(text).isprintable() and len(clip(text)) <= 80


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    parser = schedgen.cli.main.parser
    schedgen.cli.main.parser = functools.cache(parser)  # making it takes longer than most answers
    yield fuzz.Range(tmp_path_factory.mktemp("fuzz"))
    schedgen.cli.main.parser = parser


BASES = 12 + len(fuzz.GOLDEN)


@given(case=fuzz.cases(BASES))
@settings(max_examples=examples(400, as_asked=True))
def test_hostile_input_is_answered(place, case):
    place.run(case)
