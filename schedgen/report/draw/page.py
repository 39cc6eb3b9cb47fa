"""A schedule as one HTML file that needs nothing else: what is in web/, the scenes' numbers, and their columns.

The columns of a schedule's rows go in as arrays of numbers, one behind the
other, compressed; the page makes bars of them.
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

from schedgen.analysis.lifetimes import SAVED
from schedgen.ir.file import line_of
from schedgen.ir.instructions import KIND_NAME, OPERANDS, Kind, Op
from schedgen.report.draw import LOOK, Scene, numbered, titles
from schedgen.report.draw.colours import HELD, LOOKS, OVERHEAD, SHARE_COLOURS, TRANSFER_COLOURS, colours
from schedgen.simulator.memory_timeline import Held
from schedgen.simulator.simulate import CAUSES
from schedgen.simulator.time_breakdown import MEANING, SHARES

SCRIPTS = (
    "data",
    "view",
    "bars",
    "arrows",
    "hover",
    "control",
    "panel",
)  # files of web/, in the order in which they run
Columns = dict[str, NDArray[Any]]


def page(scenes: Sequence[Scene], by: str, transfers: bool) -> bytes:
    """The file; what can be switched on the page begins so: `by`, microbatch or stage, and whether `transfers` show."""
    sized = any(scene.sized for scene in scenes)
    packed: list[bytes] = []
    counts = {by: numbered(scenes, by) for by in ("microbatch", "stage")}
    described = [_described(scene, sized, packed) for scene in scenes]
    heading, measured = titles(scenes), len(scenes) > 1 and scenes[0].program is scenes[1].program
    whole = {
        "title": heading,
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
        "title": html.escape(heading),
        "scenes": json.dumps(whole, separators=(",", ":")).replace("<", "\\u003c"),
        "columns": base64.b64encode(gzip.compress(b"".join(packed), mtime=0)).decode(),
    }
    web = resources.files("schedgen.report.draw") / "web"
    parts["script"] = "\n".join((web / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    text = (web / "page.html").read_text(encoding="utf-8")
    # In one pass: a title may look like the place of another part.
    return re.sub(r"{{(\w+)}}", lambda place: parts[place[1]], text).encode()


def _described(scene: Scene, sized: bool, packed: list[bytes]) -> dict[str, Any]:
    """A scene's single numbers; its columns are appended to `packed`, widest first, each from a multiple of 8 bytes."""
    header, share = scene.program.header, scene.share()
    columns = _columns(scene, scene.held if sized else scene.counted)
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
        "shares": share.round(6).tolist(),
        "mean": share.mean(axis=0).round(6).tolist(),
        "columns": [[name, column.dtype.str[1:], len(column)] for name, column in columns.items()],
    }


def _columns(scene: Scene, held: Held) -> Columns:
    """By row of the program, and by SEND; little-endian, as the page reads them.

    gap    from the end of the row before to the row's start
    first  the part of that before what it waits for is sent
    taken  bytes (or buffers) that the row takes when it starts; given: gives back when it ends
    saved  1: the row keeps something for a backward; -1: it is the last to use it
    """
    table, walk, times, bounds = scene.program.rows, scene.walk, scene.idle, scene.program.bounds
    begin = walk.start - walk.wait
    before = np.append(0.0, (walk.start + walk.length)[:-1])
    before[bounds[:-1][np.diff(bounds) > 0]] = 0.0
    send = np.flatnonzero(table.op == Op.SEND)
    user = np.full(len(table.op), -1)
    user[times.needs.sends] = np.repeat(np.arange(len(table.op)), np.diff(times.needs.first))
    look = np.array([LOOK.get(op, -1) for op in Op])[table.op]
    wide: Columns = {
        "gap": np.maximum(walk.start - before, 0.0),
        "length": walk.length,
        "first": np.maximum(times.until - begin, 0.0),
        "taken": held.taken.sum(axis=1),
        "given": held.given.sum(axis=1),
        "arrival": walk.arrival[send],
    }
    whole: Columns = {
        "bounds": bounds,
        "stage": table.stage,
        "mb": table.mb,
        "via": table.via,
        "peer": table.peer,
        "awaited": times.awaited,
        "send": send,
        "receiver": times.needs.receiver[send],
        "user": user[send],
    }
    small: Columns = {
        "op": table.op,
        "kind": table.kind,
        "look": look,
        "cause": walk.cause,
        "early": times.early,
        "late": times.late,
        "saved": np.sign(scene.counted.taken[:, SAVED]) - np.sign(scene.counted.given[:, SAVED]),
    }
    types = ((wide, "<f8"), (whole, "<i4"), (small, "<i1"))
    return {name: column.astype(form) for columns, form in types for name, column in columns.items()}
