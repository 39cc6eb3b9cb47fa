"""Every command that reads user input must answer hostile input with one sentence, in little time and memory.

    python tests/helpers/fuzz.py --count 100000 --processes 2

Hypothesis damages schedules, profiles, traces, torch's CSV and options by
`mutations` and passes them to `schedgen.cli.main`. An answer is right if its
exit code is documented, its output is what that code requires, and it takes at
most SECONDS, and MEMORY bytes beyond those that the process has. The same seed
gives the same inputs. A failing input is shrunk and left in build/fuzz.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import mutations
from hypothesis import HealthCheck, Phase, given, settings

import schedgen.cli.main
import schedgen.util.jit
from schedgen.compiler.compile import compile
from schedgen.ir.file import write
from schedgen.schemes.scheme import Scheme, Sizes

SECONDS = 10.0  # of processor time that a command may take
MEMORY = 2**28  # bytes that it may add to the address space
SENTENCE = 1000  # characters of an error, the file's name left out
ROUND = 2500  # inputs of one run of hypothesis, which remembers all of them
FAILED = Path("build/fuzz")

# What a command may add on stderr though it has done what it was asked for: of tables that torch writes or reads.
NOTES = r"schedgen: note: torch's CSV has jobs alone.*\n"
OPTIONS = ("--cost", "--alpha", "--beta", "--activation", "--weight", "--saved")


class Case(NamedTuple):
    """One input: the kind of file, which file, how it is damaged, and which command reads it."""

    kind: str  # schedule, profile, trace, actions or option
    base: int
    steps: tuple[tuple[int, int], ...]  # (mutation, its seed)
    deep: bool  # only lines of a schedule change, so that most pass the reader
    sealed: bool  # whether a damaged schedule has the right hash
    command: int  # which of the commands that read this kind
    compiled: bool  # whether kernels are compiled


class Answer(NamedTuple):
    code: object
    out: str
    err: str


class Failure(AssertionError):
    """An answer that no command may give."""


class Tally:
    """The statistics of a campaign."""

    def __init__(self) -> None:
        self.inputs, self.codes, self.reasons = Counter[str](), Counter[str](), Counter[str]()
        self.slowest, self.slowest_words = 0.0, ""
        self.memory = 0  # peak before the first input, in KiB


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
    texts = [answer(["compile", *command.split(), "-o", "-"]).out.encode() for command in commands]
    edges = ((0, 1), (0, 2), (1, 3), (2, 3))
    diamond = Scheme("diamond", 2, lambda s, b, d: (s % 2, s % 2), lambda s, b, d: s + b, "sum", "greedy", edges=edges)
    out = io.BytesIO()
    write(compile(diamond, Sizes(4, 2, 2)), out)
    golden = sorted((Path(__file__).parents[2] / "traces").glob("*.json"))
    return [*texts, out.getvalue(), *(path.read_bytes() for path in golden)]


PROFILES = (
    b'{"F": 1, "B": 2}',
    b'{"F": [1, 2], "B": [2, 3.5], "alpha": 0.5, "beta": 1e-3, "activation": [10, 20], "weight": 7, "saved": 3}',
    b'{"F": 1, "I": 1, "W": 1, "half": 2, "owned": 9, "step": 0.5, "workspace": {"F": 1, "B": [2, 3], "I": 1, "W": 4}}',
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
    return Case(kind, base, tuple(steps), deep, sealed, draw(st.integers(0, 10**6)), not small or draw(st.booleans()))


class Range:
    """Makes inputs in a folder, and runs commands on them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bases, self.tally = folder, schedules(), Tally()
        self.base, self.mutant, self.other = (folder / f"{name}.json" for name in ("base", "mutant", "other"))
        self.drawn = folder / "drawn.html"
        self.traces: dict[int, bytes] = {}

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
            answer(["simulate", str(self.base), "--trace", str(self.other)])
            self.traces[base] = self.other.read_bytes()
        return self.traces[base]

    def run(self, case: Case) -> None:
        schedgen.util.jit.SMALL = 0 if case.compiled else 10**12
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
            self.ask(case, command, (0, 1, 2))
        self.tally.inputs[case.kind] += 1

    def schedule(self, case: Case, text: bytes) -> None:
        """Run `check`, then others: all must accept a file that `check` accepts, only `seal` one that it refuses."""
        data = self.damaged(case, text)
        self.mutant.write_bytes(data)
        mutant, base, other = map(str, (self.mutant, self.base, self.other))
        readers = (
            ["stats", mutant], ["stats", mutant, "--json"], ["simulate", mutant, "--json", "--alpha", "0.1"],
            ["simulate", mutant, "--trace", other], ["diff", base, mutant], ["diff", mutant, base],
            ["export", mutant, "--to", "csv", "-o", other], ["export", mutant, "--to", "chrome", "-o", other],
            ["draw", mutant, "-o", str(self.drawn)],
        )  # fmt: skip
        reader = readers[case.command % len(readers)]
        said = self.ask(case, ["check", mutant], (0, 1))
        rule = re.search(r"\(rule \d", said.err)
        reason = "accepted" if said.code == 0 else rule[0][1:] if rule else "hash" if "SHA" in said.err else "reading"
        self.tally.reasons[reason] += 1
        if said.code == 0:
            if not case.sealed and data not in self.bases:
                raise Failure("a file with the wrong hash is accepted")
            for command in readers if case.compiled else [reader]:
                late = "csv" in command and (b'"updates": ' in data or b'"tensor": ' in data)  # not in torch's CSV
                self.ask(case, command, (0, 1) if command[0] == "diff" else (2,) if late else (0,))
            self.ask(case, ["seal", mutant], (0,))
            if self.mutant.read_bytes() != data:
                raise Failure("a file that is accepted is not what writing makes")
        else:
            if self.ask(case, reader, (2 if reader[0] == "diff" else 1,)).err != said.err:
                raise Failure(f"{reader[0]} refuses in other words than check")
            writes = case.command % 2 == 0 and self.ask(case, ["seal", mutant], (0, 1)).code == 0
            if writes and "canonical" in self.ask(case, ["check", mutant], (0, 1)).err:
                raise Failure("what seal wrote is not what check reads")

    def actions(self, case: Case) -> None:
        """Damage torch's CSV: if it compiles, `check` must accept the schedule."""
        table = self.mutant.with_suffix(".csv")
        answer(["export", str(self.base), "--to", "csv", "-o", str(table)])
        table.write_bytes(self.damaged(case, table.read_bytes()))
        if self.ask(case, ["compile", str(table), "-o", str(self.other)], (0, 1, 2)).code == 0:
            self.ask(case, ["check", str(self.other)], (0,))

    def option(self, case: Case) -> None:
        chance = Random(case.steps[0][1])
        text = "".join(chance.choice("FBIW=,;=,0123456789e+-._ n\0٣∞") for _ in range(chance.randrange(20)))
        if chance.randrange(2):
            text = self.damaged(case, chance.choice((b"F=1,B=2", b"F=1,I=2,W=0.5", b"7"))).decode(errors="replace")
        name = chance.choice(OPTIONS)
        command = "stats" if name == "--cost" and chance.randrange(2) else "simulate"
        self.ask(case, [command, str(self.base), f"{name}={text[:2000]}", "--json"], (0, 2))

    def ask(self, case: Case, command: list[str], codes: Sequence[int]) -> Answer:
        begin = time.process_time()
        with limited(SECONDS), memory(MEMORY):
            said = answer(command)
        seconds = time.process_time() - begin
        if seconds > self.tally.slowest:
            self.tally.slowest, self.tally.slowest_words = seconds, f"{command[0]} {case}"
        judge(said, command, codes)
        self.tally.codes[f"{command[0]} {said.code}"] += 1
        return said


