"""Every command that reads user input must answer hostile input with one sentence, in little time and memory.

Hypothesis damages schedules, profiles, traces, torch's CSV and options by
`mutations` and passes them to a command. An answer is right if its
exit code is documented, its output is what that code requires, and it takes at
most SECONDS, and MEMORY bytes beyond those that the process has.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import resource
import shlex
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import hypothesis.strategies as st
import mutations
from command import Result, run
from hypothesis import event

from schedgen.compiler.compile import compile
from schedgen.ir.file import write
from schedgen.schemes.scheme import Scheme, Sizes

SECONDS = 10.0  # of processor time that a command may take
MEMORY = 2**28  # bytes that it may add to the address space
SENTENCE = 1000  # characters of an error, the file's name left out

# What a command may add on stderr though it has done what it was asked for: of torch's lists.
NOTES = r"(schedgen: note: .*\n)+"
GOLDEN = sorted((Path(__file__).parents[2] / "traces").glob("*.json"))
OPTIONS = ("--cost", "--alpha", "--beta", "--activation", "--weight", "--saved")


class Case(NamedTuple):
    """One input: the kind of file, which file, how it is damaged, and which command reads it."""

    kind: str  # schedule, profile, trace, actions or option
    base: int
    steps: tuple[tuple[int, int], ...]  # (mutation, its seed)
    deep: bool  # only lines of a schedule change, so that most pass the reader
    sealed: bool  # whether a damaged schedule has the right hash
    command: int  # which of the commands that read this kind


class Failure(AssertionError):
    """An answer that no command may give."""


def schedules() -> list[bytes]:
    """The files that are damaged: small ones with every feature, then the golden ones."""
    commands = (
        "fsdp --stages 2 --microbatches 2",
        "1f1b --stages 2 --microbatches 2 --tensor 2 --graph DATA/four.graph",
        "1f1b --microbatches 2 --graph DATA/three-tied.graph",
        "ddp --microbatches 4 --workers 2 --graph DATA/two-tied.graph",
        "lpp --stages 2 --microbatches 4 --workers 4 --groups 2",
        "zb-h1 --stages 2 --microbatches 3",
        "1f1b --stages 2 --microbatches 2 --recompute all",
        "gpipe --stages 1 --microbatches 1",
        "pipedream --stages 2 --microbatches 4 --replicas 2,1",
        "pipedream --stages 2 --microbatches 3 --updates vertical",
        "pipedream-2bw --stages 2 --microbatches 7",
    )
    data = str(Path(__file__).parents[1] / "data")
    commands = tuple(command.replace("DATA", data) for command in commands)
    texts = [run("compile", *command.split(), "-o", "-").out.encode() for command in commands]
    edges = ((0, 1), (0, 2), (1, 3), (2, 3))
    diamond = Scheme("diamond", 2, lambda s, b, d: (s % 2, s % 2), lambda s, b, d: s + b, "sum", "greedy", edges=edges)
    out = io.BytesIO()
    write(compile(diamond, Sizes(4, 2, 2)), out)
    return [*texts, out.getvalue(), *(path.read_bytes() for path in GOLDEN)]


PROFILES = (
    b'{"F": 1, "B": 2}',
    b'{"F": [1, 2], "B": [2, 3.5], "alpha": 0.5, "beta": 1e-3, "activation": [10, 20], "weight": 7, "saved": 3}',
    b'{"F": 1, "I": 1, "W": 1, "half": 2, "owned": 9, "step": 0.5, "workspace": {"F": 1, "B": [2, 3], "I": 1, "W": 4}}',
)


LISTS = (
    b"0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,1B0,1F1,1I1,1W1,1F2,1B2\n",
    (Path(__file__).parents[1] / "data" / "torch-172668.csv").read_bytes(),
    b'0UNSHARD,0F0,0SEND_F0,0WAIT_SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD\n1RECV_F0, 1F0,"",1B0,1SEND_B0,1WAIT_SEND_B0\n',
)


@st.composite
def cases(draw: st.DrawFn, bases: int) -> Case:
    kind = draw(st.sampled_from(("schedule",) * 7 + ("profile", "trace", "option", "actions")))
    number = st.integers(0, 2**32 - 1)
    steps = draw(st.lists(st.tuples(st.integers(0, 10**6), number), min_size=1, max_size=4))
    small = draw(st.integers(0, 9)) == 0 or kind != "schedule"
    base = draw(st.integers(0, (9 if small else bases) - 1))
    deep = draw(st.integers(0, 9)) < 6
    sealed = draw(st.integers(0, 3)) > 0
    return Case(kind, base, tuple(steps), deep, sealed, draw(st.integers(0, 10**6)))


class Range:
    """Makes inputs in a folder, and runs commands on them."""

    def __init__(self, folder: Path) -> None:
        self.bases = schedules()
        self.base, self.mutant, self.other = (folder / f"{name}.json" for name in ("base", "mutant", "other"))
        self.drawn = folder / "drawn.html"
        self.traces: dict[int, bytes] = {}
        self.load()

    def load(self) -> None:
        """Load what the commands need: it is no answer's memory."""
        base, other = str(self.base), str(self.other)
        for file, text in ((self.base, self.bases[0]), (self.other, self.bases[1])):
            file.write_bytes(text)
        for command in (["check", base], ["stats", base], ["diff", base, other], ["seal", base]):
            run(*command)
        run("simulate", base, "--trace", other)
        run("compile", "fsdp", "--stages", "2", "--microbatches", "2", "-o", other)

    def damaged(self, case: Case, data: bytes) -> bytes:
        ways = mutations.ANY if case.kind != "schedule" else mutations.LINES if case.deep else mutations.SCHEDULE
        for way, seed in case.steps:
            if len(data) > 2 * mutations.LONGEST:
                break
            chance = Random(seed)
            if case.kind == "schedule" and not case.deep and way % 40 == 0:
                data = mutations.a_header_of_another(chance, data, chance.choice(self.bases))
            else:
                data = ways[way % len(ways)](chance, data)
        return mutations.sealed(data) if case.sealed and case.kind == "schedule" else data

    def trace(self, base: int) -> bytes:
        if base not in self.traces:
            run("simulate", self.base, "--trace", self.other)
            self.traces[base] = self.other.read_bytes()
        return self.traces[base]

    def run(self, case: Case) -> None:
        text = self.bases[case.base]
        self.base.write_bytes(text)
        if case.kind == "schedule":
            self.schedule(case, text)
        elif case.kind == "option":
            self.option(case)
        elif case.kind == "actions":
            self.actions(case)
        else:
            data = PROFILES[case.base % len(PROFILES)] if case.kind == "profile" else self.trace(case.base)
            self.mutant.write_bytes(self.damaged(case, data))
            flag = "--profile" if case.kind == "profile" else "--measured"
            base, mutant = str(self.base), str(self.mutant)
            command = (
                ["stats", base, flag, mutant, "--json"], ["simulate", base, flag, mutant, "--json"],
                ["simulate", base, flag, mutant, "--trace", str(self.other)],
                ["draw", base, flag, mutant, "-o", str(self.drawn)],
            )[case.command % 4]  # fmt: skip
            self.ask(command, (0, 1, 2))
        event(case.kind)

    def schedule(self, case: Case, text: bytes) -> None:
        """Run `check`, then others: all must accept a file that `check` accepts, only `seal` one that it refuses."""
        data = self.damaged(case, text)
        self.mutant.write_bytes(data)
        mutant, base, other = map(str, (self.mutant, self.base, self.other))
        readers = (
            ["stats", mutant], ["stats", mutant, "--json"], ["simulate", mutant, "--json", "--alpha", "0.1"],
            ["simulate", mutant, "--trace", other], ["diff", base, mutant], ["diff", mutant, base],
            ["export", mutant, "--to", "torch-jobs", "-o", other], ["export", mutant, "--to", "chakra", "-o", other],
            ["draw", mutant, "-o", str(self.drawn)],
        )  # fmt: skip
        reader = readers[case.command % len(readers)]
        said = self.ask(["check", mutant], (0, 1))
        rule = re.search(r"\(rule \d", said.err)
        reason = "accepted" if said.code == 0 else rule[0][1:] if rule else "hash" if "SHA" in said.err else "reading"
        event(f"check: {reason}")
        if said.code == 0:
            if not case.sealed and data not in self.bases:
                raise Failure("a file with the wrong hash is accepted")
            self.ask(reader, (0, 1) if reader[0] == "diff" else (0, 2) if "torch-jobs" in reader else (0,))
            self.ask(["seal", mutant], (0,))
            if self.mutant.read_bytes() != data:
                raise Failure("a file that is accepted is not what writing makes")
        else:
            if self.ask(reader, (2 if reader[0] == "diff" else 1,)).err != said.err:
                raise Failure(f"{reader[0]} refuses in other words than check")
            writes = case.command % 2 == 0 and self.ask(["seal", mutant], (0, 1)).code == 0
            if writes and "canonical" in self.ask(["check", mutant], (0, 1)).err:
                raise Failure("what seal wrote is not what check reads")

    def actions(self, case: Case) -> None:
        """Damage one of torch's lists: if it compiles, `check` must accept it, and the schedule."""
        table = self.mutant.with_suffix(".csv")
        table.write_bytes(self.damaged(case, LISTS[case.base % len(LISTS)]))
        checked = self.ask(["check", str(table)], (0, 1))
        if self.ask(["compile", str(table), "-o", str(self.other)], (0, 1, 2)).code == 0:
            self.ask(["check", str(self.other)], (0,))
        if checked.code == 0:
            self.ask(["diff", str(table), str(self.other)], (0,))

    def option(self, case: Case) -> None:
        chance = Random(case.steps[0][1])
        text = "".join(chance.choice("FBIW=,;=,0123456789e+-._ n\0٣∞") for _ in range(chance.randrange(20)))
        if chance.randrange(2):
            text = self.damaged(case, chance.choice((b"F=1,B=2", b"F=1,I=2,W=0.5", b"7"))).decode(errors="replace")
        name = chance.choice(OPTIONS)
        command = "stats" if name == "--cost" and chance.randrange(2) else "simulate"
        self.ask([command, str(self.base), f"{name}={text[:2000]}", "--json"], (0, 2))

    def ask(self, command: list[str], codes: Sequence[int]) -> Result:
        with limited(SECONDS), memory(MEMORY):
            said = run(*command)
        judge(said, command, codes)
        return said


