"""Instructions as lines of text, and back: the two loops that large files spend their time in.

Both are driven by one table made from `OPERANDS`, so that a line is what
`Instruction.__str__` says. The reader takes only what the writer makes and
stops at the first line that is anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedgen.ir.instructions import KIND_NAME, KINDS, OPERANDS, VERSIONED, Ints, Kind, Op
from schedgen.ir.program import Rows, rows
from schedgen.util.jit import kernel

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]

LONGEST = 128  # bytes of a line: four numbers of ten digits, two names and what stands between
STAGE, MB, PEER, BUFFER, VERSION, SHARD = range(6)
_FIELD = {
    "stage": STAGE, "mb": MB, "buf": BUFFER, "from": PEER, "to": PEER, "group": PEER, "version": VERSION,
    "shard": SHARD,
}  # fmt: skip
# An index into decode.Bounds; a shard's bound is that of its stage.
_BOUND = {"stage": 1, "mb": 2, "buf": 0, "from": 0, "to": 0, "group": 3, "version": 5, "shard": 0}


class Templates(NamedTuple):
    """A line is text, field, text, field, text; a buffer's name is letters and up to three numbers.

    Where weights have no versions, a field VERSION and the text before it are left out; where those of the stage are
    not divided, a field SHARD.
    """

    letters: Bytes  # all texts, one behind the other
    begin: Numbers  # (opcodes, 4): where text k begins in `letters`, and behind the last field
    length: Numbers  # (opcodes, 4): 0 where an opcode has no such text
    fields: Numbers  # (opcodes,): how many
    field: Numbers  # (opcodes, 3): STAGE, MB, PEER, BUFFER, VERSION or SHARD
    bound: Numbers  # (opcodes, 3): which size a number there is below
    kinds: NDArray[np.bool_]  # (opcodes, kinds): the kinds of buffer an opcode may name
    name_begin: Numbers  # (kinds,): the name's letters
    name_length: Numbers


def _templates() -> Templates:
    text = b""
    begin, length = np.zeros((len(Op), 4), np.int64), np.zeros((len(Op), 4), np.int64)
    field, bound = np.zeros((len(Op), 3), np.int64), np.zeros((len(Op), 3), np.int64)
    kinds = np.zeros((len(Op), len(Kind)), np.bool_)
    names = np.zeros((2, len(Kind)), np.int64)
    every = {op: (*operands, *["version"] * (op in VERSIONED)) for op, operands in OPERANDS.items()}
    for op, operands in every.items():
        leads = [f'   {{"op": "{op.name}"', *[""] * (len(operands) - 1)]
        pieces = [f'{lead}, "{name}": ' for lead, name in zip(leads, operands, strict=True)] + ["}"]
        for k, piece in enumerate(pieces):
            begin[op, k], length[op, k] = len(text), len(piece)
            text += piece.encode()
        for k, name in enumerate(operands):
            field[op, k], bound[op, k] = _FIELD[name], _BOUND[name]
        kinds[op, list(KINDS.get(op, ()))] = True
    for kind, name in KIND_NAME.items():
        names[:, kind] = len(text), len(name) + 1
        text += f'"{name}'.encode()
    fields = np.array([len(every[op]) for op in Op], np.int64)
    return Templates(np.frombuffer(text, np.uint8), begin, length, fields, field, bound, kinds, names[0], names[1])


TEMPLATES = _templates()
EMPTY = rows(0, np.zeros(0, np.int32))


def lines(table: Rows, begin: int, end: int, last: bool, out: Bytes) -> int:
    """Write the lines of rows begin to end - 1, the last of all without its comma; the number of bytes."""
    write = _write.sized(8 * len(table.op))
    return write(*table[1:], begin, end, last, out, *TEMPLATES)


@kernel
def _write(
    op: NDArray[np.int8], kind: NDArray[np.int8], stage: Ints, mb: Ints, via: Ints, peer: Ints, first_row: int,
    end_row: int, last: bool, out: Bytes, letters: Bytes, begin: Numbers, length: Numbers, fields: Numbers,
    field: Numbers, bound: Numbers, kinds: NDArray[np.bool_], name_begin: Numbers, name_length: Numbers,
) -> int:  # fmt: skip
    at = 0
    for row in range(first_row, end_row):
        o = op[row]
        for k in range(fields[o] + 1):
            if k < fields[o] and ((field[o, k] == 4 and peer[row] < 0) or (field[o, k] == 5 and via[row] < 0)):
                continue
            for i in range(begin[o, k], begin[o, k] + length[o, k]):
                out[at] = letters[i]
                at += 1
            if k == fields[o]:
                break
            what = field[o, k]
            if what == 0:
                at = digits(out, at, stage[row])
            elif what == 1:
                at = digits(out, at, mb[row])
            elif what == 2 or what == 4:
                at = digits(out, at, peer[row])
            elif what == 5:
                at = digits(out, at, via[row])
            else:
                for i in range(name_begin[kind[row]], name_begin[kind[row]] + name_length[kind[row]]):
                    out[at] = letters[i]
                    at += 1
                for number in (stage[row], mb[row]):
                    if number >= 0:
                        out[at] = 46  # .
                        at = digits(out, at + 1, number)
                if via[row] >= 0:
                    out[at] = 47 if kind[row] >= 3 else 46  # / of weights and their gradients
                    at = digits(out, at + 1, via[row])
                if o == 12 and peer[row] >= 0:  # FREE of a version
                    out[at] = 64  # @
                    at = digits(out, at + 1, peer[row])
                out[at] = 34  # "
                at += 1
        if row + 1 < end_row or not last:
            out[at] = 44  # ,
            at += 1
        out[at] = 10
        at += 1
    return at


@kernel
def digits(out: Bytes, at: int, number: int) -> int:
    """Write a number of at least 0; the place behind it."""
    size = 1
    rest = number // 10
    while rest:
        size += 1
        rest //= 10
    for i in range(at + size - 1, at - 1, -1):
        out[i] = 48 + number % 10
        number //= 10
    return at + size


class State(NamedTuple):
    """Where the reader of the lists stands: the rank; is it within that rank's list; may a line follow."""

    rank: int = 0
    inside: bool = False
    comma: int = 0  # the line before has none: 0, or one: 1; or it is the list's first bracket: 2


