"""Hostile inputs: ways to damage a schedule file or any JSON, each a function of a Random and bytes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from random import Random

Mutation = Callable[[Random, bytes], bytes]

LONGEST = 2**20  # bytes a mutation adds at the most
NUMBERS = (
    b"0", b"1", b"2", b"-1", b"-0", b"007", b"1.0", b"0.5", b"1e0", b"1e-400", b"1e400", b"-1e400", b"NaN", b"Infinity",
    b"-Infinity", b"1e17", b"1e-13", b"99999999999", b"2147483646", b"2147483647", b"2147483648", b"4294967296",
    b"1000000000", b"1000000000000000000", b"9223372036854775807", b"9223372036854775808", b"1" + b"0" * 400,
    b"9" * 4300, b"9" * 4301, b"1_0", "٣".encode(), b"true", b"null", b'"1"', b"[]", b"[0]", b"{}", b"",
)  # fmt: skip
STRINGS = (
    "", "0", "x.0.0", "g.0.0.0", "w.0", "dw.0", "t.0", "x.0", "x.00.0", "x.-1.0", "x.2147483648.0", "w.4294967296", "F",
    "NORM", "\n", "\r\n", "\0", "\x1b[2J", "\ud800", "\u2028", "größe", "%s%n", "__class__", "a" * 200,
)  # fmt: skip
BYTES = (b"\0", b"\n", b"\r", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x1b", b'"', b"\\", b"{", b"]")

_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_TOKEN = re.compile(rb'"[^"\n]*"|[A-Za-z_]+')
_OPENING, _KEY = re.compile(rb"\{"), re.compile(rb'"[^"\n]*": ')
_FIELD = re.compile(rb'^[ {]"(\w+)": (.*[^,{\[]),?$')
_NOTHING = re.compile(b"")
_SHA = re.compile(rb'^ "sha256": "[0-9a-f]{64}"$', re.MULTILINE)


def _somewhere(chance: Random, pattern: re.Pattern[bytes], data: bytes, end: int = -1) -> re.Match[bytes]:
    """The first match after a random place and before `end`, else the first of all, else an empty one."""
    end = end if end > 0 else len(data)
    match = pattern.search(data, chance.randrange(end + 1), end) or pattern.search(data, 0, end)
    return match or _NOTHING.match(data)


# Any bytes


def some_bytes(chance: Random, data: bytes) -> bytes:
    """Some bytes flipped, dropped, or put in."""
    for _ in range(chance.choice((1, 1, 1, 2, 8, 64))):
        at = chance.randrange(len(data) + 1)
        new = chance.choice((b"", chance.choice(BYTES), bytes([chance.randrange(256)])))
        data = data[:at] + new + data[at + chance.randrange(2) :]
    return data


def a_part(chance: Random, data: bytes) -> bytes:
    """A part dropped, doubled, or copied over another."""
    a, b = (chance.randrange(len(data) + 1) for _ in range(2))
    size = chance.choice((1, 4, 16, 256, 4096))
    part = data[a : a + size]
    return chance.choice((data[:a] + data[a + size :], data[:a] + part + data[a:], data[:b] + part + data[b + size :]))


def an_end(chance: Random, data: bytes) -> bytes:
    """Cut anywhere, or something behind the end."""
    if chance.randrange(2):
        return data[: chance.randrange(len(data) + 1)]
    return data + chance.choice((b"\n", b"}\n", b" ", b"\0", b"{}", data[:200], data))


def a_number(chance: Random, data: bytes) -> bytes:
    """A number becomes its neighbour, another one of the input, or one that readers are not made for."""
    header = data.find(b'"programs"') if chance.randrange(2) else -1
    number, other = (_somewhere(chance, _NUMBER, data, header) for _ in range(2))
    near = b"%d" % (int(number[0]) + chance.choice((-1, 1))) if re.fullmatch(rb"-?\d{1,9}", number[0]) else b"1"
    return data[: number.start()] + chance.choice((near, other[0], chance.choice(NUMBERS))) + data[number.end() :]


def tokens(chance: Random, data: bytes) -> bytes:
    """Two words or strings change places, or one becomes the other."""
    a, b = sorted((_somewhere(chance, _TOKEN, data) for _ in range(2)), key=lambda match: match.start())
    if a.end() > b.start():
        return data
    last = chance.choice((a[0], b[0]))
    return data[: a.start()] + b[0] + data[a.end() : b.start()] + last + data[b.end() :]


def nested(chance: Random, data: bytes) -> bytes:
    """Nested brackets in place of a value; Python gives up at a depth of about a thousand."""
    match = _somewhere(chance, chance.choice((_NUMBER, _TOKEN)), data)
    depth = chance.choice((3, 100, chance.randrange(800, 1000), 100_000))
    opening, closing = chance.choice(((b"[", b"]"), (b'{"a": ', b"}"), (b"[0, ", b"]")))
    inside = chance.choice((b"", b"0", b"1"))
    return data[: match.start()] + opening * depth + inside + closing * depth + data[match.end() :]


def long(chance: Random, data: bytes) -> bytes:
    """A string, a name, a number, a list, blanks or many lines of up to a megabyte, in place of a value."""
    match = _somewhere(chance, chance.choice((_NUMBER, _TOKEN)), data)
    size = chance.choice((100, 100, 1000, 10_000, 10_000, 100_000, 100_000, LONGEST))
    new = chance.choice((b'"%s"' % (b"a" * size), b"[%s0]" % (b"0, " * (size // 3)), b" " * size, b"9" * size,
                         b"\n" * (size // 9), b"{%s}" % b'"a": 0,' * (size // 9)))  # fmt: skip
    return data[: match.start()] + new + data[match.end() :]


def a_line(chance: Random, data: bytes) -> bytes:
    """Lines dropped, doubled, moved, swapped, joined, emptied, or ended as on Windows."""
    lines = data.split(b"\n")
    i, j = (chance.randrange(len(lines)) for _ in range(2))
    near = min(i + chance.randrange(1, 4), len(lines) - 1)
    match chance.randrange(9):
        case 0:
            del lines[i : i + chance.choice((1, 1, 2, 10))]
        case 1:
            lines[i:i] = [lines[i]] * chance.choice((1, 1, 1, 2000))
        case 2:
            lines.insert(j, lines.pop(i))
        case 3 | 4:
            lines[i], lines[near] = lines[near], lines[i]
        case 5:
            lines[i], lines[j] = lines[j], lines[i]
        case 6:
            lines[i : i + 2] = [b"".join(lines[i : i + 2])]
        case 7:
            lines[i] = b""
        case _:
            lines[i] += chance.choice((b"\r", b" ", b",", b"\t"))
    return b"\n".join(lines)


# JSON


def a_value(chance: Random, data: bytes) -> bytes:
    """One value of the JSON is replaced, removed or repeated; in the layout of json.dumps."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return data
    return json.dumps(_changed(chance, value)).encode()