def judge(said: Result, command: list[str], codes: Sequence[int]) -> None:
    """Raise Failure unless the answer is a documented one."""
    words = f"{shlex.join(command)}: {said.code}, {said.err[:2000]!r}"
    if said.code not in codes:
        raise Failure(f"another exit code than {codes}: {words}")
    if "out of memory" in said.err:
        raise Failure(f"too much memory: {words}")
    differs = command[0] == "diff" and said.code == 1 and said.out
    if said.code and not differs:
        sentence = said.err.removesuffix("\n")
        if said.out or not said.err.endswith("\n") or not sentence.isprintable() or not sentence.startswith("schedgen"):
            raise Failure(f"not one sentence on stderr: {words}")
        if len(sentence) > SENTENCE + 10 * sum(map(len, command)):
            raise Failure(f"a sentence of {len(sentence)} characters: {words}")
    elif said.err and not (re.fullmatch(NOTES, said.err) and any("csv" in word for word in command)):
        raise Failure(f"done, but: {words}")
    if said.code == 0 and "--json" in command:
        lowest = min(_numbers(json.loads(said.out, parse_constant=_no_number)))
        if lowest < -1e-6 and "--measured" not in command:  # clocks of a measured run may disagree a little
            raise Failure(f"it prints {lowest}: {words}")


def _no_number(name: str) -> float:
    raise Failure(f"it prints {name}")


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, (dict, list)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _numbers(entry)
    elif isinstance(value, (int, float)):
        yield value


class Hang(Failure):
    """A command takes longer than it may."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise Hang after so many seconds of processor time."""

    def stop(*_: object) -> None:
        raise Hang(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def memory(size: int) -> Iterator[None]:
    """Limit the process's address space to `size` bytes more than it has now."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + size
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
