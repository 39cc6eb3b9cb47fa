"""Scenes as one self-contained HTML file: the scripts of web/, the scenes' numbers as JSON, and their columns.

The columns have a number for each row of a program. They are packed one after another, compressed and written in
base64; the page computes bars from them.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedgen.analysis import analyse
from schedgen.ir.file import line_of
from schedgen.ir.instructions import KIND_NAME, OPERANDS, Kind, Op
from schedgen.report.draw.colours import HELD, LOOKS, OVERHEAD, SHARE_COLOURS, TRANSFER_COLOURS, colours
from schedgen.report.draw.scene import LOOK_OF_OP, Scene, colour_count, joint_title
from schedgen.simulator.timeline import CAUSES, MEANING, SHARES

SCRIPTS = ("data", "format", "view", "picture", "bars", "arrows", "hover", "control", "panel")  # of web/, in this order
LEVEL = 6  # of compression: 9 takes five times as long and saves a thousandth
Columns = dict[str, NDArray[Any]]


def page(scenes: Sequence[Scene], by: str, transfers: bool) -> bytes:
    """The file. Initially colours stand for `by`, microbatch or stage, and `transfers` says if messages are shown."""
    sized = any(scene.sized for scene in scenes)
    packed: list[bytes] = []
    described = [_described(scene, sized, packed) for scene in scenes]
    counts = {by: colour_count(scenes, by) for by in ("microbatch", "stage")}
    title, measured = joint_title(scenes), len(scenes) > 1 and scenes[0].program is scenes[1].program
    numbers = {
        "title": title,
        "by": by,
        "transfers": transfers,
        "memory": "activations",
        "order": "worker" if measured else "schedule",
        "sized": sized,
        "looks": [{"letter": look.letter, "words": look.words, "hatch": look.hatch, "ink": look.ink} for look in LOOKS],
        "paints": {by: [colours(look, count) for look in LOOKS] for by, count in counts.items()},
        "shares": SHARES,
        "shareWords": MEANING,
        "shareColours": SHARE_COLOURS,
        "held": HELD,
        "grey": OVERHEAD,
        "transferColours": TRANSFER_COLOURS,
        "causes": [cause.replace("_", " ") for cause in CAUSES],
        "kinds": [KIND_NAME.get(kind, "") for kind in Kind],
        "operands": [[op.name, OPERANDS[op]] for op in Op],
        "scenes": described,
    }
    parts = {
        "title": html.escape(title),
        "scenes": json.dumps(numbers, separators=(",", ":")).replace("<", "\\u003c"),
        "columns": base64.b64encode(gzip.compress(b"".join(packed), LEVEL, mtime=0)).decode(),
    }
    web = resources.files("schedgen.report.draw") / "web"
    parts["script"] = "\n".join((web / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    form = (web / "page.html").read_text(encoding="utf-8")
    # In one pass, because a title may look like the placeholder of another part.
    return re.sub(r"{{(\w+)}}", lambda placeholder: parts[placeholder[1]], form).encode()


def _described(scene: Scene, sized: bool, packed: list[bytes]) -> dict[str, Any]:
    """A scene as JSON; its columns are appended to `packed`, the widest first, each padded to a multiple of 8 bytes."""
    header, shares = scene.program.header, scene.shares()
    columns = _columns(scene, sized)
    for column in columns.values():
        data = column.tobytes()
        packed.append(data + bytes(-len(data) % 8))
    return {
        "name": scene.name,
        "file": scene.file,
        "workers": header.workers,
        "stages": header.stages,
        "microbatches": header.microbatches,
        "seconds": scene.seconds,
        "makespan": scene.makespan,
        "latency": scene.latency,
        "line": line_of(scene.program, 0, 0),
        "looks": scene.looks,
        "links": [] if scene.links is None else scene.links.names,
        "shares": shares.round(6).tolist(),
        "mean": shares.mean(axis=0).round(6).tolist(),
        "columns": [[name, column.dtype.str[1:], len(column)] for name, column in columns.items()],
    }


def _columns(scene: Scene, sized: bool) -> Columns:
    """The columns in little-endian types, by row; those about SENDs have an entry for each SEND.

    gap       from the end of the row before to the row's start
    first     the part of the gap before the message that the row waits for is sent
    taken     bytes (or buffers) that the row allocates when it starts; given: frees when it ends
    saved     1: the row keeps something for a backward; -1: it is the last to use it
    awaited   the SEND whose message the row waits for last; -1: none
    receiver  for a SEND: the row that receives its message; user: the first row that uses it; -1: none
    link      which of the scene's links is occupied, linkStart, linkLength: when, linkRow: by what; in this order
    """
    table, timeline, breakdown, bounds = scene.program.rows, scene.timeline, scene.breakdown, scene.program.bounds
    waits, held, saved = analyse(scene.program).waits, scene.held(in_bytes=sized), scene.held_activations()
    begin = timeline.start - timeline.wait
    end_before = scene.program.of_row_before(timeline.start + timeline.length)
    send = scene.program.rows_of(Op.SEND)
    user = np.full(len(table.op), -1)
    user[waits.sends] = np.repeat(np.arange(len(table.op)), np.diff(waits.first))
    floats: Columns = {
        "gap": np.maximum(timeline.start - end_before, 0.0),
        "length": timeline.length,
        "first": np.maximum(breakdown.until - begin, 0.0),
        "taken": held.taken,
        "given": held.freed,
        "arrival": timeline.arrival[send],
    }
    integers: Columns = {
        "bounds": bounds,
        "stage": table.stage,
        "mb": table.mb,
        "piece": table.piece,
        "operand": table.operand,
        "awaited": breakdown.awaited,
        "send": send,
        "receiver": waits.receiver[send],
        "user": user[send],
    }
    small: Columns = {
        "op": table.op,
        "kind": table.kind,
        "look": LOOK_OF_OP[table.op],
        "cause": timeline.cause,
        "early": breakdown.early,
        "late": breakdown.late,
        "saved": np.sign(saved.taken) - np.sign(saved.freed),
    }
    if scene.links is not None:
        floats |= {"linkStart": scene.links.start, "linkLength": scene.links.length}
        integers |= {"link": scene.links.link, "linkRow": scene.links.row}
    types = ((floats, "<f8"), (integers, "<i4"), (small, "<i1"))
    return {name: column.astype(form) for columns, form in types for name, column in columns.items()}
