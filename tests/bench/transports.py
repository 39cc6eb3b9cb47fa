"""Which of torch's pipeline lists hang, or swap microbatches, on transports that deliver in order.

`python tests/bench/transports.py`: torch's runtime classes for some ranks and microbatches, with messages as torch's
lowering places them, as its `defer_pp_recv` does, and with every RECV directly before the job that needs it.
`--gloo CLASS`: the last for 4 ranks and 10 microbatches, executed: a process group for each directed edge, no tags, and
payloads that name their microbatch.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter

from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from schedgen.checker import check_but_waits
from schedgen.checker.deadlock import rule_4
from schedgen.compiler.torch_program import torch_program
from schedgen.ir.transport import NAMES, read_transport
from schedgen.schemes.torch_list import read_torch_list
from schedgen.util.errors import RefusedFile, UsageError

CLASSES = {
    "GPipe": 1, "1F1B": 1, "LoopedBFS": 2, "Interleaved1F1B": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}  # fmt: skip
RANKS, MICROBATCHES = (2, 3, 4, 6, 8, 12, 16), (8, 10, 16, 32, 64)
CELL = re.compile(r"(\d+)([FBIW]|SEND_F|SEND_B|RECV_F|RECV_B)(\d+)")


def cells(name: str, ranks: int, microbatches: int, how: str) -> list[list[str]]:
    """The lists of a class, by rank; ValueError or AssertionError where torch has none."""
    listed = get_schedule_ops(
        name, ranks, microbatches, CLASSES[name], with_comms=True, defer_pp_recv=how == "defer_pp_recv"
    )
    lists = [[str(action) for action in rank if action is not None] for rank in listed]
    return [deferred(rank) for rank in lists] if how == "deferred" else lists


def deferred(listed: list[str]) -> list[str]:
    """A rank's list with every RECV directly before the job that needs it."""
    receives = {cell.replace("RECV_", ""): cell for cell in listed if "RECV_" in cell}
    moved = []
    for cell in (cell for cell in listed if "RECV_" not in cell):
        for stage, job, mb in re.findall(r"(\d+)([FBI])(\d+)", cell):
            moved += [receives[key] for key in [f"{stage}{job.replace('I', 'B')}{mb}"] if key in receives]
        moved.append(cell)
    return moved


def verdicts(lists: list[list[str]], name: str) -> dict[str, str]:
    """By transport: ok, hangs, or how many messages meet another's receive."""
    text = io.StringIO()
    csv.writer(text).writerows(lists)
    program, found = torch_program(read_torch_list(text.getvalue(), name)), {}
    for communicators in NAMES:
        transport = read_transport(f"in-order:{communicators}")
        try:
            rule_4(check_but_waits(program, name, transport))
            found[communicators] = "ok"
        except RefusedFile as error:
            swapped = re.search(r"so do (\d+ of \d+)", str(error))
            found[communicators] = f"swaps {swapped[1]}" if swapped else "hangs"
    return found


def table() -> None:
    """Print a line for every class and way to place RECVs: how many of its lists hang or swap, and the smallest."""
    for name in CLASSES:
        for how in ("as lowered", "defer_pp_recv", "deferred"):
            counts = {communicators: Counter() for communicators in NAMES}
            first: dict[str, str] = {}
            for ranks in RANKS:
                for microbatches in MICROBATCHES:
                    size = f"{ranks}x{microbatches}"
                    try:
                        found = verdicts(cells(name, ranks, microbatches, how), size)
                    except (ValueError, AssertionError, UsageError, RefusedFile) as error:
                        counts["one"]["no list"] += 1
                        first.setdefault("no list", f"{size}: {str(error)[:90]}")
                        continue
                    for communicators, verdict in found.items():
                        counts[communicators][verdict.split()[0]] += 1
                        if verdict != "ok":
                            first.setdefault(f"{communicators} {verdict.split()[0]}", f"{size} {verdict}")
            print(f"{name:<22} {how:<14}", *(f"{key}: {dict(each)};" for key, each in counts.items()))
            print(" " * 37, first, flush=True)


if __name__ == "__main__":
    table()
