"""The rules that look at rows and the buffers that they name.

1     every job exactly once, on the worker w names, no FWD after its RECOMPUTE; forwards alone train nothing; what a
      forward saves is copied to the host by its own rank alone, and not lent once BWD_I has freed a part
2, 7  every buffer is defined before it is used and ended once, as found by `analysis.lifetimes`
8     the saved forwards alive at once are within the header's limit
3, 6  messages and collectives, each entered by all who take part in it
"""

from __future__ import annotations

import numpy as np

from schedgen.analysis.lifetimes import AGAIN, LEFT, NOTHING, OWNED, TWICE, UNDEFINED, Fault
from schedgen.analysis.messages import entries
from schedgen.checker.proof import Proof
from schedgen.ir.accesses import numbers_per_size, operands
from schedgen.ir.effects import RECEIVERS, SENDERS, Buffer
from schedgen.ir.instructions import EXCHANGED, FORWARD_KINDS, FORWARD_OPS, B, F, Kind, Op, W, buffer_name
from schedgen.util.arrays import Ints
from schedgen.util.errors import clip


def rule_1(proof: Proof) -> None:
    """Prove that every job is there exactly once, on the worker that the header's `compute` names, and no other job."""
    compute = proof.header.compute
    if proof.header.is_forward:
        trains = ~np.isin(proof.op, FORWARD_OPS) | ~np.isin(proof.kind, FORWARD_KINDS)
        proof.refuse_any(1, np.flatnonzero(trains), "this instruction trains, but the file is a list of forwards")
        _once(proof, (Op.FWD,), compute[F], every=True)
        return
    split = len(compute) == 3
    wanted = (Op.FWD, Op.BWD_I, Op.BWD_W) if split else (Op.FWD, Op.BWD)
    if not split:
        proof.refuse_any(1, proof.rows_of(Op.BWD_I, Op.BWD_W), "the backward is not split in this file")
    for d, op in enumerate(wanted):
        # Among split backwards a BWD counts as both halves.
        _once(proof, (op, Op.BWD) if d else (op,), compute[d], every=True)
    _once(proof, (Op.RECOMPUTE,), compute[B], every=False)
    redone = proof.rows_of(Op.RECOMPUTE)  # by rule 2 it precedes the backward
    row = proof.program.job_rows(Op.FWD)[proof.stage[redone], proof.mb[redone]]
    late = row[(row > redone) & (proof.rank[row] == proof.rank[redone])]
    proof.refuse_any(1, late, "this forward comes after its RECOMPUTE")
    leaves = proof.rows_of(Op.OFFLOAD, Op.RELOAD, Op.SEND)
    leaves = leaves[proof.kind[leaves] == Kind.SAVED]
    is_lent = compute[B][proof.stage[leaves], proof.mb[leaves]] != proof.rank[leaves]
    lent = leaves[is_lent & (proof.op[leaves] != Op.SEND)]
    proof.refuse_any(1, lent, "what another rank's forward has saved is not copied to the host here")
    if split:
        for s, b in np.argwhere(compute[W] != compute[B])[:1]:
            proof.refuse_rank(1, int(compute[W, s, b]), f"W({s}, {b}) is not on the worker of I({s}, {b})")
        lends = leaves[~is_lent & (proof.op[leaves] == Op.SEND)]
        half = proof.program.job_rows(Op.BWD_I)[proof.stage[lends], proof.mb[lends]]
        late = lends[(0 <= half) & (half < lends)]
        proof.refuse_any(1, late, "BWD_I has freed a part of this: it is lent before, or not at all")


def _once(proof: Proof, ops: tuple[Op, ...], worker: Ints, every: bool) -> None:
    """Prove each (s, b) under one of `ops` at most once and, if `every`, at least once; `worker` has shape (S, B)."""
    rows = proof.rows_of(*ops)
    job = proof.stage[rows].astype(np.int64) * proof.header.microbatches + proof.mb[rows]
    for row in rows[worker.ravel()[job] != proof.rank[rows]][:1]:
        proof.refuse(1, int(row), f"w puts this job on worker {worker[proof.stage[row], proof.mb[row]]}")
    there = np.zeros(worker.size, bool)
    there[job] = True
    jobs = np.count_nonzero(there)
    if jobs < len(rows):
        again = np.delete(rows, np.unique(job, return_index=True)[1])
        proof.refuse(1, int(again.min()), "this job is listed twice")
    if every and jobs < worker.size:
        s, b = divmod(int(np.argmin(there)), proof.header.microbatches)
        proof.refuse_rank(1, int(worker[s, b]), f"{ops[0].name} of stage {s}, microbatch {b} is missing")


RULE_2 = {
    UNDEFINED: "is not defined on this rank before this line",
    NOTHING: "is asked for, but there is no such buffer",
}
RULE_7 = {
    AGAIN: "is used again after its end",
    TWICE: "is defined twice",
    OWNED: "belongs to this rank: it is neither fetched nor freed",
    LEFT: "is never freed after this, its last use",
}


def rule_2(proof: Proof) -> None:
    """Refuse the first fault of a buffer's life if the buffer does not exist there."""
    _refuse(proof, 2, RULE_2)


def rule_7(proof: Proof) -> None:
    """Refuse any other first fault: a buffer defined twice, used after its end or never ended, or own weights freed."""
    _refuse(proof, 7, RULE_7)


