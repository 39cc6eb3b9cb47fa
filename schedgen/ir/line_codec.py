"""Write instructions as lines of text, and read them: the two loops that dominate the time for large files.

One table, made from `OPERANDS`, drives both loops, so that a line has the text of `Instruction.__str__`. The reader
accepts only lines that the writer makes, and stops at the first other line.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedgen.ir.instructions import KIND_NAME, KINDS, OPERANDS, Kind, Op
from schedgen.ir.limits import Limits
from schedgen.ir.program import Rows, rows
from schedgen.ir.validate_instruction import NAME_NUMBERS
from schedgen.util.arrays import Flags, Ints, Numbers, Small
from schedgen.util.jit import kernel

Bytes = NDArray[np.uint8]

LONGEST_LINE = 128  # bytes: four numbers of ten digits, two names and the text between them
SHORTEST_LINE = 24  # bytes: no instruction has fewer
# By operand: where its value is stored, and the index in Limits of its bound. -1: a buffer's numbers have several
# bounds, and the bound of a shard is the number of parts of its stage.
STAGE, MB, PEER, BUFFER, VERSION, SHARD = range(6)
WORKERS, STAGES, MICROBATCHES, GROUPS, TIES, VERSIONS = range(6)
_OPERAND = {
    "stage": (STAGE, STAGES), "mb": (MB, MICROBATCHES), "buf": (BUFFER, -1), "from": (PEER, WORKERS),
    "to": (PEER, WORKERS), "group": (PEER, GROUPS), "version": (VERSION, VERSIONS), "shard": (SHARD, -1),
}  # fmt: skip
NAME = len('   {"op": "')  # where an opcode's name begins in its line
# What kernels compare with, as plain numbers.
FETCH_W, FREE = int(Op.FETCH_W), int(Op.FREE)
NONE, W, DW, T = int(Kind.NONE), int(Kind.W), int(Kind.DW), int(Kind.T)
SPACE, QUOTE, COMMA, DOT, SLASH, ZERO, NINE, AT, OPEN, CLOSE, BRACE, NEWLINE = b' ",./09@[]}\n'
# How the line before an instruction ends: without a comma, with one, or as the bracket that begins the list.
NO_COMMA, WITH_COMMA, BRACKET = range(3)


class Templates(NamedTuple):
    """The form of every opcode's line: texts and fields alternate. A buffer's name is letters and up to three numbers.

    If weights have no versions, a field VERSION and the text before it are left out; so are a field SHARD and its
    text, if the weights of the stage are not divided.
    """

    letters: Bytes  # all texts, concatenated
    begin: Numbers  # (opcodes, 4): where text k, before field k or after the last, begins in `letters`
    length: Numbers  # (opcodes, 4): 0 where an opcode has no such text
    fields: Numbers  # (opcodes,): how many
    field: Numbers  # (opcodes, 3): STAGE, MB, PEER, BUFFER, VERSION or SHARD
    limit: Numbers  # (opcodes, 3): index of the number's bound in Limits
    kinds: Flags  # (opcodes, kinds): the kinds of buffer an opcode may name
    name_begin: Numbers  # (kinds,): where the name begins in `letters`
    name_length: Numbers
    fewest: Numbers  # (kinds,): numbers in a name
    most: Numbers


def _templates() -> Templates:
    text = b""
    begin, length = np.zeros((2, len(Op), 4), np.int64)
    field, limit = np.zeros((2, len(Op), 3), np.int64)
    kinds = np.zeros((len(Op), len(Kind)), np.bool_)
    name_begin, name_length, fewest, most = np.zeros((4, len(Kind)), np.int64)
    for op, operands in OPERANDS.items():
        leads = [f'   {{"op": "{op.name}"', *[""] * (len(operands) - 1)]
        pieces = [f'{lead}, "{name}": ' for lead, name in zip(leads, operands, strict=True)] + ["}"]
        for k, piece in enumerate(pieces):
            begin[op, k], length[op, k] = len(text), len(piece)
            text += piece.encode()
        for k, name in enumerate(operands):
            field[op, k], limit[op, k] = _OPERAND[name]
        kinds[op, list(KINDS.get(op, ()))] = True
    for kind, name in KIND_NAME.items():
        name_begin[kind], name_length[kind] = len(text), len(name) + 1
        fewest[kind], most[kind] = min(NAME_NUMBERS[kind]), max(NAME_NUMBERS[kind])
        text += f'"{name}'.encode()
    fields = np.array([len(OPERANDS[op]) for op in Op], np.int64)
    letters = np.frombuffer(text, np.uint8)
    return Templates(letters, begin, length, fields, field, limit, kinds, name_begin, name_length, fewest, most)


TEMPLATES = _templates()
EMPTY = rows(0, np.zeros(0, np.int32))


# Writing


def write_lines(table: Rows, begin: int, end: int, last: bool, out: Bytes) -> int:
    """Write the lines of rows begin to end - 1; return the number of bytes. `last`: the last line has no comma."""
    write = _write.sized(8 * (end - begin), ahead=8 * (len(table.op) - end))
    return write(*table[1:], begin, end, last, out, 0, *TEMPLATES[:5], TEMPLATES.name_begin, TEMPLATES.name_length)


@kernel
def _write(
    op: Small, kind: Small, stage: Ints, mb: Ints, via: Ints, peer: Ints, first_row: int, end_row: int, last: bool,
    out: Bytes, at: int, letters: Bytes, begin: Numbers, length: Numbers, fields: Numbers, field: Numbers,
    name_begin: Numbers, name_length: Numbers,
) -> int:  # fmt: skip
    for row in range(first_row, end_row):
        o = op[row]
        for k in range(fields[o] + 1):
            what = field[o, k] if k < fields[o] else -1
            if (what == VERSION and peer[row] < 0) or (what == SHARD and via[row] < 0):
                continue
            for i in range(begin[o, k], begin[o, k] + length[o, k]):
                out[at] = letters[i]
                at += 1
            if what == STAGE:
                at = write_number(out, at, stage[row])
            elif what == MB:
                at = write_number(out, at, mb[row])
            elif what in (PEER, VERSION):
                at = write_number(out, at, peer[row])
            elif what == SHARD:
                at = write_number(out, at, via[row])
            elif what == BUFFER:
                kind_ = kind[row]
                for i in range(name_begin[kind_], name_begin[kind_] + name_length[kind_]):
                    out[at] = letters[i]
                    at += 1
                for number in (stage[row], mb[row]):
                    if number >= 0:
                        out[at] = DOT
                        at = write_number(out, at + 1, number)
                if via[row] >= 0:
                    out[at] = SLASH if kind_ in (W, DW) else DOT
                    at = write_number(out, at + 1, via[row])
                if o == FREE and peer[row] >= 0:  # FREE of w.s@v
                    out[at] = AT
                    at = write_number(out, at + 1, peer[row])
                out[at] = QUOTE
                at += 1
        if row + 1 < end_row or not last:
            out[at] = COMMA
            at += 1
        out[at] = NEWLINE
        at += 1
    return at


@kernel
def write_number(out: Bytes, at: int, number: int) -> int:
    """Write the digits of a number of at least 0; return the position after them."""
    size = 1
    rest = number // 10
    while rest:
        size += 1
        rest //= 10
    for i in range(at + size - 1, at - 1, -1):
        out[i] = ZERO + number % 10
        number //= 10
    return at + size


# Reading


class State(NamedTuple):
    """The position of the reader within the lists."""

    rank: int = 0
    inside: bool = False  # whether the reader is within that rank's list
    before: int = NO_COMMA  # how the line before ends: NO_COMMA, WITH_COMMA or BRACKET


class Taken(NamedTuple):
    """What `read_lines` has read."""

    rows: Rows
    bytes: int
    lines: int
    state: State  # after these lines
    wrong: bool  # whether a wrong line follows


def read_lines(data: Bytes, state: State, limits: Limits) -> Taken:
    """Read whole lines, up to the end of the last rank's list, the last whole line, or the first wrong one.

    A line is wrong if `write_lines` would not write it and it is not a bracket in its place.
    """
    most = len(data) // SHORTEST_LINE + 1
    columns: list[NDArray[Any]] = [np.empty(most, column.dtype) for column in EMPTY]
    read = _read.sized(len(data) // 2)
    sizes, divided = np.array(limits[:6], np.int64), np.array(limits.parts, np.int64)
    taken, count, length, rank, inside, before, wrong = read(data, 0, 0, *state, sizes, divided, *columns, *TEMPLATES)
    table = Rows(*(column[:length] for column in columns))
    return Taken(table, int(taken), int(count), State(int(rank), bool(inside), int(before)), bool(wrong))


@kernel
def _read(
    data: Bytes, here: int, row: int, r: int, inside: bool, before: int, sizes: Numbers, divided: Numbers, rank: Ints,
    op: Small, kind: Small, stage: Ints, mb: Ints, via: Ints, peer: Ints, letters: Bytes, begin: Numbers,
    length: Numbers, fields: Numbers, field: Numbers, limit: Numbers, kinds: Flags, name_begin: Numbers,
    name_length: Numbers, fewest: Numbers, most: Numbers,
) -> tuple[int, int, int, int, bool, int, bool]:  # fmt: skip
    count = 0
    while r < sizes[WORKERS] and here < len(data):
        end = here + (SHORTEST_LINE if here + 2 < len(data) and data[here + 2] == SPACE else 0)
        while end < len(data) and data[end] != NEWLINE:
            end += 1
        if end >= len(data):
            break
        if end - here >= 3 and data[here] == SPACE and data[here + 1] == SPACE and data[here + 2] != SPACE:
            # A bracket, by itself or with a comma.
            bracket, size = data[here + 2], end - here
            if not inside and bracket == OPEN and size == 3:
                inside, before = True, BRACKET
            elif inside and bracket == CLOSE and before != WITH_COMMA:
                more = size == 4 and data[here + 3] == COMMA
                if (r + 1 < sizes[WORKERS]) != more or size != (4 if more else 3):
                    return here, count, row, r, inside, before, True
                r += 1
                inside = False
            else:
                return here, count, row, r, inside, before, True
            here = end + 1
            count += 1
            continue
        stop = end - 1 if data[end - 1] == COMMA else end
        opcode = -1
        if inside and before != NO_COMMA:
            for o in range(len(begin)):
                text, size = begin[o, 0], length[o, 0]
                if (here + size < stop and data[here + NAME] == letters[text + NAME]
                        and matches(data, here, letters, text, size)):  # fmt: skip
                    opcode = o
                    break
        if opcode < 0:
            return here, count, row, r, inside, before, True
        at = here + length[opcode, 0]
        rank[row], op[row], kind[row] = r, opcode, W if opcode == FETCH_W else NONE
        stage[row], mb[row], via[row], peer[row] = -1, -1, -1, -1
        for k in range(fields[opcode]):
            what = field[opcode, k]
            if what == VERSION and sizes[VERSIONS] == 0:
                break
            shards = divided[stage[row]] if what == SHARD and len(divided) else 1
            if what == SHARD and shards == 1:
                continue
            if k:
                size = length[opcode, k]
                if at + size >= stop or not matches(data, at, letters, begin[opcode, k], size):
                    at = -1
                    break
                at += size
            if what == BUFFER:
                at = _read_name(
                    data, at, stop, row, opcode, sizes, divided, kind, stage, mb, via, peer, letters, kinds,
                    name_begin, name_length, fewest, most,
                )  # fmt: skip
                if at < 0:
                    break
                continue
            number, at = read_number(data, at, stop)
            if number < 0 or number >= (shards if what == SHARD else sizes[limit[opcode, k]]):
                at = -1
                break
            if what == STAGE:
                stage[row] = number
            elif what == MB:
                mb[row] = number
            elif what == SHARD:
                via[row] = number
            else:
                peer[row] = number
        if at < 0 or at + 1 != stop or data[at] != BRACE:
            return here, count, row, r, inside, before, True
        before = WITH_COMMA if stop < end else NO_COMMA
        row += 1
        here = end + 1
        count += 1
    return here, count, row, r, inside, before, False


@kernel
def _read_name(
    data: Bytes, at: int, stop: int, row: int, opcode: int, sizes: Numbers, divided: Numbers, kind: Small, stage: Ints,
    mb: Ints, via: Ints, peer: Ints, letters: Bytes, kinds: Flags, name_begin: Numbers,
    name_length: Numbers, fewest: Numbers, most: Numbers,
) -> int:  # fmt: skip
    """Read a buffer's name into a row; return the position after it, or -1 if the opcode may not name such a buffer."""
    named = NONE
    for k in range(1, len(name_begin)):
        size = name_length[k]
        if (kinds[opcode, k] and at + size < stop and data[at + size] == DOT
                and matches(data, at, letters, name_begin[k], size)):  # fmt: skip
            named = k
    if named == NONE:
        return -1
    at += name_length[named]
    kind[row] = named
    numbers = 0
    while at < stop and data[at] == DOT and numbers < 3:
        number, at = read_number(data, at + 1, stop)
        limit = sizes[MICROBATCHES] if numbers == 1 else sizes[TIES] if named == T else sizes[STAGES]
        if number < 0 or number >= limit:
            return -1
        if numbers == 0:
            stage[row] = number
        elif numbers == 1:
            mb[row] = number
        else:
            via[row] = number
        numbers += 1
    if named in (W, DW) and len(divided) and divided[stage[row]] > 1:  # w.s/k, dw.s/k
        number = -1
        if at < stop and data[at] == SLASH:
            number, at = read_number(data, at + 1, stop)
        if number < 0 or number >= divided[stage[row]]:
            return -1
        via[row] = number
    if named == W and sizes[VERSIONS] > 0:  # w.s@v, which only FREE names
        number = -1
        if opcode == FREE and at < stop and data[at] == AT:
            number, at = read_number(data, at + 1, stop)
        if number < 0 or number >= sizes[VERSIONS]:
            return -1
        peer[row] = number
    if numbers < fewest[named] or numbers > most[named] or at >= stop or data[at] != QUOTE:
        return -1
    return at + 1


@kernel
def matches(data: Bytes, at: int, letters: Bytes, begin: int, length: int) -> bool:
    """Whether the data at a position are these letters."""
    for i in range(length):  # noqa: SIM110  numba has no all() of a generator
        if data[at + i] != letters[begin + i]:
            return False
    return True


@kernel
def read_number(data: Bytes, at: int, stop: int) -> tuple[int, int]:
    """A number without leading zeros, and the position after it; the number is -1 if there is none below 2**31."""
    number, first = 0, at
    while at < stop and ZERO <= data[at] <= NINE and at - first < 10:
        number = number * 10 + int(data[at]) - ZERO
        at += 1
    if at == first or (data[first] == ZERO and at - first > 1) or number >= 2**31:
        return -1, at
    return number, at
