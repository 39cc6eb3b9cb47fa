"""Schedules as torch's pipelining writes and reads them: CSV, one row a rank, one compute action a cell, as 2F0.

An action is stage, type and microbatch: F forward, B whole backward, I and W its halves. Cells may be empty (a bubble)
or several actions at once, as (0F1;3B0)OVERLAP_F_B, which run one behind the other here. What a schedule that torch
has lowered says about messages and sharding (SEND_F, UNSHARD, ...) is left out: both sides lower for themselves.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedgen.ir.instructions import DIRECTIONS, B, F, Op, W
from schedgen.ir.program import Program
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.util.errors import RefusedFile, UsageError, clip

LETTER = {Op.FWD: "F", Op.BWD: "B", Op.BWD_I: "I", Op.BWD_W: "W"}
_LOWERED = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "SEND_F", "RECV_F", "SEND_B", "RECV_B")
_ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})|(\d{1,9})(?:" + "|".join(_LOWERED) + r")(\d{0,9})")
_SEVERAL = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def write_actions(program: Program) -> str:
    """The jobs of every rank, in the order of its list; a RECOMPUTE is no action of torch's and is left out.

    Raises UsageError where weights have versions, which torch's schedules have not.
    """
    if program.header.tensor_parallel.degree > 1:
        raise UsageError("torch's CSV has no shards of stages, which --tensor makes")
    if program.header.weight_versions.count:
        raise UsageError(
            f"torch's CSV has no versions of weights, which --updates {program.header.weight_versions.updates} makes"
        )
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    for rank in range(program.header.workers):
        listed = program.instructions(rank)
        lines.writerow([f"{i.stage}{LETTER[Op(i.op)]}{i.mb}" for i in listed if i.op in LETTER])
    return out.getvalue()


class _Jobs(NamedTuple):
    """What the cells say, one entry a job; a B of a split schedule is an I and, right behind it, a W."""

    direction: NDArray[np.int64]
    stage: NDArray[np.int64]
    mb: NDArray[np.int64]
    rank: NDArray[np.int64]


def read_actions(text: str, name: str) -> tuple[Scheme, Sizes]:
    """The scheme whose order is the one in the file: every rank runs its row from left to right.

    Raises RefusedFile, with line and cell, for what is no action, and for jobs that are missing or there twice.
    """
    actions, ranks = _cells(text, name)
    split = any(letter in "IW" for _, letter, _, _ in actions)
    jobs, whole = _jobs(actions, split)
    S, batches, directions = int(jobs.stage.max()) + 1, int(jobs.mb.max()) + 1, 3 if split else 2
    _complete(jobs, S, batches, directions, name)
    n, worker = np.empty((2, directions, S, batches), np.int64)
    at = (jobs.direction, jobs.stage, jobs.mb)
    n[at], worker[at] = np.arange(len(jobs.rank)), jobs.rank
    undivided = np.zeros((S, batches), np.bool_)
    undivided[whole[0], whole[1]] = True
    stem = Path(name).stem
    if not stem.isprintable():
        raise RefusedFile(f"{clip(name)}: a scheme is called as its file is, and that is not printable")

    def w(s: Any, b: Any, d: Any) -> Any:
        return worker[d, s, b], worker[d, s, b]

    def marks(s: Any, b: Any) -> Any:
        return undivided[s, b]

    scheme = Scheme(stem, ranks, w, lambda s, b, d: n[d, s, b], stem, "strict", split, marks if split else None)
    return scheme, Sizes(S, batches, ranks)


def _cells(text: str, name: str) -> tuple[list[tuple[int, str, int, int]], int]:
    """(stage, letter, microbatch, rank) of every action, and how many ranks there are."""
    actions: list[tuple[int, str, int, int]] = []
    try:
        lines = list(csv.reader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise RefusedFile(f"{name}: not CSV: {error}") from None
    for rank, cells in enumerate(lines):
        for place, cell in enumerate(cells, start=1):
            several = _SEVERAL.fullmatch(cell.strip())
            for part in several[1].split(";") if several else [cell]:
                if not part.strip():
                    continue
                found = _ACTION.fullmatch(part.strip())
                if found is None:
                    reason = "not an action, a stage, one of F, B, I, W and a microbatch, as in 2F0"
                    raise RefusedFile(f"{name}:{rank + 1}: cell {place}: '{clip(part)}' is {reason}")
                if found[2]:
                    actions.append((int(found[1]), found[2], int(found[3]), rank))
    if not actions:
        raise RefusedFile(f"{name}: it has no action of the form 2F0")
    return actions, len(lines)


def _jobs(actions: list[tuple[int, str, int, int]], split: bool) -> tuple[_Jobs, NDArray[np.int64]]:
    """The jobs in their order, and (stages, microbatches) of those B that a split schedule leaves whole."""
    direction = {"F": F, "B": B, "I": B, "W": W}
    listed, whole = [], []
    for stage, letter, mb, rank in actions:
        listed.append((direction[letter], stage, mb, rank))
        if split and letter == "B":
            listed.append((W, stage, mb, rank))
            whole.append((stage, mb))
    return _Jobs(*np.array(listed, np.int64).T), np.array(whole, np.int64).reshape(-1, 2).T


def _complete(jobs: _Jobs, S: int, batches: int, directions: int, name: str) -> None:
    """Every job of S stages and so many microbatches is there, once."""
    key = np.sort((jobs.direction * S + jobs.stage) * batches + jobs.mb)
    twice = np.flatnonzero(key[1:] == key[:-1])
    missing = directions * S * batches > len(key)
    if not len(twice) and not missing:
        return
    number = int(key[twice[0]]) if len(twice) else int(np.argmax(np.append(key, -1) != np.arange(len(key) + 1)))
    node, b = divmod(number, batches)
    job = f"{DIRECTIONS[directions][node // S]} of stage {node % S} and microbatch {b}"
    sizes = f"{S} stages and {batches} microbatches"
    raise RefusedFile(f"{name}: {job} is there twice" if len(twice) else f"{name}: {sizes}, but no {job}")