def rule_8(proof: Proof) -> None:
    """Refuse more saved forwards at once on a rank than the header's limit; needs rules 2 and 7 proved."""
    limit = proof.header.memory_limit
    if limit is None:
        return
    held = proof.analysis.lifetimes.saved().during
    for row in np.flatnonzero(held > limit)[:1].tolist():
        proof.refuse(8, row, f"the rank holds {held[row]} saved forwards here, and memory_limit is {limit}")


def _refuse(proof: Proof, rule: int, words: dict[int, str]) -> None:
    fault = proof.analysis.lifetimes.fault
    if fault is not None and fault.code in words:
        proof.refuse(rule, fault.row, f"{_name(proof, fault)} {words[fault.code]}")


def _name(proof: Proof, fault: Fault) -> str:
    header, buffer = proof.header, fault.buffer
    stage, mb, piece = (int(column[0]) for column in operands(header, np.array([buffer]), np.array([fault.number])))
    rest = fault.number % int(numbers_per_size(header)[buffer])  # version of weights, sender of a partial
    if fault.code == NOTHING:
        stage, mb, piece = (int(column[fault.row]) for column in (proof.stage, proof.mb, proof.piece))
    match buffer:
        case Buffer.SAVED:
            return f"what the forward of stage {stage}, microbatch {mb} saves"
        case Buffer.HOST:
            return f"{buffer_name(Kind.SAVED, stage, mb)} in the memory of the host"
        case Buffer.OPT:
            return f"{buffer_name(Kind.OPT, stage, piece=piece)} on the device"
        case Buffer.HALF:
            return f"what BWD_I of stage {stage}, microbatch {mb} keeps for BWD_W"
        case Buffer.PARTIAL:
            return f"{buffer_name(Kind.DW, stage, piece=piece)} from rank {rest}"
        case Buffer.W if not header.has_flush and fault.code != NOTHING:
            return buffer_name(Kind.W, stage, version=rest)
    return buffer_name(Kind[buffer.name], stage, mb, piece)


def rule_3(proof: Proof) -> None:
    """Refuse a message to the sender itself, and the first SEND or receive of a channel that has no match."""
    rank, other_end, kind = proof.rank, proof.operand, proof.kind
    for rows in (proof.rows_of(*SENDERS), proof.rows_of(*RECEIVERS)):
        proof.refuse_any(3, rows[other_end[rows] == rank[rows]], "a rank does not send to itself")
    in_order = proof.transport is not None  # then rule 4 says what meets what: here each name needs its two ends
    messages = proof.analysis.named if in_order else proof.analysis.messages
    if messages.complete:
        return
    send, receive = (rows[messages.matched : messages.matched + 1].tolist() for rows in messages[:2])
    channel = (kind, proof.stage, proof.mb, proof.piece) if in_order else (kind,)
    sent = [(rank[row], other_end[row], *(each[row] for each in channel)) for row in send]  # empty if all are matched
    received = [(other_end[row], rank[row], *(each[row] for each in channel)) for row in receive]
    if sent == received:
        words = f"the next message of this kind from rank {rank[send[0]]} is sent by {proof.where(send[0])}"
        proof.refuse(3, receive[0], words)
    # Channels are sorted: the smaller of these two has no partner left for its message.
    if not received or (sent and sent < received):
        proof.refuse(3, send[0], f"rank {other_end[send[0]]} never receives this")
    proof.refuse(3, receive[0], f"rank {other_end[receive[0]]} never sends this")


def rule_6(proof: Proof) -> None:
    """Refuse a rank whose collectives differ from those of its group's first member, or come in another order."""
    for group, rows in entries(proof.program):
        members = proof.header.groups[group]
        for row in rows[~np.isin(proof.rank[rows], members)][:1]:
            proof.refuse(6, int(row), f"this rank is not in group {group}, {clip(str(list(members)))}")
        starts = np.searchsorted(proof.rank[rows], members)
        ends = np.searchsorted(proof.rank[rows], members, side="right")
        # What members must agree on, shape (5, rows): slices enter a sum under their own stage.
        of_slices, stages = np.isin(proof.kind[rows], EXCHANGED), (proof.stage[rows], proof.piece[rows])
        stage, piece = (np.where(of_slices, proof.header.model_stage(each), each) for each in stages)
        names = np.stack([proof.op[rows], proof.kind[rows], stage, proof.mb[rows], piece])
        first = np.arange(starts[0], ends[0])
        if (ends - starts == len(first)).all():
            by_member = names.reshape(len(names), len(members), len(first))
            if (by_member == by_member[:, :1]).all():
                continue  # one by one only to name what differs
        for rank, start, end in zip(members, starts, ends, strict=True):
            entered = np.arange(start, end)
            both = min(len(first), len(entered))
            for k in np.flatnonzero((names[:, first[:both]] != names[:, entered[:both]]).any(axis=0))[:1]:
                place = proof.where(int(rows[first[k]]))
                proof.refuse(6, int(rows[entered[k]]), f"in place of this, rank {members[0]} enters {place}")
            if len(first) != len(entered):
                longer, absent = (first, rank) if len(first) > len(entered) else (entered, members[0])
                proof.refuse(6, int(rows[longer[both]]), f"rank {absent} of group {group} does not enter this")
