"""Rule 3: every SEND has its RECV or FETCH_W, every receive its SEND."""

from __future__ import annotations

from schedgen.checker.proof import Proof
from schedgen.ir.effects import RECEIVERS, SENDERS


def rule_3(proof: Proof) -> None:
    """Refuse a message to the sender itself, and the first SEND or receive of a channel that has no match."""
    rank, peer, kind = proof.rank, proof.peer, proof.kind
    for rows in (proof.rows_of(*SENDERS), proof.rows_of(*RECEIVERS)):
        proof.refuse_any(3, rows[peer[rows] == rank[rows]], "a rank does not send to itself")
    messages = proof.analysis.messages
    if messages.complete:
        return
    send, receive = (rows[messages.matched : messages.matched + 1].tolist() for rows in messages[:2])
    sent = [(rank[row], peer[row], kind[row]) for row in send]  # the channel; empty if all are matched
    received = [(peer[row], rank[row], kind[row]) for row in receive]
    if sent == received:
        words = f"the next message of this kind from rank {rank[send[0]]} is sent by line {proof.where(send[0])}"
        proof.refuse(3, receive[0], words)
    # Channels are sorted: the smaller of these two has no partner left for its message.
    if not received or (sent and sent < received):
        proof.refuse(3, send[0], f"rank {peer[send[0]]} never receives this")
    proof.refuse(3, receive[0], f"rank {peer[receive[0]]} never sends this")
