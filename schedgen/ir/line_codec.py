"""Instructions as lines of text and back, many at a time.

The *form* of a line is its text with every number replaced by 0: there are about a hundred, so NumPy finds the
numbers of many lines at once, and only the form of each line is looked up. All forms are made from
`Instruction.__str__`, and the reader accepts only lines that the writer makes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedgen.ir.instructions import KINDS, OPERANDS, Instruction, Kind, Op
from schedgen.ir.limits import Limits
from schedgen.ir.program import Rows, rows
from schedgen.util.arrays import Flags, Numbers
from schedgen.util.errors import clip

_DIGITS = b"0123456789"
_TO_ZERO = bytes.maketrans(_DIGITS, b"0" * 10)
_MOST_DIGITS = 10
# What a line is, and so what the next may be.
CLOSE, OPEN, COMMA, LAST = range(4)  # the brackets around a rank's list; an instruction with a comma, or the last one
_FOLLOWS = np.zeros((4, 4), bool)  # [line, next line]
_FOLLOWS[[CLOSE, OPEN, OPEN, OPEN, COMMA, COMMA, LAST], [OPEN, CLOSE, COMMA, LAST, COMMA, LAST, CLOSE]] = True


def _instructions() -> Iterator[Instruction]:
    """One instruction of every form; its numbers are their columns: 0 stage, 1 mb, 2 piece, 3 operand."""
    for op, operands in OPERANDS.items():
        for kind in KINDS.get(op, (Kind.NONE,)):
            stage = 0 if {"stage", "buf"} & set(operands) else -1
            mb = 1 if kind in (Kind.X, Kind.G, Kind.SAVED) or "mb" in operands else -1
            pieces = (2, -1) if kind not in (Kind.NONE, Kind.T, Kind.SAVED) or "shard" in operands else (-1,)
            for piece in pieces:
                one, has_operand = Instruction(op, kind, stage, mb, piece, -1), {"from", "to", "group"} & set(operands)
                if not has_operand:
                    yield one
                if has_operand or _has_version(one):
                    yield one._replace(operand=3)


def _has_version(one: Instruction) -> bool:
    """Whether its `operand` is a version; FREE of a shard of weights has none."""
    return "version" in OPERANDS[Op(one.op)] or (one.op == Op.FREE and one.kind == Kind.W and one.shard < 0)


class _Forms(NamedTuple):
    """The forms: first those of the brackets, then of each instruction's line with a comma at its end and without."""

    number: dict[bytes, int]  # by the form's text
    texts: list[str]  # with %d for each number, and a line feed
    line: NDArray[np.int8]  # CLOSE, OPEN, COMMA or LAST
    fixed: NDArray[np.int8]  # (forms, 3): op, kind, and the index in Limits of the bound of `operand`
    column: Numbers  # (forms, 4): where the first, second, ... number belongs; 4: there is none
    of: Numbers  # (ops, kinds, 2, 2): the form with a comma, by op, kind, whether there is a piece, and an `operand`


def _forms() -> _Forms:
    texts, lines, fixed, columns = ["  ],", "  ]", "  ["], [CLOSE, CLOSE, OPEN], [(0, 0, 0)] * 3, [[4] * 4] * 3
    of = np.zeros((len(Op), len(Kind), 2, 2), np.int64)
    for one in _instructions():
        text = f"   {one}"
        column = [int(letter) for letter in text if letter.isdigit()]
        kind = Kind.W if one.op == Op.FETCH_W else one.kind
        bound = "groups" if "group" in text else "versions" if _has_version(one) else "workers"
        of[one.op, kind, int(one.piece >= 0), int(one.operand >= 0)] = len(texts)
        for line, end in ((COMMA, ","), (LAST, "")):
            texts.append("".join("0" if letter.isdigit() else letter for letter in text) + end)
            lines.append(line)
            fixed.append((one.op, kind, Limits._fields.index(bound)))
            columns.append([*column, *[4] * (4 - len(column))])
    number = {text.encode(): form for form, text in enumerate(texts)}
    texts = [text.replace("0", "%d") + "\n" for text in texts]
    return _Forms(number, texts, np.array(lines, np.int8), np.array(fixed, np.int8), np.array(columns), of)


