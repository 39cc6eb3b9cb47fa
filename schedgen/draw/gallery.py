"""`python -m schedgen.draw.gallery OUT FILE...`: pictures of many schedules on one page.

OUT/index.html has them all and needs no other file; the page of each schedule lies beside it.
"""

from __future__ import annotations

import base64
import html
import inspect
import io
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from schedgen.cost import Machine
from schedgen.draw import Scene, facts, scene, sizes
from schedgen.draw.figure import figure
from schedgen.draw.page import page
from schedgen.errors import RefusedFile, UsageError, one_line
from schedgen.events import simulated
from schedgen.places import measured
from schedgen.schemes import SCHEMES
from schedgen.simulate import simulate
from schedgen.streams import checked, output


def main(arguments: Sequence[str]) -> int:
    if len(arguments) < 2:
        print("usage: python -m schedgen.draw.gallery OUT FILE...", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        entries = [_entry(Path(name), folder) for name in arguments[1:]]
        text = (resources.files("schedgen.draw") / "web" / "gallery.html").read_text(encoding="utf-8")
        with output(str(folder / "index.html")) as out:
            out.write(text.replace("{{entries}}", "\n".join(entries), 1).encode())
    except (UsageError, RefusedFile) as error:
        print(f"schedgen: {one_line(error)}", file=sys.stderr)
        return error.code
    except OSError as error:
        print(f"schedgen: {one_line(error.filename)}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _entry(path: Path, folder: Path) -> str:
    """A schedule's part of the page; its own page is written to `folder`."""
    program = checked(str(path))
    walk = simulated(program, simulate(program, program.header.cost))
    one = scene(path.stem, path.name, program, walk, measured(Machine(), program.header.stages), seconds=False)
    with output(str(folder / f"{path.stem}.html")) as out:
        out.write(page([one], "microbatch", transfers=False))
    picture = io.BytesIO()
    figure([one], picture, "svg", "microbatch", transfers=False)
    source = base64.b64encode(picture.getvalue()).decode()
    name, said = html.escape(path.stem), html.escape(f"{sizes(one)}; {facts(one)}")
    lines = "".join(f"<p>{html.escape(line)}</p>" for line in _about(one))
    image = f'<img alt="{name}: {said}" src="data:image/svg+xml;base64,{source}">'
    return f'<section><h2><a href="{name}.html">{name}</a></h2><p class="facts">{said}</p>{lines}{image}</section>'


def _about(one: Scene) -> list[str]:
    """What the scheme's module says of it."""
    module = SCHEMES.get(str(one.program.header.scheme["name"]))
    return [line for line in (inspect.getdoc(module) or "").splitlines() if line]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
