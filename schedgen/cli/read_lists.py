"""Schedules by the names of their files: schedgen's own, and torch's lists."""

from __future__ import annotations

from schedgen import checker
from schedgen.compiler.torch_program import torch_program
from schedgen.ir.file import read
from schedgen.ir.program import Program
from schedgen.ir.transport import Transport
from schedgen.schemes.torch_list import TorchList, read_torch_list
from schedgen.util.errors import RefusedFile, UsageError, note
from schedgen.util.files import display_name, open_input, read_text


def checked(name: str, transport: Transport | None = None) -> Program:
    """The schedule in file `name` (-: standard input), or torch's list in a .csv, read and checked. Raises RefusedFile.

    Notes on stderr say what of torch's list the program leaves out, and whose the messages are.
    """
    program, fault = listed(name)
    checker.check(program, display_name(name), transport)
    if fault:
        raise RefusedFile(fault)
    return program


def listed(name: str) -> tuple[Program, str | None]:
    """The schedule in file `name`, not checked, and an error message if its SHA-256 is wrong. Raises RefusedFile."""
    if not name.endswith(".csv"):
        with open_input(name) as source:
            return read(source, display_name(name))
    torch_list = torch_list_of(name)
    if not torch_list.has_messages:
        note(f"{name} has jobs alone: its messages are those that schedgen compile gives it")
    try:
        program = torch_program(torch_list)
    except UsageError as error:
        raise RefusedFile(f"{name}: {error}") from None
    return program, None


def torch_list_of(name: str) -> TorchList:
    """torch's list in file `name`; a note on stderr says what of it no schedule has."""
    torch_list = read_torch_list(read_text(name), name)
    if torch_list.left_out:
        note(torch_list.left_out)
    return torch_list
