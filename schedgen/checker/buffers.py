"""Rules 2 and 7: every buffer is defined before it is used and ended once, as found by `analysis.lifetimes`.

Rule 8: the saved forwards alive at once are within the header's limit.
"""

from __future__ import annotations

import numpy as np

from schedgen.analysis.lifetimes import AGAIN, LEFT, NOTHING, OWNED, TWICE, UNDEFINED, Fault
from schedgen.checker.proof import Proof
from schedgen.ir.accesses import numbers_per_size, operands
from schedgen.ir.effects import Buffer
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
