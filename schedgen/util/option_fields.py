"""Options that are declared once: fields of a frozen dataclass, which a command line and Python functions share.

`option`, `switch` and `argument` declare a field: how it is spelled, its default, and what its values are.
`add_arguments` adds the fields to a parser, and `read` makes the dataclass from the parsed values; `checked` checks
a dataclass that a script made. A field marked READ or WRITTEN names a file: a file that is read is never overwritten.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from schedgen.util.errors import UsageError, one_line

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


@dataclass(frozen=True)
class Number:
    """A kind of number, from `lowest` to below `limit`: called, it reads one from the text of an option."""

    words: str  # what a value is, for messages: "a positive number"
    kind: type[int] | type[float]
    lowest: float
    limit: float

    def __call__(self, text: str) -> Any:
        """The number; argparse.ArgumentTypeError, which argparse prints, if the text is none or out of the limits."""
        try:
            value = self.kind(text)
        except ValueError:
            value = math.nan
        if not self.lowest <= value < self.limit:
            below = f" and below {self.limit}" if value >= self.limit else ""
            raise argparse.ArgumentTypeError(f"'{text}' is not {self.words}{below}")
        return value

    def check(self, name: str, value: Any) -> Any:
        """The value, which may be NumPy's, as Python's number; UsageError if it is none or out of the limits."""
        wanted: Any = Integral if self.kind is int else Real  # NumPy's numbers are registered as such
        if isinstance(value, bool) or not isinstance(value, wanted) or not self.lowest <= value < self.limit:
            raise UsageError(f"{name} {value!r} is not {self.words}")
        return self.kind(value)


count = Number("a whole number of at least 1", int, 1, 2**31)
natural = Number("a whole number of at least 0", int, 0, 2**31)
duration = Number("a time of at least 0", float, 0, 1e18)
amount = Number("a positive number", float, math.ulp(0.0), 1e18)


def listed(parse: Callable[[str], T], separator: str = ",") -> Callable[[str], tuple[T, ...]]:
    """A type for tuples of what `parse` reads, as in 3,3,2."""
    return lambda text: tuple(parse(part) for part in text.split(separator))


def option(
    spelling: str, help: str, type: Any = None, default: Any = None, *,
    choices: Collection[str] = (), required: bool = False, group: str = "", file: str = "", needs: str = "",
    without: str = "",
) -> Any:  # fmt: skip
    """A field that is an option, spelled as in "-o --output FILE"; without a spelling, it is for Python alone.

    `type`: a Number, or another function of a text; `group`: only one option of a group may be given; `needs`: the
    option without which this one means nothing; `without`: the one beside which it means nothing. The help ends with
    the default, if it does not say it.
    """
    flags = [word for word in spelling.split() if word.startswith("-")]
    metavar = "".join(spelling.split()[len(flags) :]) or None
    if default and isinstance(default, int | float | str) and "default:" not in help:
        help = f"{help}; default: {default}"
    how = {"help": help, "type": type, "metavar": metavar, "choices": choices or None, "required": required}
    metadata = {"flags": flags, "how": how, "group": group, "file": file, "needs": needs, "without": without}
    return field(metadata=metadata) if required else field(default=default, metadata=metadata)


def switch(spelling: str, help: str, needs: str = "") -> Any:
    """A field that is true if the option is given; `needs`: as in `option`."""
    how = {"help": help, "action": "store_true"}
    return field(default=False, metadata={"flags": [spelling], "how": how, "needs": needs})


def argument(metavar: str, help: str, nargs: str | None = None, file: str = READ) -> Any:
    """A field that is a positional argument, usually a file that is read."""
    return field(metadata={"metavar": metavar, "how": {"metavar": metavar, "help": help, "nargs": nargs}, "file": file})


def add_arguments(parser: argparse.ArgumentParser, options: type[Any]) -> None:
    """Add the fields of a dataclass of options to a parser."""
    groups: dict[str, Any] = {"": parser}
    for each in fields(options):
        flags, how, group = each.metadata.get("flags"), each.metadata.get("how", {}), each.metadata.get("group", "")
        if group and group not in groups:
            groups[group] = parser.add_mutually_exclusive_group()
        if flags:
            default = None if each.default is MISSING else each.default
            groups[group].add_argument(*flags, dest=each.name, default=default, **how)
        elif flags is None and how:
            parser.add_argument(each.name, **how)


def read(options: type[T], values: Mapping[str, Any]) -> T:
    """A dataclass of options from the parsed values of its fields; UsageError for one that another rules out."""
    given = {each.name: values[each.name] for each in fields(options) if each.name in values}  # type: ignore[arg-type]
    for each in fields(options):  # type: ignore[arg-type]
        for key, words, wrong in (("needs", "needs", False), ("without", "does nothing beside", True)):
            other = each.metadata.get(key)
            if other and given[each.name] != each.default and bool(given[other]) is wrong:
                raise UsageError(f"{each.metadata['flags'][-1]} {words} --{other.replace('_', '-')}")
    return options(**given)


def checked(options: T) -> T:
    """The options with Python's numbers; UsageError for one that is out of its limits, or none of its choices."""
    numbers: dict[str, Any] = {}
    for each in fields(options):  # type: ignore[arg-type]
        value, how = getattr(options, each.name), each.metadata.get("how", {})
        if value is None and each.default is None:
            continue
        if isinstance(how.get("type"), Number):
            numbers[each.name] = how["type"].check(each.name, value)
        elif how.get("choices") and value not in how["choices"]:
            raise UsageError(f"{each.name} {value!r} is none of {', '.join(how['choices'])}")
    return replace(options, **numbers)  # type: ignore[type-var]


def check_files(options: Any, not_files: Collection[str] = ()) -> None:
    """UsageError if a file that is read would be written, or standard input is read twice, or a name is empty.

    `not_files`: words that may be given in place of the name of a file that is read. OSError as for `os.stat`.
    """
    files: dict[str, list[str]] = {READ: [], WRITTEN: []}
    for each in (each for each in fields(options) if each.metadata.get("file")):
        value = getattr(options, each.name)
        names = value if isinstance(value, list) else [value]
        if "" in names:
            spelled = each.metadata["flags"][-1] if "flags" in each.metadata else each.metadata["metavar"]
            raise UsageError(f"{spelled} names no file: it is empty")
        files[each.metadata["file"]] += filter(None, names)
    if files[READ].count("-") > 1:
        raise UsageError("- is standard input, which can be read only once")
    refuse_overwriting([name for name in files[READ] if name not in not_files], files[WRITTEN])


def refuse_overwriting(read: Iterable[str | None], written: Iterable[str | None]) -> None:
    """UsageError if a file that is read would be written, too; None is no file. OSError as for `os.stat`."""
    for name, other in itertools.product(filter(None, written), filter(None, read)):
        if Path(name).is_file() and Path(other).is_file() and Path(name).samefile(other):
            raise UsageError(f"{name} would be overwritten, but it is read, too: give the output another name")
