"""The time of `schedgen diff` after files are read and checked, and how it grows: microseconds per instruction.

1F1B on 64 ranks against GPipe, and against itself without prefetch, where most rows are at other places. difflib,
which is quadratic, only for up to 160 microbatches.
"""

from __future__ import annotations

import argparse
import difflib
import subprocess
import sys
import time

from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.ir.program import Program
from schedgen.report.diff import diff
from schedgen.schemes import load
from schedgen.schemes.scheme import Sizes

QUICK = "--quick" in sys.argv
RANKS = 4 if QUICK else 64


def compiled(name: str, microbatches: int, prefetch: int = 1) -> Program:
    sizes = Sizes(RANKS, microbatches)
    return compile(load(name, sizes), sizes, Options(prefetch=prefetch))


def lines_by_difflib(a: Program, b: Program) -> int:
    count = 0
    for rank in range(a.header.workers):
        old, new = ([str(i) for i in program.instructions(rank)] for program in (a, b))
        count += sum(1 for _ in difflib.unified_diff(old, new, lineterm="", n=2))
    return count


def one(microbatches: int) -> None:
    a = compiled("1f1b", microbatches)
    others = {"gpipe": compiled("gpipe", microbatches), "no prefetch": compiled("1f1b", microbatches, prefetch=0)}
    for name, b in others.items():
        best = float("inf")
        for _ in range(4):  # the first compiles kernels
            begin = time.perf_counter()
            lines = sum(1 for _ in diff(a, b, "a", "b"))
            best = min(best, time.perf_counter() - begin)
        print(f"  {len(a):>9,} instructions, {name:11} {lines:>9,} lines in {best:6.2f} s, "
              f"{1e6 * best / len(a):.2f} an instruction", flush=True)  # fmt: skip
        if microbatches <= 160:
            begin = time.perf_counter()
            lines = lines_by_difflib(a, b)
            print(f"  {'by difflib, without the numbers':37} {lines:>9,} lines in {time.perf_counter() - begin:6.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", type=int)
    parser.add_argument("--quick", action="store_true", help="4 ranks: whether it runs at all")
    options = parser.parse_args()
    if options.one:
        one(options.one)
        return
    print(f"diff, {RANKS} ranks: microseconds an instruction")
    for microbatches in (4,) if QUICK else (16, 160, 1600):
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--one", str(microbatches)], check=True)


if __name__ == "__main__":
    main()
