"""Read schedule files by the names that users give, and check them before they are used."""

from __future__ import annotations

from schedgen.checker import check
from schedgen.ir.file import read
from schedgen.ir.program import Program
from schedgen.util.errors import RefusedFile
from schedgen.util.files import display_name, open_input


def checked(name: str) -> Program:
    """The program in file `name` (-: standard input), read and checked. Raises RefusedFile."""
    label = display_name(name)
    with open_input(name) as source:
        program, fault = read(source, label)
    check(program, label)
    if fault:
        raise RefusedFile(fault)
    return program
