"""Which of torch's pipeline lists hang, or swap microbatches, on transports that deliver in order.

`python tests/bench/transports.py`: torch's runtime classes for some ranks and microbatches, with messages as torch's
lowering places them, as its `defer_pp_recv` does, and with every RECV directly before the job that needs it.
`--gloo CLASS`: the last for 4 ranks and 10 microbatches, executed: a process group for each directed edge, no tags, and
payloads that name their microbatch.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from itertools import permutations

import torch
import torch.distributed as dist
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import _add_send_recv, _defer_recv_ops

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
RANKS, MICROBATCHES = range(2, 17), (4, 10, 16, 32, 64)
JOB, MESSAGE = re.compile(r"(\d+)([FBI])(\d+)"), re.compile(r"(\d+)(SEND|RECV)_([FB])(\d+)")


def cells(name: str, ranks: int, microbatches: int, how: str) -> list[list[str]]:
    """The lists of a class, by rank; ValueError or AssertionError where torch has none."""
    every = get_schedule_ops(name, ranks, microbatches, CLASSES[name])
    jobs = {rank: [action for action in listed if action is not None] for rank, listed in enumerate(every)}
    if name == "1F1B":  # torch's list, which it draws but never runs, has F1 to Fm on the last rank
        last = [each for each in jobs[ranks - 1] if str(each).partition("F")[1]]
        first = {each: each._replace(microbatch_index=each.microbatch_index - 1) for each in last}
        jobs[ranks - 1] = [first.get(each, each) for each in jobs[ranks - 1]]
    at = {each.stage_index: rank for rank in jobs for action in jobs[rank] for each in action.sub_actions or (action,)}
    lowered = _add_send_recv(jobs, at.__getitem__, len(at))
    if how == "defer_pp_recv":
        lowered = _defer_recv_ops(lowered, at.__getitem__)
    lists = [list(map(str, lowered[rank])) for rank in range(ranks)]
    return [deferred(rank) for rank in lists] if how == "deferred" else lists


def deferred(listed: list[str]) -> list[str]:
    """A rank's list with every RECV directly before the job that needs it."""
    receives = {cell.replace("RECV_", ""): cell for cell in listed if "RECV_" in cell}
    moved = []
    for cell in (cell for cell in listed if "RECV_" not in cell):
        for stage, job, mb in JOB.findall(cell):
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
            swapped = re.search(r", as (\d+ of \d+) messages do", str(error))
            found[communicators] = f"swaps {swapped[1]}" if swapped else "hangs"
    return found


def table(sizes: Sequence[tuple[int, int]]) -> None:
    """Print a line for every class and way to place RECVs: how many of its lists hang or swap, and the smallest.

    `sizes`: pairs of ranks and microbatches.
    """
    for name in CLASSES:
        for how in ("as lowered", "defer_pp_recv", "deferred"):
            counts = {communicators: Counter() for communicators in NAMES}
            first: dict[str, str] = {}
            for ranks, microbatches in sizes:
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


def on_gloo(rank: int, name: str, ranks: int, microbatches: int, meet: str) -> None:
    """Execute a rank's deferred list, and write how many messages it got, and how many of them were others."""
    dist.init_process_group("gloo", f"file://{meet}", timedelta(seconds=30), ranks, rank)
    lists = cells(name, ranks, microbatches, "deferred")
    at = {int(stage): r for r, listed in enumerate(lists) for stage, _, _ in JOB.findall(" ".join(listed))}
    groups = {edge: dist.new_group(sorted(edge)) for edge in permutations(range(ranks), 2)}
    arriving: dict[tuple[int, str, int], tuple[dist.Work, torch.Tensor]] = {}
    sent, got = [], list[tuple[tuple[int, str, int], list[int]]]()
    for cell in lists[rank]:
        for stage, job, mb in JOB.findall(cell):
            if found := arriving.pop((int(stage), job.replace("I", "B"), int(mb)), None):
                found[0].wait()
                got.append(((int(stage), job.replace("I", "B"), int(mb)), found[1].tolist()))
        if message := MESSAGE.fullmatch(cell):
            stage, way, kind, mb = int(message[1]), message[2], message[3], int(message[4])
            peer = at[stage + (1 if (way == "SEND") == (kind == "F") else -1)]
            if way == "SEND":
                payload = torch.tensor([stage, "FB".index(kind), mb])
                sent.append((dist.isend(payload, peer, groups[rank, peer]), payload))
            else:
                payload = torch.full((3,), -1)
                arriving[stage, kind, mb] = dist.irecv(payload, peer, groups[peer, rank]), payload
    for work, _ in sent:
        work.wait()
    right = [[stage + (-1 if kind == "F" else 1), "FB".index(kind), mb] for (stage, kind, mb), _ in got]
    swapped = sum(payload != expected for (_, payload), expected in zip(got, right, strict=True))
    counts = torch.tensor([len(got), swapped])
    dist.all_reduce(counts)
    if rank == 0:
        print(f"on gloo, {ranks} ranks, {microbatches} microbatches: swaps {counts[1]} of {counts[0]}")
    dist.destroy_process_group()


def main() -> None:
    """Print the table, or what gloo does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gloo", metavar="CLASS", choices=CLASSES)
    parser.add_argument("--quick", action="store_true", help="one size: whether it runs at all")
    given = parser.parse_args()
    name = given.gloo
    if not name:
        return table([(2, 4)] if given.quick else [*itertools.product(RANKS, MICROBATCHES)])
    print("model:", verdicts(cells(name, 4, 10, "deferred"), name)["edge"])
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(on_gloo, (name, 4, 10, f"{folder}/meet"), 4)


if __name__ == "__main__":
    main()
