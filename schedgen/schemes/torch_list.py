"""torch's lists: CSV that torch's pipelining writes and executes, a row for each rank and an action in each cell.

An action is a stage, a type and, unless it is for all microbatches, a microbatch, as in 2F0 or 2UNSHARD. `Action` has
the types. In a file with W and without I, as torch 2.4 writes, B is the half I. A cell may be empty (a bubble) or hold
two jobs, as in (0F1;3B0)OVERLAP_F_B: these run one after the other, and the forward's output leaves after both.
A list without messages, which torch calls compute_only, is a scheme. What a list with messages (compute_comms) becomes
is in `compiler.torch_program`.
"""

from __future__ import annotations

import csv
import io
import itertools
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

from schedgen.ir.instructions import DIRECTIONS, B, F, W
from schedgen.ir.line_codec import forms_and_numbers
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.util.arrays import Flags, Numbers
from schedgen.util.errors import RefusedFile, clip, listed, number_of
from schedgen.util.files import read_text


class Action(IntEnum):
    """The types of actions: jobs, messages, and what concerns torch's data parallelism within a stage."""

    F = 0
    B = 1
    I = 2  # noqa: E741  torch's name
    W = 3
    SEND_F = 4  # the stage's output, to the next stage
    RECV_F = 5  # its input, from the stage before
    SEND_B = 6  # the gradient of its input
    RECV_B = 7  # that of its output
    WAIT_SEND_F = 8  # wait until the output has been sent
    WAIT_SEND_B = 9
    UNSHARD = 10  # gather the weights
    RESHARD = 11  # keep this rank's shard of them
    REDUCE_GRAD = 12  # reduce the gradients, once all microbatches are in


SENDS, RECEIVES = (Action.SEND_F, Action.SEND_B), (Action.RECV_F, Action.RECV_B)
WAITS = (Action.WAIT_SEND_F, Action.WAIT_SEND_B)
GRADIENTS = (Action.SEND_B, Action.RECV_B, Action.WAIT_SEND_B)
# By type: whose output, or its gradient, a message carries, and where the other end is, relative to the stage.
BUFFER_STAGE = np.array([0, 0, 0, 0, 0, -1, -1, 0, 0, -1, 0, 0, 0])
OTHER_STAGE = np.array([0, 0, 0, 0, 1, -1, -1, 1, 1, -1, 0, 0, 0])
_DIRECTION = np.array([F, B, B, W])
_MOST = 10**9 - 1  # any number in a cell

_JOBS = (Action.F, Action.B, Action.I, Action.W)
_SHARDING = (Action.UNSHARD, Action.RESHARD, Action.REDUCE_GRAD)
# What a cell may hold, and its text with every number replaced by 0.
_TEXT: dict[tuple[Action, ...], str] = {(): ""}
_TEXT |= {(action,): f"0{action.name}{'0' * (action < Action.UNSHARD)}" for action in Action}
_TEXT |= {(a, b): f"({_TEXT[a,]};{_TEXT[b,]})OVERLAP_F_B" for a, b in itertools.product(_JOBS, repeat=2)}
_FORMS = {_TEXT[actions].encode(): form for form, actions in enumerate(_TEXT)}
_TYPES = np.array([(*actions, -1, -1)[:2] for actions in _TEXT])
_NUMBERS = np.array([_TEXT[actions].count("0") for actions in _TEXT])


class TorchList(NamedTuple):
    """The actions of a file, in the order of the file, as columns. Made by `read_torch_list`, which checks them."""

    name: str
    ranks: int
    rank: Numbers
    cell: Numbers  # from 1
    type: Numbers  # an Action
    stage: Numbers
    mb: Numbers  # -1 for an action on all microbatches
    delayed: Flags  # whether it is a forward whose output leaves only after the job with which it shares its cell

    def rows_of(self, *types: Action) -> Numbers:
        """The actions of these types, ascending."""
        return np.flatnonzero(np.isin(self.type, types))

    @property
    def has_messages(self) -> bool:
        """Whether the list says when messages are sent and received."""
        return len(self.rows_of(*SENDS, *RECEIVES)) > 0

    @property
    def left_out(self) -> str:
        """What a schedule leaves out of the list, and why, in words; empty: nothing."""
        named = ", ".join(f"{n} {each.name}" for each in _SHARDING if (n := len(self.rows_of(each))))
        return named and f"{self.name}: {named} are left out: torch's own data parallelism is no part of a schedule"

    def text(self, row: int) -> str:
        """An action as a cell has it."""
        mb = int(self.mb[row])
        return f"{self.stage[row]}{Action(self.type[row]).name}{mb if mb >= 0 else ''}"

    def refuse(self, row: int, reason: str) -> NoReturn:
        """Raise RefusedFile for an action."""
        raise RefusedFile(f"{self.name}: rank {self.rank[row]}, cell {self.cell[row]}: {self.text(row)}: {reason}")

    def refuse_any(self, rows: Numbers, reason: str) -> None:
        """Refuse the first of these actions, if there is one."""
        for row in rows[:1].tolist():
            self.refuse(row, reason)


