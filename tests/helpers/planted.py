"""Campaigns of the fuzzer on a schedgen with a planted bug: `python planted.py BUG ...`, in a folder of their own.

Each campaign has a process, since a bug may take all memory or never return to Python; it is forked from one that has
loaded the kernels, and its stderr goes to the file BUG. Prints the exit codes by bug, as JSON; -N: ended by signal N.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

import fuzz

import schedgen.checker
import schedgen.cli.main
import schedgen.ir.file
import schedgen.ir.line_codec
import schedgen.ir.validate_header
import schedgen.util.option_fields
from schedgen.cli.options import CheckOptions


def a_number_that_no_one_bounds() -> None:
    fuzz.SECONDS = 1.0  # some make writing endless
    schedgen.ir.line_codec._faults = lambda form, *_: [(form < 0, "")]


def a_size_that_is_believed() -> None:
    header = schedgen.ir.validate_header.read_header
    schedgen.ir.file.read_header = lambda raw, limits, jobs: header(raw, limits, 10**30)


def a_search_without_end() -> None:
    def search(*_: object) -> None:
        while True:
            pass

    fuzz.SECONDS = 0.5
    schedgen.ir.file._key_line = search


def an_error_in_the_words_of_the_file() -> None:
    schedgen.cli.main.one_line = schedgen.util.option_fields.one_line = str


def a_hash_that_is_not_compared() -> None:
    read = schedgen.checker.read
    schedgen.checker.read = lambda *arguments: (read(*arguments)[0], None)


def a_checker_that_accepts_all() -> None:
    """In the command `check` alone: the other commands rely on the proof, and would crash on what is not proved."""
    check, commands = schedgen.checker.check, schedgen.cli.main.COMMANDS
    run_check = next(command.run for command in commands if command.name == "check")

    def trusting(options: CheckOptions) -> int:
        schedgen.checker.check = lambda *_: None
        try:
            return run_check(options)
        finally:
            schedgen.checker.check = check

    schedgen.cli.main.COMMANDS = tuple(
        command._replace(run=trusting) if command.name == "check" else command for command in commands
    )


def run(bug: str) -> int:
    """The exit code of a campaign with this bug."""
    pid = os.fork()
    if not pid:
        code = 1
        with Path(bug).open("w") as err:
            os.dup2(err.fileno(), 2)
        try:
            globals()[bug]()
            Path(f"{bug}-files").mkdir()
            fuzz.campaign(1500, 2, Path(f"{bug}-files"), shrink=False)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    parser = schedgen.cli.main.parser
    with tempfile.TemporaryDirectory() as name:
        fuzz.campaign(0, 0, Path(name))  # load everything before the first fork
    schedgen.cli.main.parser = parser  # not the campaign's, which keeps the commands
    print(json.dumps({bug: run(bug) for bug in sys.argv[1:]}))