_FORMS = _forms()
_LAST_END = _FORMS.number[b"  ]"]
_VERSIONS = Limits._fields.index("versions")
_ORDER = ("op", "stage", "buf", "shard", "mb", "version", "from", "to", "group")  # of the operands in every line
_TEXTS = {op.name: [str(one) for one in _instructions() if one.op == op] for op in Op}


def write_lines(table: Rows, last: bool) -> bytes:
    """The lines of all rows; `last`: the last line has no comma."""
    form = _FORMS.of[table.op, table.kind, (table.piece >= 0).astype(int), (table.operand >= 0).astype(int)]
    form[-1:] += last
    numbers = np.stack([table.stage, table.mb, table.piece, table.operand, table.operand], axis=1)
    column = _FORMS.column[form]
    written = np.take_along_axis(numbers, column, axis=1)[column < 4].tolist()
    text = "".join(map(_FORMS.texts.__getitem__, form.tolist())) % tuple(written)
    return text.encode("ascii")


def line_of_item(item: object) -> str:
    """The text of an instruction that is given as a JSON value: its operands in order, on one line."""
    if isinstance(item, dict):
        item = {name: item[name] for name in _ORDER if name in item} | item
    return f"   {json.dumps(item)}"


class State(NamedTuple):
    """The position of the reader within the lists."""

    rank: int = 0
    line: int = CLOSE  # what the line before is: CLOSE, OPEN, COMMA or LAST


class Taken(NamedTuple):
    """What `read_lines` has read."""

    rows: Rows
    lines: int
    size: int  # bytes of these lines
    state: State  # after these lines
    wrong: str  # why the line after these is refused; empty: none is


def read_lines(data: bytes, state: State, limits: Limits) -> Taken:
    """Read whole lines, up to the first wrong one or the end of the last rank's list.

    A line is wrong if `write_lines` would not write it and it is not a bracket in its place.
    """
    form, numbers = forms_and_numbers(data, _FORMS.number)
    line = _FORMS.line[form]
    before, closed = np.append(state.line, line)[:-1], state.rank + np.cumsum(line == CLOSE)
    last_end = (line == CLOSE) & ((closed == limits.workers) != (form == _LAST_END))
    fits = (form >= 0) & _FOLLOWS[before, line] & ~last_end
    lists = int(np.searchsorted(closed, limits.workers)) + 1  # further lines are in no list
    end = int(np.argmin(np.append(fits[:lists], False)))
    is_wrong = end < min(lists, len(form))
    column = _FORMS.column[form[:end]]
    values, table = np.zeros_like(column), np.full((end, 5), -1, np.int64)
    values[column < 4] = numbers = numbers[: np.count_nonzero(column < 4)]
    np.put_along_axis(table, column, values, axis=1)
    item = np.flatnonzero(line[:end] >= COMMA)
    wrong = ""
    faults = _faults(form[item], table[item], limits)
    faulty = np.append(np.logical_or.reduce([fault for fault, _ in faults]), True)
    items = int(np.argmax(faulty))
    if items < len(item):
        wrong = next(words for fault, words in faults if fault[items])
        end, item = int(item[items]), item[:items]
    starts = np.append(0, np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) + 1)
    size, after = int(starts[end]), State(int(closed[end - 1]), int(line[end - 1])) if end else state
    if wrong or is_wrong:
        text = data[size : starts[end + 1] - 1].decode("ascii", "replace")
        wrong = f"{clip(text.strip().removesuffix(','))}: {wrong}" if wrong else _misplaced(text, after, limits)
    op, kind, _ = _FORMS.fixed[form[item]].T
    stage, mb, piece, operand, _ = table[item].T
    taken = rows(op, closed[item], kind=kind, stage=stage, mb=mb, piece=piece, operand=operand)
    return Taken(taken, end, size, after, wrong)


