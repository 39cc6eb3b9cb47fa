"""Options of a command: a frozen dataclass whose fields are its arguments, and what argparse needs for them.

`option`, `switch` and `argument` declare a field. `add_arguments` adds the fields to a parser, and `read` makes the
dataclass from the parsed values. A field marked READ or WRITTEN names a file: a file that is read is never overwritten.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import field, fields
from typing import Any, NoReturn, TypeVar

from schedgen.util.errors import UsageError, one_line
from schedgen.util.files import is_same_file, is_standard_output

T = TypeVar("T")

READ, WRITTEN = "read", "written"  # what a command does with the file that a field names


class Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line: the sentence and where to read more."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Options cannot be abbreviated: a new option could change the meaning of an abbreviation."""
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f"{self.prog}: {one_line(message)} (see {self.prog} --help)\n")


def option(
    spelling: str, help: str, type: Any = None, default: Any = None, group: str = "", file: str = "", **more: Any
) -> Any:
    """A field that is an option, spelled as in "-o --output FILE"; only one option of a `group` may be given."""
    words = spelling.split()
    flags = [word for word in words if word.startswith("-")]
    if len(words) > len(flags):
        more["metavar"] = words[-1]
    own = {"flags": flags, "group": group, "file": file}
    return field(metadata={**own, "help": help, "type": type, "default": default, **more})


def switch(spelling: str, help: str) -> Any:
    """A field that is true if the option is given."""
    return field(metadata={"flags": [spelling], "help": help, "action": "store_true"})


def argument(metavar: str, help: str, file: str = READ, **more: Any) -> Any:
    """A field that is a positional argument, usually a file that is read."""
    return field(metadata={"metavar": metavar, "help": help, "file": file, **more})


def add_arguments(parser: argparse.ArgumentParser, options: type[Any]) -> None:
    """Add the fields of a dataclass of options to a parser."""
    groups: dict[str, Any] = {"": parser}
    for each in fields(options):
        how = dict(each.metadata)
        flags, group, _ = how.pop("flags", None), how.pop("group", ""), how.pop("file", "")
        if group not in groups:
            groups[group] = parser.add_mutually_exclusive_group()
        if flags:
            groups[group].add_argument(*flags, dest=each.name, **how)
        else:
            groups[group].add_argument(each.name, **how)


def read(options: type[T], values: Mapping[str, Any], not_files: Collection[str] = ()) -> T:
    """A dataclass of options from the parsed values of its fields; UsageError if they conflict.

    `not_files`: words that may be given in place of a file name.
    """
    _check_files(options, values, not_files)
    return options(**{each.name: values[each.name] for each in fields(options)})  # type: ignore[arg-type]


def _check_files(options: type[Any], values: Mapping[str, Any], not_files: Collection[str]) -> None:
    """Refuse to write to a file that is read, to read or write - twice, and empty file names."""
    files: dict[str, list[str]] = {READ: [], WRITTEN: []}
    for each in (each for each in fields(options) if each.metadata.get("file")):
        given = values[each.name]
        names = given if isinstance(given, list) else [given]
        if "" in names:
            called = each.metadata.get("flags") or [each.metadata["metavar"]]
            raise UsageError(f"{called[-1]} names no file: it is empty")
        files[each.metadata["file"]] += filter(None, names)
    if files[READ].count("-") > 1:
        raise UsageError("- is standard input, which can be read only once")
    refuse_overwriting([name for name in files[READ] if name not in not_files], files[WRITTEN])
    for each in fields(options) if values.get("json") else ():
        if each.metadata.get("file") == WRITTEN and is_standard_output(values[each.name]):
            both = f"{each.metadata['flags'][0]} {values[each.name]} and --json would both be standard output"
            raise UsageError(f"{both}: give one of them a file")


def refuse_overwriting(read: Iterable[str | None], written: Iterable[str | None]) -> None:
    """UsageError if a file that is read would be written, too; None is no file. OSError as for `os.stat`."""
    for name, other in itertools.product(filter(None, written), filter(None, read)):
        if is_same_file(name, other):
            raise UsageError(f"{name} would be overwritten, but it is read, too: give the output another name")