def parse(
    data: Bytes, state: State, sizes: tuple[int, int, int, int, int, int], parts: Sequence[int] = ()
) -> tuple[Rows, int, int, State, bool]:
    """Read whole lines: (rows, bytes taken, lines taken, state behind them, whether a wrong line follows).

    `sizes`: workers, stages, microbatches, groups, ties, versions; `parts` of the weights of each stage, or nothing
    where none are divided. It ends behind the last rank's list, where no whole line is left, or before the first
    line that `lines` and the brackets around it would not give.
    """
    most = len(data) // 24 + 1  # no line of an instruction is shorter
    columns: list[NDArray[Any]] = [np.empty(most, column.dtype) for column in EMPTY]
    read = _read.sized(len(data) // 4)
    divided = np.array(parts, np.int64)
    taken, count, length, rank, inside, comma, wrong = read(data, *state, *sizes, divided, *columns, *TEMPLATES)
    found = Rows(*(column[:length] for column in columns))
    return found, int(taken), int(count), State(int(rank), bool(inside), int(comma)), bool(wrong)


@kernel
def _read(
    data: Bytes, r: int, inside: bool, comma: int, workers: int, stages: int, batches: int, groups: int, ties: int,
    versions: int, divided: Numbers, rank: Ints, op: NDArray[np.int8], kind: NDArray[np.int8], stage: Ints, mb: Ints,
    via: Ints, peer: Ints,
    letters: Bytes, begin: Numbers, length: Numbers, fields: Numbers, field: Numbers, bound: Numbers,
    kinds: NDArray[np.bool_], name_begin: Numbers, name_length: Numbers,
) -> tuple[int, int, int, int, bool, int, bool]:  # fmt: skip
    limits = (workers, stages, batches, groups, ties, versions)
    row, count, here = 0, 0, 0
    while r < workers and here < len(data):
        end = here
        while end < len(data) and data[end] != 10:
            end += 1
        if end == len(data):
            break
        if end - here >= 3 and data[here] == 32 and data[here + 1] == 32 and data[here + 2] != 32:
            # A bracket, by itself or with a comma.
            bracket, size = data[here + 2], end - here
            if not inside and bracket == 91 and size == 3:
                inside, comma = True, 2
            elif inside and bracket == 93 and comma != 1:
                more = size == 4 and data[here + 3] == 44
                if (r + 1 < workers) != more or size != (4 if more else 3):
                    return here, count, row, r, inside, comma, True
                r += 1
                inside = False
            else:
                return here, count, row, r, inside, comma, True
            here = end + 1
            count += 1
            continue
        stop = end - 1 if data[end - 1] == 44 else end
        found = -1
        if inside and comma > 0:
            for o in range(len(begin)):
                if here + length[o, 0] < stop and matches(data, here, letters, begin[o, 0], length[o, 0]):
                    found = o
        if found < 0:
            return here, count, row, r, inside, comma, True
        at = here + length[found, 0]
        rank[row], op[row], kind[row] = r, found, 0
        stage[row], mb[row], via[row], peer[row] = -1, -1, -1, -1
        good = True
        for k in range(fields[found]):
            if field[found, k] == 4 and versions == 0:
                break
            shards = 1
            if field[found, k] == 5:
                shards = divided[stage[row]] if len(divided) else 1
                if shards == 1:
                    continue
            if k:
                if at + length[found, k] >= stop or not matches(data, at, letters, begin[found, k], length[found, k]):
                    good = False
                    break
                at += length[found, k]
            if field[found, k] != 3:
                number, at = natural(data, at, stop)
                if number < 0 or number >= (shards if field[found, k] == 5 else limits[bound[found, k]]):
                    good = False
                    break
                if field[found, k] == 0:
                    stage[row] = number
                elif field[found, k] == 1:
                    mb[row] = number
                elif field[found, k] == 5:
                    via[row] = number
                else:
                    peer[row] = number
                continue
            named = 0
            for one in range(1, len(name_begin)):
                size = name_length[one]
                if (kinds[found, one] and at + size < stop and data[at + size] == 46
                        and matches(data, at, letters, name_begin[one], size)):  # fmt: skip
                    named = one
            if named == 0:
                good = False
                break
            at += name_length[named]
            kind[row] = named
            parts = 0
            while good and at < stop and data[at] == 46 and parts < 3:
                number, at = natural(data, at + 1, stop)
                if number < 0 or number >= (batches if parts == 1 else ties if named == 5 else stages):
                    good = False
                if parts == 0:
                    stage[row] = number
                elif parts == 1:
                    mb[row] = number
                else:
                    via[row] = number
                parts += 1
            if good and len(divided) and (named == 3 or named == 4) and divided[stage[row]] > 1:  # w.s/k, dw.s/k
                number = -1
                if at < stop and data[at] == 47:
                    number, at = natural(data, at + 1, stop)
                good = 0 <= number < divided[stage[row]]
                via[row] = number
            if named == 3 and found == 12 and versions > 0:  # FREE of w.s@v
                number = -1
                if at < stop and data[at] == 64:
                    number, at = natural(data, at + 1, stop)
                if number < 0 or number >= versions:
                    good = False
                peer[row] = number
            elif named == 3 and versions > 0:
                good = False
            # x.s.b or x.s.b.c, g.s.b or g.s.b.c, w.s or w.s/k, dw.s or dw.s/k, t.k
            most = 1 if named >= 3 else 3
            least = 1 if named >= 3 else 2
            if not good or parts < least or parts > most or at >= stop or data[at] != 34:
                good = False
                break
            at += 1
        if not good or at + 1 != stop or data[at] != 125:
            return here, count, row, r, inside, comma, True
        if found == 0:
            kind[row] = 3  # FETCH_W fetches weights
        comma = 1 if stop < end else 0
        row += 1
        here = end + 1
        count += 1
    return here, count, row, r, inside, comma, False


@kernel
def matches(data: Bytes, at: int, letters: Bytes, begin: int, length: int) -> bool:
    for i in range(length):  # noqa: SIM110  numba has no all() of a generator
        if data[at + i] != letters[begin + i]:
            return False
    return True


@kernel
def natural(data: Bytes, at: int, stop: int) -> tuple[int, int]:
    """A number without leading zeros, and the place behind it; -1 where there is none below 2**31."""
    number, first = 0, at
    while at < stop and 48 <= data[at] <= 57 and at - first < 10:
        number = number * 10 + int(data[at]) - 48
        at += 1
    if at == first or (data[first] == 48 and at - first > 1) or number >= 2**31:
        return -1, at
    return number, at