def answer(command: list[str]) -> Answer:
    """Run `schedgen COMMAND` in this process, with warnings as errors; return its exit code and output."""
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("error")
        code: object
        try:
            code = schedgen.cli.main.main(command)
        except SystemExit as exit:
            code = exit.code
    return Answer(code, out.buffer.getvalue().decode(), err.buffer.getvalue().decode())


def judge(said: Answer, command: list[str], codes: Sequence[int]) -> None:
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
    """Raise Hang after so many seconds of processor time; after twice as many, kill a process that has not raised it.

    Time in which the process is stopped or waits for a core does not count. Both timers count from here on: a limit on
    all of the process's time is compared with another clock, which by then differs by seconds.
    """

    def stop(*_: object) -> None:
        raise Hang(f"no answer within {seconds} s")

    faulthandler.register(signal.SIGVTALRM, file=sys.__stderr__, chain=True)
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_VIRTUAL, 2 * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
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


def _peak() -> int:
    """The most memory the process has had, in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def campaign(count: int, seed: object, folder: Path, shrink: bool = True, progress: bool = False) -> Tally:
    """Run commands on `count` inputs. Raises the first Failure, shrunk. `progress`: a line on stderr per round."""
    place = Range(folder)
    schedgen.cli.main.parser = cache(schedgen.cli.main.parser)  # making it takes longer than most answers
    base, other = str(place.base), str(place.other)
    for compiled in (0, 10**12):  # load everything now: it is no answer's memory
        schedgen.util.jit.SMALL = compiled
        for file, text in ((place.base, place.bases[0]), (place.other, place.bases[1])):
            file.write_bytes(text)
        for command in (["check", base], ["stats", base], ["diff", base, other], ["seal", base]):
            answer(command)
        answer(["simulate", base, "--trace", other])
        answer(["compile", "fsdp", "--stages", "2", "--microbatches", "2", "-o", other])
    place.tally.memory = _peak()
    for first in range(0, count, ROUND):

        @hypothesis.seed(f"{seed} {first}")
        @settings(
            max_examples=min(ROUND, count - first),
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )
        @given(cases(len(place.bases)))
        def every_input_is_answered(case: Case) -> None:
            place.run(case)

        every_input_is_answered()
        if progress:
            seen = (
                f"{sum(place.tally.inputs.values())} of {count} inputs, {time.process_time():.0f} s of processor time"
            )
            print(f"{seed}: {seen}: {dict(sorted(place.tally.codes.items()))}", file=sys.stderr, flush=True)
    return place.tally


def run(count: int, seed: object) -> None:
    """Run a campaign in this process; print its statistics as JSON."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        try:
            tally = campaign(count, seed, Path(name), progress=True)
        except BaseException:
            FAILED.mkdir(parents=True, exist_ok=True)
            for path in Path(name).glob("*.json"):
                shutil.copy(path, FAILED / f"{seed}-{path.name}")
            raise
    seen = {
        "inputs": tally.inputs,
        "codes": tally.codes,
        "check": tally.reasons,
        "slowest": tally.slowest,
        "words": tally.slowest_words,
    }
    print(json.dumps({**seen, "seconds": time.perf_counter() - begin, "memory": [tally.memory, _peak()]}))


