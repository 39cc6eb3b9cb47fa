"""What `schedgen search` prints: the best value, the bound, and the gap between them."""

from __future__ import annotations

import json

from schedgen.ir.header import Header
from schedgen.ir.instructions import F, Op
from schedgen.planner.order_search.found_order import FoundOrder
from schedgen.planner.placement_search.families import FREE


def search_table(found: FoundOrder, objective: str, seconds: float, as_json: bool) -> str:
    """The numbers as JSON or in words; `seconds` is how long the search took."""
    gap = found.value / found.bound - 1
    recomputed = int((found.program.rows.op == Op.RECOMPUTE).sum())
    workers = _workers(found.program.header)
    if as_json:
        numbers = {
            "value": found.value, "bound": found.bound, "gap": gap, "optimal": found.optimal, "source": found.source,
            "workers": workers, "recomputed": recomputed, "work": round(found.work, 1), "seconds": round(seconds, 1),
        }  # fmt: skip
        return json.dumps(numbers, indent=1)
    proved = "optimal" if found.optimal else f"no order takes less than {found.bound:.6g}: gap {gap:.1%}"
    redone = f"; {recomputed} forwards are redone" * (recomputed > 0)
    placed = f"; stages on workers {' '.join(map(str, workers))}" * (found.program.header.scheme["name"] == FREE)
    return f"{objective} {found.value:.6g} by {found.source}{placed}{redone}; {proved}. {seconds:.0f} s"


def _workers(header: Header) -> list[int | list[int]]:
    """By stage its worker, or its workers if microbatches have different ones."""
    rows = [list(dict.fromkeys(row)) for row in header.compute[F].tolist()]
    return [row[0] if len(row) == 1 else row for row in rows]