def _faults(form: Numbers, table: Numbers, limits: Limits) -> list[tuple[Flags, str]]:
    """What may be wrong with the numbers of instructions, each as flags by instruction and in words.

    `table`: (instructions, 5): stage, mb, piece, operand and a column that does not count; -2 for no number.
    """
    stage, mb, piece, operand, _ = table.T
    op, kind, bound = _FORMS.fixed[form].T
    is_tie, weights = kind == Kind.T, np.isin(kind, (Kind.W, Kind.DW, Kind.OPT)) | (op == Op.STEP)
    of_weights, of_gradient = (
        np.array(by_stage or [1])[np.clip(stage, 0, max(len(by_stage) - 1, 0))]  # wrong ones are named below
        for by_stage in (limits.shards, limits.parts or limits.shards)
    )
    shards = np.where(kind == Kind.DW, of_gradient, of_weights)
    version = bound == _VERSIONS
    return [
        ((table[:, :4] < -1).any(axis=1), "a number has leading zeros or too many digits"),
        (is_tie & (stage >= limits.ties), f"there is no such tie among {limits.ties}"),
        (~is_tie & (stage >= limits.stages), f"there is no such stage in 0..{limits.stages - 1}"),
        (mb >= limits.microbatches, f"there is no such microbatch in 0..{limits.microbatches - 1}"),
        (~weights & (piece >= limits.stages), f"there is no such consumer in 0..{limits.stages - 1}"),
        (weights & (piece >= 0) & (shards == 1), "the weights of this stage have no shards"),
        (weights & (piece < 0) & (shards > 1), "the weights of this stage are divided: name a shard"),
        (weights & (piece >= shards), "there is no such shard"),
        (version & (operand >= 0) & (limits.versions == 0), "weights have no versions here"),
        (version & (operand < 0) & (limits.versions > 0), "a version is missing"),
        (operand >= np.array(limits[:6])[bound], "there is no such rank, group or version"),
    ]


def _misplaced(text: str, state: State, limits: Limits) -> str:
    """Why a line that is no instruction, or stands in the wrong place, is refused."""
    if state.line == CLOSE:
        return "the program should begin here, with '  ['"
    if text.startswith("  ]"):
        end = "  ]," if state.rank + 1 < limits.workers else "  ]"
        return "a comma stands before this end of its list" if text == end else f"its list should end with '{end}'"
    if state.line == LAST:
        return "a comma is missing at the end of the line before, or this is its end"
    text, why = text.strip().removesuffix(","), "it is no instruction"
    with suppress(ValueError, RecursionError, KeyError, TypeError):
        item = json.loads(text)
        why = f"{item['op']} is written as one of {', '.join(_TEXTS[item['op']])}"
        form, _ = forms_and_numbers(f"{line_of_item(item)}\n".encode(), _FORMS.number)
        why = "not in canonical form; `schedgen seal` rewrites it" if form[0] >= 0 else why
    return f"{clip(text)}: {why}"


def forms_and_numbers(data: bytes, known: Mapping[bytes, int]) -> tuple[Numbers, Numbers]:
    """What is `known` as the form of every line, -1 for none, and all numbers, in their order.

    A number with leading zeros or more than 10 digits is -2.
    """
    letters, zeroed = np.frombuffer(data, np.uint8), np.frombuffer(data.translate(_TO_ZERO), np.uint8)
    is_digit = zeroed == ord("0")
    is_first = is_digit & ~np.append(False, is_digit)[:-1]
    lines = zeroed[is_first | ~is_digit].tobytes().split(b"\n")[:-1]
    form = np.fromiter(map(known.get, lines, itertools.repeat(-1)), np.int64, len(lines))
    first = np.flatnonzero(is_first)
    length = np.flatnonzero(is_digit & ~np.append(is_digit, False)[1:]) + 1 - first
    numbers = np.zeros(len(first), np.int64)
    for place in range(min(length.max(initial=0), _MOST_DIGITS)):
        more = np.flatnonzero(length > place)
        numbers[more] = 10 * numbers[more] + letters[first[more] + place] - ord("0")
    numbers[((letters[first] == ord("0")) & (length > 1)) | (length > _MOST_DIGITS)] = -2
    return form, numbers
