"""`python -m schedgen.report.draw.gallery OUT FILE...`: pictures of many schedules on one page.

OUT/index.html shows them all and needs no other file. Beside it there is a page for each schedule, to zoom into.
"""

from __future__ import annotations

import base64
import html
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from schedgen.checker.files import checked
from schedgen.report.draw.figure import figure, legend
from schedgen.report.draw.page import filled, page
from schedgen.report.draw.scene import Scene, build_scene, default_colouring, key_figures, size_text
from schedgen.schemes import SCHEMES
from schedgen.simulator.simulate import simulate
from schedgen.simulator.stats import most_weights, stats
from schedgen.util.errors import RefusedFile, UsageError, one_line
from schedgen.util.files import open_output

WEIGHTS = ("w", "dw")  # the kinds of messages that are drawn


def main(arguments: Sequence[str]) -> int:
    """Write the gallery of the schedules arguments[1:] to the folder arguments[0]; return the exit code."""
    if len(arguments) < 2:
        print("usage: python -m schedgen.report.draw.gallery OUT FILE...", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = [Path(name) for name in arguments[1:]]
        scenes = [_read_scene(path, name) for path, name in zip(paths, _page_names(paths), strict=True)]
        parts = {
            "table": "\n".join(map(_row, scenes)),
            "legend": _image("legend", lambda out: legend(scenes, out, "microbatch", WEIGHTS)),
            "entries": "\n".join(_entry(scene, folder) for scene in scenes),
        }
        with open_output(str(folder / "index.html")) as out:
            out.write(filled("gallery.html", parts))
    except (UsageError, RefusedFile) as error:
        print(f"schedgen: {one_line(error)}", file=sys.stderr)
        return error.code
    except OSError as error:
        print(f"schedgen: {one_line(error.filename)}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _page_names(paths: Sequence[Path]) -> list[str]:
    """A name for each schedule's page: that of its file, with a number behind it if another page has that name."""
    names = ["index"]
    for path in paths:
        name, number = path.stem, 1
        while name in names:
            number += 1
            name = f"{path.stem}-{number}"
        names.append(name)
    return names[1:]


def _read_scene(path: Path, name: str) -> Scene:
    program = checked(str(path))
    run = simulate(program, program.header.cost)
    return build_scene(name, path.name, program, run.timeline(), run.sizes, seconds=False)


def _row(scene: Scene) -> str:
    """A scene's row of the table: peak weights are in stages, of its own and foreign copies."""
    weights = most_weights(stats(scene.program))
    name = html.escape(scene.name)
    numbers = (f"{scene.latency:.4g}", f"{scene.shares()[:, 0].mean():.1%}", scene.peak_activations().max(), weights)
    cells = "".join(f"<td>{number}</td>" for number in numbers)
    return f'<tr><td><a href="#{name}">{name}</a></td>{cells}</tr>'


def _entry(scene: Scene, folder: Path) -> str:
    """A scene's section of the gallery; writes its own page to `folder`."""
    by = default_colouring([scene])
    with open_output(str(folder / f"{scene.name}.html")) as out:
        out.write(page([scene], by, transfers=False))
    tied = "".join(f"; tied stages {' and '.join(map(str, stages))}" for stages in scene.program.header.tied)
    colour = "; colour is the stage" if by == "stage" else ""
    name, caption = html.escape(scene.name), html.escape(f"{size_text(scene)}{tied}; {key_figures(scene)}{colour}")
    built_in = SCHEMES.get(str(scene.program.header.scheme["name"]))
    about = built_in.text.splitlines() if built_in else ()
    lines = "".join(f"<p>{html.escape(line)}</p>" for line in about if line)
    image = _image(f"{name}: {caption}", lambda out: figure([scene], out, "svg", by, WEIGHTS, bare=True))
    link = f'<h2 id="{name}"><a href="{name}.html">{name}</a></h2>'
    return f'<section>{link}<p class="facts">{caption}</p>{lines}{image}</section>'


def _image(alternative: str, draw: Callable[[BinaryIO], None]) -> str:
    picture = io.BytesIO()
    draw(picture)
    source = base64.b64encode(picture.getvalue()).decode()
    return f'<img alt="{alternative}" src="data:image/svg+xml;base64,{source}">'


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
