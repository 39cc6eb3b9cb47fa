"""`python -m schedgen.report.draw.gallery OUT FILE...`: pictures of many schedules on one page.

OUT/index.html has them all and needs no other file; the page of each schedule lies beside it.
"""

from __future__ import annotations

import base64
import html
import inspect
import io
import re
import sys
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import BinaryIO

from schedgen.checker.files import checked
from schedgen.report.draw import Scene, facts, scene, sizes, usual
from schedgen.report.draw.figure import figure, legend
from schedgen.report.draw.page import page
from schedgen.schemes import SCHEMES
from schedgen.simulator.cost import Machine
from schedgen.simulator.memory_plan import measured
from schedgen.simulator.simulate import simulate
from schedgen.simulator.stats import stats
from schedgen.simulator.timeline import simulated
from schedgen.util.errors import RefusedFile, UsageError, one_line
from schedgen.util.files import open_output

WEIGHTS = ("w", "dw")  # the messages that are drawn


def main(arguments: Sequence[str]) -> int:
    if len(arguments) < 2:
        print("usage: python -m schedgen.report.draw.gallery OUT FILE...", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scenes = [_scene(Path(name)) for name in arguments[1:]]
        parts = {
            "table": "\n".join(map(_row, scenes)),
            "legend": _image("legend", lambda out: legend(scenes, out, "microbatch", WEIGHTS)),
            "entries": "\n".join(_entry(one, folder) for one in scenes),
        }
        text = (resources.files("schedgen.report.draw") / "web" / "gallery.html").read_text(encoding="utf-8")
        with open_output(str(folder / "index.html")) as out:
            out.write(re.sub(r"{{(\w+)}}", lambda place: parts[place[1]], text).encode())
    except (UsageError, RefusedFile) as error:
        print(f"schedgen: {one_line(error)}", file=sys.stderr)
        return error.code
    except OSError as error:
        print(f"schedgen: {one_line(error.filename)}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _scene(path: Path) -> Scene:
    program = checked(str(path))
    walk = simulated(program, simulate(program, program.header.cost))
    return scene(path.stem, path.name, program, walk, measured(Machine(), program.header.stages), seconds=False)


def _row(one: Scene) -> str:
    """A schedule's line of the table."""
    workers = stats(one.program)["workers"]
    weights = max(worker["weight_storage"] + worker["peak_memory"]["weight"] for worker in workers)
    name = html.escape(one.name)
    numbers = (f"{one.latency:.4g}", f"{one.share()[:, 0].mean():.1%}", one.peak_activations().max(), weights)
    cells = "".join(f"<td>{number}</td>" for number in numbers)
    return f'<tr><td><a href="#{name}">{name}</a></td>{cells}</tr>'


def _entry(one: Scene, folder: Path) -> str:
    """A schedule's part of the page; its own page is written to `folder`."""
    with open_output(str(folder / f"{one.name}.html")) as out:
        out.write(page([one], usual([one]), transfers=False))
    tied = "".join(f"; tied stages {' and '.join(map(str, stages))}" for stages in one.program.header.tied)
    colour = "; colour is the stage" if usual([one]) == "stage" else ""
    name, said = html.escape(one.name), html.escape(f"{sizes(one)}{tied}; {facts(one)}{colour}")
    lines = "".join(f"<p>{html.escape(line)}</p>" for line in _about(one))
    image = _image(f"{name}: {said}", lambda out: figure([one], out, "svg", usual([one]), WEIGHTS, bare=True))
    link = f'<h2 id="{name}"><a href="{name}.html">{name}</a></h2>'
    return f'<section>{link}<p class="facts">{said}</p>{lines}{image}</section>'


def _image(alternative: str, draw: Callable[[BinaryIO], None]) -> str:
    picture = io.BytesIO()
    draw(picture)
    source = base64.b64encode(picture.getvalue()).decode()
    return f'<img alt="{alternative}" src="data:image/svg+xml;base64,{source}">'


def _about(one: Scene) -> list[str]:
    """What the scheme's module says of it."""
    module = SCHEMES.get(str(one.program.header.scheme["name"]))
    return [line for line in (inspect.getdoc(module) or "").splitlines() if line]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
