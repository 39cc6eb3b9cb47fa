"""Rules 2 and 7: every buffer is defined before it is used and ended once, as `analysis.lifetimes` has followed it."""

from __future__ import annotations

from schedgen.analysis.lifetimes import AGAIN, LEFT, NOTHING, OWNED, TWICE, UNDEFINED, Fault
from schedgen.checker.proof import Proof
from schedgen.ir.effects import Buffer, numbers_per_size
from schedgen.ir.instructions import Kind, buffer_name

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
KINDS = {Buffer.X: Kind.X, Buffer.G: Kind.G, Buffer.W: Kind.W, Buffer.DW: Kind.DW, Buffer.PARTIAL: Kind.DW}


def rule_2(proof: Proof) -> None:
    """Refuse the first fault of a life if a buffer is not there."""
    _refuse(proof, 2, RULE_2)


def rule_7(proof: Proof) -> None:
    """Refuse the first fault of a life if a buffer is there too long or too often."""
    _refuse(proof, 7, RULE_7)


def _refuse(proof: Proof, rule: int, words: dict[int, str]) -> None:
    fault = proof.analysis.lifetimes.fault
    if fault is not None and fault.code in words:
        proof.refuse(rule, fault.row, f"{_name(proof, fault)} {words[fault.code]}")


def _name(proof: Proof, fault: Fault) -> str:
    """What the buffer is called in a refusal."""
    header = proof.header
    column, rest = divmod(fault.number, int(numbers_per_size(header)[fault.buffer]))
    if fault.buffer == Buffer.SAVED:
        return f"what the forward of stage {column}, microbatch {rest} saves"
    if fault.buffer == Buffer.HALF:
        return f"what BWD_I of stage {column}, microbatch {rest} keeps for BWD_W"
    kind = KINDS[fault.buffer]
    if fault.code == NOTHING:
        return buffer_name(kind, *(int(names[fault.row]) for names in (proof.stage, proof.mb, proof.via)))
    if kind in (Kind.X, Kind.G):
        producer, consumer = (column, -1) if column < header.stages else header.graph.edges[column - header.stages]
        return buffer_name(kind, producer, rest, consumer)
    stage, part = header.weight_shards.units[column]
    version = rest if fault.buffer == Buffer.W and header.weight_versions else -1
    sender = f" from rank {rest}" if fault.buffer == Buffer.PARTIAL else ""
    return buffer_name(kind, stage, via=part, version=version) + sender
