"""A schedule as CSV for torch's pipelining, in both formats of its `_load_csv`; `schemes.torch_list` reads both.

compute_comms  the jobs and messages of every rank in the order of its list. A rank first UNSHARDs its stages, and after
               the last backward of a stage come its REDUCE_GRAD and RESHARD.
compute_only   the jobs alone: torch adds messages of its own.

A forward whose output is sent only after the backward that comes next shares a cell with this backward, as in
(0F1;3B0)OVERLAP_F_B.
"""

from __future__ import annotations

import numpy as np

from schedgen.analysis import analyse
from schedgen.ir.instructions import COMPUTE, LETTER, Kind, Op
from schedgen.ir.program import Program
from schedgen.ir.stage_graph import chain
from schedgen.schemes.torch_list import BUFFER_STAGE, Action
from schedgen.util.arrays import Numbers
from schedgen.util.errors import UsageError

_ACTION = np.zeros((len(Op), len(Kind)), np.int64)
_ACTION[list(LETTER)] = np.array([Action[letter] for letter in LETTER.values()])[:, None]
_ACTION[Op.SEND, [Kind.X, Kind.G]] = Action.SEND_F, Action.SEND_B
_ACTION[Op.RECV, [Kind.X, Kind.G]] = Action.RECV_F, Action.RECV_B
# The text of a cell by its action; that of a pair's first and second half by the action and one of these.
_FIRST, _SECOND = 100, 200
_TEXT = {int(action): f"%d{action.name}{'%d' * (action < Action.UNSHARD)}," for action in Action}
_TEXT[_FIRST + Action.F] = "(%dF%d;"
_TEXT |= {_SECOND + action: f"%d{action.name}%d)OVERLAP_F_B," for action in (Action.B, Action.I)}


def as_torch_csv(program: Program, messages: bool) -> str:
    """The list of every rank with its `messages` (compute_comms), or its jobs alone (compute_only).

    Raises UsageError for what torch's lists do not have, and for messages that torch would take for one another.
    """
    for what in _not_in_torch(program):
        raise UsageError(f"torch's lists have no {what}")
    table, rows = program.rows, program.rows_of(*LETTER, *((Op.SEND, Op.RECV) if messages else ()))
    cell = _ACTION[table.op[rows], table.kind[rows]]
    columns = np.stack([cell, table.rank[rows], table.stage[rows] - BUFFER_STAGE[cell], table.mb[rows]])
    first = np.searchsorted(rows, _delayed_sends(program))
    first = first[np.isin(cell[first + 1], (Action.B, Action.I))]  # no message comes between
    columns[0, first] += _FIRST
    columns[0, first + 1] += _SECOND
    if messages:
        _check_order(program)
        columns = _with_sharding(columns)
    lines = []
    for of_rank in np.split(columns, np.searchsorted(columns[1], np.arange(1, program.header.workers)), axis=1):
        numbers = of_rank[2:].T
        text = "".join(map(_TEXT.__getitem__, of_rank[0].tolist()))
        lines.append(text.rstrip(",") % tuple(numbers[numbers >= 0].tolist()))
    return "\n".join([*lines, ""])


def _with_sharding(columns: Numbers) -> Numbers:
    """The action, rank, stage and microbatch of every cell, with an UNSHARD, REDUCE_GRAD and RESHARD of every stage."""
    cell, rank, stage, _ = columns
    jobs = np.flatnonzero(cell % _FIRST <= Action.W)[::-1]
    last = jobs[np.unique(stage[jobs], return_index=True)[1]]
    sent = last + (np.append(cell, -1)[last + 1] == Action.SEND_B)  # a gradient does not wait for the reduction
    places = np.searchsorted(rank, rank[last]) - 0.5, sent + 0.2, sent + 0.4
    new = [
        np.stack([np.full(len(last), action), rank[last], stage[last], np.full(len(last), -1)])
        for action in (Action.UNSHARD, Action.REDUCE_GRAD, Action.RESHARD)
    ]
    order = np.argsort(np.concatenate([np.arange(len(cell)), *places]), kind="stable")
    return np.concatenate([columns, *new], axis=1)[:, order]


def _not_in_torch(program: Program) -> list[str]:
    """What a schedule has that torch's lists do not have, in words."""
    header, compute = program.header, program.header.compute
    away = bool(header.shard_owners) or bool((header.weights[: len(compute)] != compute).any())
    several, idle = (compute != compute[:1, :, :1]).any(axis=(0, 2)), np.setdiff1d(np.arange(header.workers), compute)
    lost = {
        "slices of stages, which --tensor makes": header.model_stages < header.stages,
        f"versions of weights, which --updates {header.weight_versions.updates} makes": not header.has_flush,
        "forwards without backwards": header.is_forward,
        "stage graph other than a chain": header.graph.edges != chain(header.stages),
        "ties between stages": bool(header.tied),
        "FETCH_W, which brings weights to their jobs": away,
        f"stage on several ranks, as stage {np.argmax(several)} is": bool(several.any()),
        "RECOMPUTE": len(program.rows_of(Op.RECOMPUTE)) > 0,
        f"rank without a stage, as rank {np.append(idle, 0)[0]} is": len(idle) > 0,
        "OFFLOAD, or SEND of what forwards save": bool((program.rows.kind >= Kind.SAVED).any()),
    }
    return [words for words, is_lost in lost.items() if is_lost]


def _check_order(program: Program) -> None:
    """UsageError unless the k-th SEND from one rank to another is for the k-th RECV there: so torch matches them."""
    (sends, receives, _), table = analyse(program).messages, program.rows
    edge = table.rank[sends].astype(np.int64) * program.header.workers + table.to[sends]
    by_send, by_receive = np.lexsort((sends, edge)), np.lexsort((receives, edge))
    for k in np.flatnonzero(by_send != by_receive)[:1].tolist():
        sent, received = (program.instruction(int(row)) for row in (sends[by_send[k]], receives[by_receive[k]]))
        raise UsageError(
            f"rank {sent.to} would receive {sent.buffer} of rank {received.source} as {received.buffer}, since torch "
            "matches messages by their order alone: compile with --prefetch 0"
        )


def _delayed_sends(program: Program) -> Numbers:
    """The forwards whose output is sent after the next job, a backward."""
    table, jobs, sends = program.rows, program.rows_of(*COMPUTE), program.rows_of(Op.SEND)
    sends = sends[table.kind[sends] == Kind.X]
    place = np.searchsorted(jobs, sends) - 1
    before, earlier = jobs[place], jobs[place - 1]
    is_its_forward = (table.stage[earlier] == table.stage[sends]) & (table.mb[earlier] == table.mb[sends])
    is_its_forward &= table.op[earlier] == Op.FWD
    delayed: Numbers = earlier[is_its_forward & np.isin(table.op[before], (Op.BWD, Op.BWD_I))]
    return delayed