def _changed(chance: Random, value: object) -> object:
    if not isinstance(value, (dict, list)) or not value or not chance.randrange(6):
        return _junk(chance)
    key = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
    copy = value.copy()
    match chance.randrange(8):
        case 0:
            del copy[key]
        case 1 if isinstance(copy, dict):
            copy[chance.choice(STRINGS)] = copy[key]
        case 1:
            copy.insert(chance.randrange(len(copy) + 1), copy[key])
        case 2:
            other = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
            copy[key], copy[other] = value[other], value[key]
        case _:
            copy[key] = _changed(chance, value[key])
    return copy


def _junk(chance: Random) -> object:
    return chance.choice(
        (
            None, True, False, 0, 1, -1, 0.5, 1e17, 1e-13, 10**9, 2**31, 10**18, 2**63, 10**400, float("nan"),
            float("inf"), [], [[]], {}, [0], [0, 0], [1, 0], {"": 0}, chance.choice(STRINGS), chance.randrange(10),
            [chance.randrange(4) for _ in range(chance.randrange(9))], [[0, chance.randrange(4)]] * 2, "x" * 10_000,
        )
    )  # fmt: skip


def a_key_twice(chance: Random, data: bytes) -> bytes:
    """A key of the file is put into an object, maybe a second time, with another value."""
    at, key = _somewhere(chance, _OPENING, data).end(), _somewhere(chance, _KEY, data)[0]
    return data[:at] + key + chance.choice(NUMBERS) + b", " + data[at:]


# Schedule files: mutations that keep the layout, so that they get past the first reader


def a_field(chance: Random, data: bytes) -> bytes:
    """A line of the header gets another value, or is removed."""
    lines = data.split(b"\n")
    fields = [(i, match) for i, line in enumerate(lines[:40]) if (match := _FIELD.match(line))]
    if not fields:
        return data
    i, field = chance.choice(fields)
    try:
        value = _changed(chance, json.loads(field[2]))
    except (ValueError, RecursionError):
        return data
    lines[i] = lines[i][: field.start(2)] + json.dumps(value).encode() + lines[i][field.end(2) :]
    if not chance.randrange(10):
        del lines[i]
    return b"\n".join(lines)


def a_header_of_another(chance: Random, data: bytes, other: bytes) -> bytes:
    """The header of one file and the programs of another."""
    lead, _, rest = data.partition(b'\n "programs"')
    first, _, second = other.partition(b'\n "programs"')
    return chance.choice((lead + b'\n "programs"' + second, first + b'\n "programs"' + rest))


def a_size(chance: Random, data: bytes) -> bytes:
    """The header claims other sizes than the programs have."""
    size = chance.choice((0, 1, 3, 5, 1000, 10**6, 10**9, 2**31 - 1, 2**31, 10**18, 10**4000))
    key = chance.choice((b"workers", b"stages", b"microbatches", b"groups"))
    return re.sub(rb'"%s": \d+' % key, b'"%s": %d' % (key, size), data, count=1)


