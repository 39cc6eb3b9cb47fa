"""Schedules by the names of their files: schedgen's own, and torch's lists."""

from __future__ import annotations

from schedgen import checker
from schedgen.checker import Prove
from schedgen.compiler.torch_program import torch_program
from schedgen.ir.program import Program
from schedgen.schemes.torch_list import TorchList, list_in
from schedgen.util.errors import RefusedFile, UsageError, note


def checked(name: str, prove: Prove = checker.check) -> Program:
    """The schedule in file `name` (-: standard input), or torch's list in a .csv, read and checked. Raises RefusedFile.

    Notes on stderr say what of torch's list the program leaves out, and whose the messages are.
    """
    if not name.endswith(".csv"):
        return checker.checked(name, prove)
    torch_list = list_in(name)
    try:
        program = torch_program(torch_list)
    except UsageError as error:
        raise RefusedFile(f"{name}: {error}") from None
    prove(program, name)
    if not torch_list.has_messages:
        note(f"{name} has jobs alone: its messages are those that schedgen compile gives it")
    note_left_out(torch_list)
    return program


def note_left_out(torch_list: TorchList) -> None:
    """Say on stderr what of torch's list no schedule has, if there is anything."""
    if torch_list.left_out:
        note(torch_list.left_out)
