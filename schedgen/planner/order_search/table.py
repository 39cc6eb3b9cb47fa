"""What `schedgen search` prints: the best value, the bound, and how far they are apart."""

from __future__ import annotations

import json

from schedgen.ir.instructions import Op
from schedgen.planner.order_search.order_search import FoundOrder


def search_table(found: FoundOrder, objective: str, seconds: float, as_json: bool) -> str:
    """The numbers as JSON or in words; `seconds` is how long the search took."""
    gap = found.value / found.bound - 1
    recomputed = int((found.program.rows.op == Op.RECOMPUTE).sum())
    if as_json:
        numbers = {
            "value": found.value, "bound": found.bound, "gap": gap, "optimal": found.optimal, "source": found.source,
            "recomputed": recomputed, "work": found.work, "seconds": round(seconds, 1),
        }  # fmt: skip
        return json.dumps(numbers, indent=1)
    proved = "optimal" if found.optimal else f"no order takes less than {found.bound:.6g}: gap {gap:.1%}"
    redone = f"; {recomputed} forwards are redone" * (recomputed > 0)
    return f"{objective} {found.value:.6g} by {found.source}{redone}; {proved}. {seconds:.0f} s"