def a_worker(chance: Random, data: bytes) -> bytes:
    """One worker more, with a list, or one less, in the header and in the programs."""
    match = re.search(rb'"workers": (\d{1,6}),', data)
    lists = data.split(b"\n  [\n")
    if match is None or len(lists) < 2:
        return data
    workers, more = int(match[1]), chance.choice((-1, 1, 1, 100))
    tail = lists[-1].partition(b"\n  ]\n")
    if more < 0:
        lists.pop()
        if len(lists) > 1:
            lists[-1] = lists[-1].removesuffix(b"  ],") + b"  ]\n" + tail[2]
    else:
        new = chance.choice((b"", b'   {"op": "NORM", "group": 0}\n', tail[0] + b"\n"))
        more = min(more, LONGEST // (len(new) + 9) + 1)
        lists[-1] = tail[0] + (b"\n  ],\n  [\n" + new.removesuffix(b"\n")) * more + b"\n  ]\n" + tail[2]
    text = b"\n  [\n".join(lists).replace(b"\n\n", b"\n")
    return text.replace(match[0], b'"workers": %d,' % (workers + more), 1)


def an_instruction(chance: Random, data: bytes) -> bytes:
    """An instruction gets the opcode of another one, its operands, or both."""
    lines = data.split(b"\n")
    places = [i for i, line in enumerate(lines) if line.startswith(b'   {"op"')]
    if not places:
        return data
    i, j = chance.choice(places), chance.choice(places)
    a, b = (re.split(rb'(?<="op": ")(\w+)', lines[place].rstrip(b","), maxsplit=1) for place in (i, j))
    comma = b"," * lines[i].endswith(b",")
    if len(a) == len(b) == 3:
        lines[i] = b"".join(chance.choice(((*a[:1], b[1], a[2]), (*a[:2], b[2]), b))) + comma
    return b"\n".join(lines)


def an_operand(chance: Random, data: bytes) -> bytes:
    """A number of an instruction becomes another."""
    begin = data.find(b'"programs"')
    return data[:begin] + a_number(chance, data[begin:]) if begin > 0 else data


def neighbours(chance: Random, data: bytes) -> bytes:
    """Swap neighbouring lines of a list, which is often valid."""
    lines = data.split(b"\n")
    for _ in range(chance.choice((1, 1, 2, 5))):
        i = chance.randrange(len(lines))
        if lines[i][:4] == lines[i - 1][:4] == b"   {" and lines[i][-1:] == lines[i - 1][-1:]:
            lines[i - 1 : i + 1] = lines[i], lines[i - 1]
    return b"\n".join(lines)


def a_pair(chance: Random, data: bytes) -> bytes:
    """Two instructions on one buffer or job, such as a SEND and its RECV, are both removed, repeated or moved."""
    lines = data.split(b"\n")
    places = [i for i, line in enumerate(lines) if line.startswith(b'   {"op"') and line.endswith(b",")]
    if not places:
        return data
    place = chance.choice(places)
    name = re.search(rb'"buf": "[^"]*"|"stage": \d+, "mb": \d+|"group": \d+|"stage": \d+', lines[place])
    same = [i for i in places if name and name[0] in lines[i]]
    pair = sorted(chance.sample(same, min(len(same), 2)), reverse=True)
    how, by = chance.randrange(3), chance.choice((-3, -2, -1, 1, 2, 3))
    for i in pair:
        if how == 0:
            del lines[i]
        elif how == 1:
            lines.insert(i, lines[i])
        elif 0 <= i + by < len(lines):
            lines.insert(i + by, lines.pop(i))
    return b"\n".join(lines)


def a_group(chance: Random, data: bytes) -> bytes:
    """A range of lines of a rank's list is removed, repeated, or moved within the list."""
    lines = data.split(b"\n")
    begin = chance.choice([i + 1 for i, line in enumerate(lines) if line == b"  ["] or [0])
    end = next((i for i in range(begin, len(lines)) if not lines[i].endswith(b",")), begin)
    if end - begin > 3:
        i, j, k = sorted(chance.randrange(begin, end) for _ in range(3))
        a, b = lines[i:j], lines[j:k]
        lines[i:k] = chance.choice(([*b, *a], [*b, *a], [*a, *a, *b], b))
    return b"\n".join(lines)


def sealed(data: bytes) -> bytes:
    """The data with its SHA-256 corrected, if it has one, so that readers get past the hash."""
    matches = list(_SHA.finditer(data))
    if not matches:
        return data
    digest = hashlib.sha256(data[: matches[-1].start()]).hexdigest().encode()
    return data[: matches[-1].start()] + b' "sha256": "' + digest + b'"' + data[matches[-1].end() :]


ANY = (some_bytes, a_part, an_end, a_number, tokens, nested, long, a_value, a_key_twice)
LINES: tuple[Mutation, ...] = (
    a_line, a_field, a_size, a_worker, an_instruction, an_operand, a_pair, a_pair, a_group,
    neighbours, neighbours, neighbours,
)  # fmt: skip
SCHEDULE: tuple[Mutation, ...] = (*ANY, *LINES)
