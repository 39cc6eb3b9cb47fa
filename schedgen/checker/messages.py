"""Rules 3 and 6: messages and collectives, each entered by all who take part in it."""

from __future__ import annotations

import numpy as np

from schedgen.analysis.messages import entries
from schedgen.checker.proof import Proof
from schedgen.ir.effects import RECEIVERS, SENDERS
from schedgen.ir.instructions import EXCHANGED
from schedgen.util.errors import clip


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