def run_all(count: int, processes: int, seed: int) -> int:
    """Run campaigns in several processes; return the exit code."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "NUMBA_BOUNDSCHECK": "1",  # an index outside of an array is an error in compiled kernels, too
        "NUMBA_CACHE_DIR": str(FAILED.absolute() / "kernels"),
    }
    shares = [count // processes + (k < count % processes) for k in range(processes)]
    code = "import fuzz, sys; fuzz.run(int(sys.argv[1]), sys.argv[2])"
    commands = [[sys.executable, "-c", code, str(share), f"{seed}-{k}"] for k, share in enumerate(shares)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for command in commands]
    seen = [json.loads(process.communicate()[0] or "null") for process in started]
    failed = [process.returncode for process in started if process.returncode]
    for key in ("inputs", "codes", "check"):
        total = sum((Counter(tally[key]) for tally in seen if tally), Counter())
        print(f"{key}: {sum(total.values())}: " + ", ".join(f"{name} {n}" for name, n in sorted(total.items())))
    for tally in filter(None, seen):
        before, after = (size / 1024 for size in tally["memory"])
        print(f"{tally['seconds']:.0f} s, {before:.0f} MiB before, {after:.0f} MiB at the most, "
              f"longest {tally['slowest']:.2f} s: {tally['words']}")  # fmt: skip
    print(f"failed: {failed}" if failed else "nothing found")
    return int(bool(failed))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=100_000, help="inputs")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sys.exit(run_all(options.count, options.processes, options.seed))
