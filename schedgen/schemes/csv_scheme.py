"""A scheme read from CSV as torch's pipelining writes it: one row per rank, one compute action per cell, as in 2F0.

An action is stage, type and microbatch; the types are F forward, B unsplit backward, and I and W its halves. In a file
with W and without I, as torch 2.4 writes, B is the half I. A cell may be empty (a bubble) or hold several actions at
once, as in (0F1;3B0)OVERLAP_F_B. These run one after another here, and the forward's output leaves after the next of
them, as in torch's own lowering.
Actions of lowered schedules that concern messages and sharding (SEND_F, UNSHARD, ...) are left out, because torch and
schedgen each have a lowering of their own.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from schedgen.ir.instructions import DIRECTIONS, B, F, W
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.util.arrays import Flags, Numbers
from schedgen.util.errors import RefusedFile, clip, number_of

_LOWERED = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "SEND_F", "RECV_F", "SEND_B", "RECV_B")
_ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})|(\d{1,9})(?:" + "|".join(_LOWERED) + r")(\d{0,9})")
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_DIRECTION = {"F": F, "B": B, "I": B, "W": W}


class _Action(NamedTuple):
    """The action in a cell, or in a part of one."""

    stage: int
    letter: str  # F, B, I or W
    mb: int
    rank: int
    delayed: bool = False  # whether it is a forward whose output leaves only after the next action of its cell


def scheme_from_csv(text: str, name: str) -> tuple[Scheme, Sizes]:
    """The scheme in which every rank runs its row of the file `name` from left to right, and its sizes.

    Raises RefusedFile, with line and cell, for anything that is not an action, and for missing or repeated jobs.
    """
    actions, ranks = _parse(text, name)
    letters = {action.letter for action in actions}
    if letters.isdisjoint("I") and "W" in letters:
        actions = [action._replace(letter=action.letter.replace("B", "I")) for action in actions]
    split = not letters.isdisjoint("IW")
    direction, stage, mb, rank = _jobs(actions, split)
    S, batches, directions = int(stage.max()) + 1, int(mb.max()) + 1, 3 if split else 2
    _check_complete((direction * S + stage) * batches + mb, S, batches, directions, name)
    n, worker = np.empty((2, directions, S, batches), np.int64)
    n[direction, stage, mb], worker[direction, stage, mb] = np.arange(len(rank)), rank
    is_unsplit = _marked((action for action in actions if action.letter == "B"), (S, batches))
    is_delayed = _marked((action for action in actions if action.delayed), (S, batches))
    stem = Path(name).stem
    scheme = Scheme(
        stem, ranks, lambda s, b, d: (worker[d, s, b],) * 2, lambda s, b, d: n[d, s, b], stem, "strict", split,
        (lambda s, b: is_unsplit[s, b]) if split else None, lambda s, b: is_delayed[s, b],
    )  # fmt: skip
    return scheme, Sizes(S, batches, ranks)


def _parse(text: str, name: str) -> tuple[list[_Action], int]:
    """The actions in the order of the file, and the number of ranks."""
    actions: list[_Action] = []
    try:
        lines = list(csv.reader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise RefusedFile(f"{name}: not CSV: {error}") from None
    for rank, cells in enumerate(lines):
        for column, cell in enumerate(cells, start=1):
            overlapped = _OVERLAPPED.fullmatch(cell.strip())
            first = len(actions)
            for part in overlapped[1].split(";") if overlapped else [cell]:
                if not part.strip():
                    continue
                match = _ACTION.fullmatch(part.strip())
                if match is None:
                    reason = "not an action, a stage, one of F, B, I, W and a microbatch, as in 2F0"
                    raise RefusedFile(f"{name}:{rank + 1}: cell {column}: '{clip(part)}' is {reason}")
                if match[2]:
                    if len(actions) > first and actions[-1].letter == "F":
                        actions[-1] = actions[-1]._replace(delayed=True)
                    actions.append(_Action(int(match[1]), match[2], int(match[3]), rank))
    if not actions:
        raise RefusedFile(f"{name}: it has no action of the form 2F0")
    return actions, len(lines)


def _jobs(actions: list[_Action], split: bool) -> Numbers:
    """Direction, stage, microbatch and rank of all jobs, shape (4, n); in a split schedule a B becomes an I and a W."""
    jobs = []
    for stage, letter, mb, rank, *_ in actions:
        jobs.append((_DIRECTION[letter], stage, mb, rank))
        if split and letter == "B":
            jobs.append((W, stage, mb, rank))
    return np.array(jobs, np.int64).T


def _marked(actions: Iterable[_Action], shape: tuple[int, int]) -> Flags:
    """By stage and microbatch, whether one of the actions is for it."""
    marks, places = np.zeros(shape, np.bool_), [(action.stage, action.mb) for action in actions]
    marks[tuple(np.array(places, np.int64).reshape(-1, 2).T)] = True
    return marks


def _check_complete(key: Numbers, S: int, batches: int, directions: int, name: str) -> None:
    """Refuse the file unless it has the key of every job of S stages and `batches` microbatches exactly once."""
    key = np.sort(key)
    twice = np.flatnonzero(key[1:] == key[:-1])
    missing = directions * S * batches > len(key)
    if not len(twice) and not missing:
        return
    number = int(key[twice[0]]) if len(twice) else int(np.argmax(np.append(key, -1) != np.arange(len(key) + 1)))
    node, b = divmod(number, batches)
    job = f"{DIRECTIONS[directions][node // S]} of stage {node % S} and microbatch {b}"
    sizes = f"{number_of(S, 'stage')} and {number_of(batches, 'microbatch')}"
    raise RefusedFile(f"{name}: {job} is listed twice" if len(twice) else f"{name}: {sizes}, but no {job}")
