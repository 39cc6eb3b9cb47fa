"""Lowering: jobs in time order become the program of every rank.

`PIPELINE` is the whole of it, or where weights change without a flush
`WITH_VERSIONS`. Each pass takes a program in global (time) order and the
options, and returns a program; a SEND and its RECV are inserted
together, so running the global order one instruction after another always
works, even if every SEND blocks until it is matched. Taking a RECV or FETCH_W
forward (`hoist`) keeps that true. At last it is projected per rank, and each
rank frees what it has used for the last time.
"""

from __future__ import annotations

from schedgen.compiler.options import Options
from schedgen.compiler.order import Times
from schedgen.compiler.passes.emit_jobs import compute
from schedgen.compiler.passes.free import free
from schedgen.compiler.passes.gradient_reduction import reduce
from schedgen.compiler.passes.optimizer_step import step
from schedgen.compiler.passes.prefetch import hoist
from schedgen.compiler.passes.send_recv import transfers
from schedgen.compiler.passes.shard_allreduce import exchange
from schedgen.compiler.passes.tied_gradients import tie
from schedgen.compiler.passes.weight_fetch import weights
from schedgen.compiler.passes.weight_versions import update
from schedgen.ir.header import Header
from schedgen.ir.program import Program
from schedgen.util.progress import over

PIPELINE = (weights, exchange, transfers, reduce, tie, step, hoist)
WITH_VERSIONS = (update, transfers, hoist)  # of weights, which stay at home


def lower(header: Header, start: Times, options: Options) -> Program:
    """The projected program for jobs that start at `start` (flat, indexed by job)."""
    program = compute(header, start, options)
    passes = PIPELINE if header.weight_versions.updates == "flush" else WITH_VERSIONS
    for one in over(passes, "lower", len(passes)):
        program = one(program, options)
    program = program.project()  # not nested: the global program is a third of the memory
    return free(program, options)