class Jobs(NamedTuple):
    """The jobs of a list, in its order; in a list that splits backwards a B is two, an I and a W."""

    action: Numbers  # the action that it is
    direction: Numbers
    stage: Numbers
    mb: Numbers


def jobs_of(torch_list: TorchList) -> tuple[Jobs, int]:
    """The jobs of a list, and how many directions they have."""
    split = len(torch_list.rows_of(Action.I, Action.W)) > 0
    action = torch_list.rows_of(*_JOBS)
    both = split & (torch_list.type[action] == Action.B)
    action = np.repeat(action, 1 + both)
    direction = _DIRECTION[torch_list.type[action]]
    direction[np.flatnonzero(action[1:] == action[:-1]) + 1] = W
    return Jobs(action, direction, torch_list.stage[action], torch_list.mb[action]), 3 if split else 2


def scheme_of(torch_list: TorchList) -> tuple[Scheme, Sizes]:
    """The scheme in which every rank runs its jobs in the order of the list, and its sizes."""
    jobs, directions = jobs_of(torch_list)
    S, batches = int(jobs.stage.max()) + 1, int(jobs.mb.max()) + 1
    n, worker = np.empty((2, directions, S, batches), np.int64)
    n[jobs[1:]], worker[jobs[1:]] = np.arange(len(jobs.action)), torch_list.rank[jobs.action]
    unsplit, delayed = np.zeros((2, S, batches), np.bool_)
    for marks, rows in ((unsplit, torch_list.rows_of(Action.B)), (delayed, np.flatnonzero(torch_list.delayed))):
        marks[torch_list.stage[rows], torch_list.mb[rows]] = True
    stem = Path(torch_list.name).stem
    scheme = Scheme(
        stem, torch_list.ranks, lambda s, b, d: (worker[d, s, b],) * 2, lambda s, b, d: n[d, s, b], stem, "strict",
        directions == 3, (lambda s, b: unsplit[s, b]) if directions == 3 else None, lambda s, b: delayed[s, b],
    )  # fmt: skip
    return scheme, Sizes(S, batches, torch_list.ranks)


def list_in(name: str) -> TorchList:
    """torch's list in file `name`. Raises RefusedFile."""
    return read_torch_list(read_text(name), name)


def read_torch_list(text: str, name: str) -> TorchList:
    """The list in the text of file `name`.

    Raises RefusedFile, with rank and cell, for anything that is not an action, for missing or repeated jobs, and for
    stages and microbatches that there are not. The checker's rules judge its messages.
    """
    torch_list = _parse(text, name)
    if not len(torch_list.rows_of(*_JOBS)):
        raise RefusedFile(f"{name}: it has no action of the form 2F0")
    if not len(torch_list.rows_of(Action.I)) and len(torch_list.rows_of(Action.W)):
        torch_list = torch_list._replace(type=np.where(torch_list.type == Action.B, Action.I, torch_list.type))
    _check_jobs(torch_list)
    if torch_list.type.max() > Action.W:
        _check_stages(torch_list)
    return torch_list


