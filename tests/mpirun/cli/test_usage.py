"""Help, and the names of files; tests/mpirun/test_refusals.py has the mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
from mpi4py import MPI

from mpirun.cli.options import read_options


def test_whoever_may_write_to_a_device_may_name_it(launch):
    """Even if the user may not write to the device's folder: root, who may, becomes another user.

    A write-protected file in a folder of theirs is refused.
    """
    check = """if True:
        import os, sys, tempfile
        from schedgen.util.files import check_writable
        folder = tempfile.TemporaryDirectory()
        if not os.getuid():
            os.chown(folder.name, 65534, 65534)
            os.setuid(65534)
        check_writable('-o', '/dev/null')
        with open(f"{folder.name}/old", "w") as old:
            check_writable('-o', old.name)
        os.chmod(old.name, 0o444)
        try:
            check_writable('-o', old.name)
        except Exception as error:
            folder.cleanup()
            sys.exit(str(error).split(": ")[1])
    """
    run = launch(None, program=("-c", check))
    assert (run.code, run.err) == (1, "Permission denied\n")


def test_names_are_absolute_as_the_model_may_change_the_working_directory():
    names = ["--save", "a", "--resume", "../b", "--trace", "/c", "--metrics", "-"]
    options = read_options(MPI.COMM_SELF, "", ["file", "--model", "m:f", *names])
    here = Path.cwd()
    assert (options.save, options.resume) == (f"{here}/a", f"{here}/../b")
    assert (options.trace, options.metrics) == ("/c", "-")


HELP = {
    "": ("--model", "--steps", "--text", "--seed", "--verify", "--canonical", "--metrics"),
    "profile": ("--model", "--stages", "--schedule", "--output"),
}


@pytest.mark.parametrize("command", HELP)
def test_help_is_no_mistake(mistakes, command):
    (ended,) = mistakes(1, [[*command.split(), "--help"]])
    assert (ended.code, ended.err) == (0, "") and all(option in ended.out for option in HELP[command])
