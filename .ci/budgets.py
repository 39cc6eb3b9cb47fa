"""Lines of Python by room, and words of the documentation, beside what they may be; exit code 1 if one has more.

A room may not grow without a word: what shrinks takes its budget along, and a new capability comes with a budget of its
own, which is added here in the commit that begins it.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {
    "schedgen": 18_600,
    "schedgen/ir": 2_540,
    "schedgen/compiler": 2_676,
    "schedgen/analysis": 710,
    "schedgen/checker": 1_125,
    "schedgen/simulator": 2_546,
    "schedgen/schemes": 1_628,
    "schedgen/planner": 3_301,
    "schedgen/report": 2_202,
    "schedgen/cli": 1_073,
    "schedgen/util": 696,
    "mpirun": 16_795,
    "mpirun/engine/core": 1_905,
    "mpirun/engine": 4_371,
    "mpirun/model": 3_640,
    "mpirun/training": 2_524,
    "mpirun/comm": 1_770,
    "mpirun/data": 835,
    "mpirun/checkpoint": 1_080,
    "mpirun/verify": 795,
    "mpirun/watchdog": 600,
    "mpirun/cli": 605,
    "mpirun/examples": 510,
    "tests": 30_040,
    "tests/jobs": 970,
}
WORDS = 12_000


def lines(room: Path) -> int:
    """The lines of all Python files in a room."""
    return sum(len(file.read_bytes().splitlines()) for file in room.rglob("*.py"))


def words() -> int:
    """The words of the READMEs and of the pages in docs."""
    pages = [ROOT / "README.md", *(ROOT / "schedgen").rglob("*.md"), *(ROOT / "mpirun").rglob("*.md")]
    return sum(len(page.read_text().split()) for page in pages)


def main() -> None:
    """Print the table."""
    rows = [(room, lines(ROOT / room), most, "lines") for room, most in ROOMS.items()]
    rows.append(("READMEs and docs", words(), WORDS, "words"))
    for name, count, most, unit in rows:
        print(f"{name:<20} {count:>6} of {most:>6} {unit}{'  TOO MANY' if count > most else ''}")
    sys.exit(any(count > most for _, count, most, _ in rows))


if __name__ == "__main__":
    main()
