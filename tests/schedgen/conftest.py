"""What the tests share: the command in-process, golden files, random schemes, and the reference machine."""

from __future__ import annotations

import contextlib
import io
import json
import re
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
from examples import examples
from hypothesis import HealthCheck, event, settings
from hypothesis.extra.numpy import arrays

from schedgen.checker import RULES, Memory, check
from schedgen.cli.main import main
from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.ir.instructions import DIRECTIONS, B, F
from schedgen.ir.reference_machine import execute as run_program
from schedgen.schemes import SCHEMES
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.util.errors import RefusedFile

# The same examples every time; a slow machine fails nothing; every example writes its files anew.
settings.register_profile(
    "schedgen",
    max_examples=examples(100),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("schedgen")

FOUR_STAGES = (
    "ddp", "fsdp", "gpipe", "1f1b", "lpp", "fslpp", "zb-h1", "zb-h2", "chimera", "1f1b-rr", "pipedream",
    "pipedream-2bw",
)  # fmt: skip
# Compiled with W=4, S=4, B=8, the sizes of the pictures in Rahimi 2025.
GOLDEN = {
    "ddp": ("--workers", "4"),
    "fsdp": ("--workers", "4", "--fan-out", "3"),  # gradients go straight to the owner
    "gpipe": ("--workers", "4"),
    "1f1b": ("--workers", "4", "--prefetch", "0"),  # a RECV stands beside its SEND
    "lpp": ("--workers", "4", "--groups", "2"),
    "fslpp": ("--workers", "4", "--groups", "2"),
}
# The schemes with two stages a worker have 8 stages.
GOLDEN |= {name: ("--workers", "4") for name in SCHEMES if name not in GOLDEN}


class Result(NamedTuple):
    code: int
    out: str
    err: str


def _run(*arguments: object) -> Result:
    """`schedgen ARGUMENTS` in this process, with the streams a terminal would give it."""
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit:
            code = exit.code
    return Result(code, out.buffer.getvalue().decode(), err.buffer.getvalue().decode())


@pytest.fixture(scope="session")
def run():
    return _run


@pytest.fixture(scope="session")
def refused():
    """Assert that a command ends with `code`, nothing on stdout and one line on stderr; return that line."""

    def refused(result: Result, code: int) -> str:
        assert (result.code, result.out) == (code, ""), result
        assert result.err.endswith("\n") and result.err[:-1].isprintable(), repr(result.err)
        return result.err[:-1]

    return refused


@pytest.fixture
def graph_file(tmp_path_factory):
    """Write a graph file with these keys and values; its path."""

    def graph_file(**values):
        path = tmp_path_factory.mktemp("graph") / "model.graph"
        path.write_text(json.dumps(values))
        return path

    return graph_file


@pytest.fixture
def judge(run, tmp_path):
    """Write edited JSON, seal it and check it, as a user would; return the result and the sealed file."""

    def judge(file):
        path = tmp_path / "edited.json"
        path.write_text(json.dumps(file))
        assert run("seal", path) == (0, "", "")
        return run("check", path), path

    return judge


@pytest.fixture
def refused_where_it_is(judge, refused):
    """Assert that `check` refuses a file by this rule and in these words, on the line of what it quotes."""

    def refused_where_it_is(file, rule, words):
        result, path = judge(file)
        message = refused(result, 1)
        match = re.fullmatch(rf"schedgen: {re.escape(str(path))}:(\d+): rank (\d+): (.*) \(rule (\d): (.*)\)", message)
        assert match, message
        line, rank, reason = int(match[1]), int(match[2]), match[3]
        assert words in reason, message
        assert (int(match[4]), match[5]) == (rule, RULES[rule]), message
        # The line named is the instruction quoted, or the end of the list that lacks one, on the rank named.
        lines = path.read_text().splitlines()
        assert lines[: line - 1].count("  [") == rank + 1
        here = lines[line - 1].strip().rstrip(",")
        assert reason.startswith(f"{here}: ") if reason.startswith("{") else here == "]"

    return refused_where_it_is


@pytest.fixture(scope="session")
def golden() -> dict[str, str]:
    """The text of every scheme's file at W=4, S=4, B=8."""
    texts = {}
    for scheme, options in GOLDEN.items():
        stages = 4 if scheme in FOUR_STAGES else 8
        sizes = ("--stages", str(stages), "--microbatches", "8", "-o", "-")
        texts[scheme] = _run("compile", scheme, *options, *sizes).out
    return texts


class Case(NamedTuple):
    """A random scheme and the options it is compiled with; arrays are (D, S, B)."""

    sizes: Sizes
    weights: np.ndarray
    compute: np.ndarray
    n: np.ndarray
    edges: tuple[tuple[int, int], ...]
    per_consumer: tuple[int, ...]
    cost: dict[str, int]
    weight_slots: int
    fan_out: int
    prefetch: int
    recompute: list[int | tuple[int, int]]
    tied: list[set[int]]

    def scheme(self):
        return Scheme(
            "random",
            self.sizes.workers,
            lambda s, b, d: (self.weights[d, s, b], self.compute[d, s, b]),
            lambda s, b, d: self.n[d, s, b],
            "random",
            "greedy",
            split=len(self.cost) == 3,
            edges=self.edges,
            per_consumer=self.per_consumer,
        )

    def options(self, **more):
        named = ("cost", "weight_slots", "fan_out", "prefetch", "recompute")
        tied = [sorted(stages) for stages in self.tied]
        return Options(**({name: getattr(self, name) for name in named} | {"tied": tied} | more))

    def compile(self, **more):
        return compile(self.scheme(), self.sizes, self.options(**more))


@st.composite
def _cases(draw) -> Case:
    """Any placement (also another worker for the backward), any owners, any n, any DAG that ends in one loss."""
    S, batches, workers, directions = (draw(st.integers(*ends)) for ends in ((1, 4), (1, 4), (1, 4), (2, 3)))
    shape = (directions, S, batches)
    worker = st.integers(0, workers - 1)
    compute = draw(arrays(np.int32, shape, elements=worker))
    if draw(st.booleans()):
        compute[B] = compute[F]
    compute[directions - 1] = compute[B]  # W runs where I ran
    weights = draw(
        st.one_of(
            arrays(np.int32, (1, S, 1), elements=worker),  # one owner a stage
            arrays(np.int32, shape, elements=worker),  # several
            st.just(compute),  # weights never travel
        )
    )
    edges = [(p, c) for p in range(S - 1) for c in sorted(draw(st.sets(st.integers(p + 1, S - 1), min_size=1)))]
    forks = [p for p in range(S - 1) if sum(producer == p for producer, _ in edges) > 1]
    return Case(
        Sizes(S, batches, workers),
        np.broadcast_to(weights, shape),
        compute,
        draw(arrays(np.int32, shape, elements=st.integers(0, 9))),
        tuple(edges),
        tuple(p for p in forks if draw(st.booleans())),
        {name: draw(st.integers(1, 3)) for name in DIRECTIONS[directions]},
        weight_slots=draw(st.integers(1, 3)),
        fan_out=draw(st.integers(1, 3)),
        prefetch=draw(st.integers(0, 2)),
        recompute=draw(
            st.lists(
                st.one_of(st.integers(0, S - 1), st.tuples(st.integers(0, S - 1), st.integers(0, batches - 1))),
                max_size=2,
            )
        ),
        tied=draw(st.lists(st.sets(st.integers(0, S - 1), min_size=2), max_size=3)) if S > 1 else [],
    )


@pytest.fixture(scope="session")
def cases():
    return _cases()


@pytest.fixture(scope="session")
def execute():
    """Executes a program; returns, by rank, the peak of each kind of buffer, under the names that `check` uses."""
    return lambda program: [dict(zip(Memory._fields, most.values(), strict=True)) for most in run_program(program)]


@pytest.fixture(scope="session")
def runs_as_proved(execute):
    """Assert that a program is proved, and runs with the peaks that the checker reports."""

    def runs_as_proved(program):
        memory = check(program)
        assert execute(program) == [
            {field: int(peak[rank]) for field, peak in memory._asdict().items()}
            for rank in range(program.header.workers)
        ]

    return runs_as_proved


@pytest.fixture(scope="session")
def runs_if_accepted(runs_as_proved):
    """Assert the same of a damaged program, unless it is refused."""

    def runs_if_accepted(program):
        try:
            check(program)
        except RefusedFile:
            event("refused")
            return
        event("accepted")
        runs_as_proved(program)

    return runs_if_accepted