def _parse(text: str, name: str) -> TorchList:
    """The actions of all cells; RefusedFile for the first cell that holds anything else."""
    try:
        lines = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise RefusedFile(f"{name}: not CSV: {error}") from None
    lengths = np.array([len(line) for line in lines], np.int64)
    rank_of, cells = np.repeat(np.arange(len(lines)), lengths), list(itertools.chain.from_iterable(lines))
    cell_of = np.arange(len(cells)) - np.repeat(np.cumsum(lengths) - lengths, lengths) + 1
    data = "".join(f"{' '.join(cell.split())}\n" for cell in cells).encode("ascii", "replace")
    form, numbers = forms_and_numbers(data, _FORMS)

    def refuse_any(wrong: Flags, reason: str) -> None:
        for k in np.flatnonzero(wrong)[:1].tolist():
            where = f"{name}: rank {rank_of[k]}, cell {cell_of[k]}"
            raise RefusedFile(f"{where}: '{clip(cells[k])}' {reason}")

    refuse_any(form < 0, "is no action of torch's, such as 2F0, 2SEND_F0, 2UNSHARD or (2F1;3B0)OVERLAP_F_B")
    too_large = np.append(0, np.cumsum((numbers < 0) | (numbers > _MOST)))
    ends = np.cumsum(_NUMBERS[form])
    begins = ends - _NUMBERS[form]
    refuse_any(too_large[ends] > too_large[begins], "has a number with leading zeros or too many digits")
    held = (_TYPES[form] >= 0).sum(axis=1)
    cell = np.repeat(np.arange(len(cells)), held)
    second = np.append(False, cell[1:] == cell[:-1]) if len(cell) else np.zeros(0, np.bool_)
    type = _TYPES[form[cell], second.astype(np.int64)]
    at = begins[cell] + 2 * second
    of_stage = type >= Action.UNSHARD
    mb = np.where(of_stage, -1, np.append(numbers, -1)[at + 1])
    delayed = np.append(second, False)[1:] & (type == Action.F)
    return TorchList(name, len(lines), rank_of[cell], cell_of[cell], type, numbers[at], mb, delayed)


def _check_jobs(torch_list: TorchList) -> None:
    """Refuse the list unless it has every job of its stages and microbatches exactly once."""
    jobs, directions = jobs_of(torch_list)
    order = np.lexsort(jobs[1:])
    again = (np.diff([column[order] for column in jobs[1:]]) == 0).all(axis=0)
    torch_list.refuse_any(jobs.action[np.sort(order[1:][again])], "this job is listed twice")
    stages = np.unique(jobs.stage)
    S = len(stages)
    if stages[-1] >= S:
        row = int(jobs.action[np.argmax(jobs.stage)])
        torch_list.refuse(row, f"there is no job of stage {np.argmax(stages != np.arange(S))}")
    kind = jobs.stage * directions + jobs.direction  # ascending in the order in which they are named
    counts = np.bincount(kind, minlength=S * directions)
    often = np.bincount(counts)
    often[0] = 0
    batches = len(often) - 1 - int(np.argmax(often[::-1]))
    extra = jobs.mb >= batches
    faulty = (counts != batches) | (np.bincount(kind, extra, minlength=len(counts)) > 0)
    if not faulty.any():
        return
    stage, direction = divmod(int(np.argmax(faulty)), directions)
    letter, here = DIRECTIONS[directions][direction], np.flatnonzero(kind == np.argmax(faulty))
    more = np.sort(jobs.mb[here[extra[here]]])
    less = np.setdiff1d(np.arange(batches), jobs.mb[here])
    words = [
        f"{verb} {listed([f'{letter}{mb}' for mb in numbers.tolist()])}"
        for verb, numbers in (("has an extra" if len(more) == 1 else "has the extra", more), ("lacks", less))
        if len(numbers)
    ]
    rank = torch_list.rank[jobs.action[np.argmax(jobs.stage == stage)]]
    place = f"{torch_list.name}: rank {rank}"
    if len(more):
        place += f", cell {torch_list.cell[jobs.action[here[np.argmax(extra[here])]]]}"
    raise RefusedFile(f"{place}: of {number_of(batches, 'microbatch')}, stage {stage} {' and '.join(words)}")


def _check_stages(torch_list: TorchList) -> None:
    """Refuse a stage on two ranks, an action on a stage or microbatch that there is not or of another rank, and a
    message to or from no stage."""
    jobs = torch_list.rows_of(*_JOBS)
    stages, microbatches = int(torch_list.stage[jobs].max()) + 1, int(torch_list.mb[jobs].max()) + 1
    for wrong, what, most in ((torch_list.stage, "stage", stages), (torch_list.mb, "microbatch", microbatches)):
        torch_list.refuse_any(np.flatnonzero(wrong >= most), f"there is no such {what} in 0..{most - 1}")
    job_of = jobs[np.unique(torch_list.stage[jobs], return_index=True)[1]]  # by stage, its first job
    for row in np.flatnonzero(torch_list.rank != torch_list.rank[job_of][torch_list.stage])[:1].tolist():
        job = int(job_of[torch_list.stage[row]])
        torch_list.refuse(
            row, f"its stage is on rank {torch_list.rank[job]}: cell {torch_list.cell[job]} has a job of it"
        )
    messages = torch_list.rows_of(*SENDS, *RECEIVES, *WAITS)
    other = torch_list.stage[messages] + OTHER_STAGE[torch_list.type[messages]]
    torch_list.refuse_any(messages[(other < 0) | (other == stages)], "its stage has no neighbour there")
