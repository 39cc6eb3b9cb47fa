"""Rule 1: every job exactly once, on the worker w names, no FWD after its RECOMPUTE; forwards alone train nothing."""

from __future__ import annotations

import numpy as np

from schedgen.checker.proof import Proof
from schedgen.ir.instructions import FORWARD_KINDS, FORWARD_OPS, B, F, Op, W
from schedgen.util.arrays import Ints


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
    if split:
        for s, b in np.argwhere(compute[W] != compute[B])[:1]:
            proof.refuse_rank(1, int(compute[W, s, b]), f"W({s}, {b}) is not on the worker of I({s}, {b})")


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
