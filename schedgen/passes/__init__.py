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

from schedgen.order import Times
from schedgen.passes.compute import compute
from schedgen.passes.exchange import exchange
from schedgen.passes.free import free
from schedgen.passes.hoist import hoist
from schedgen.passes.options import Options
from schedgen.passes.reduce import reduce
from schedgen.passes.step import step
from schedgen.passes.tie import tie
from schedgen.passes.transfers import transfers
from schedgen.passes.update import update
from schedgen.passes.weights import weights
from schedgen.program import Header, Program
from schedgen.progress import over

PIPELINE = (weights, exchange, transfers, reduce, tie, step, hoist)
WITH_VERSIONS = (update, transfers, hoist)  # of weights, which stay at home


def lower(header: Header, start: Times, options: Options) -> Program:
    """The projected program for jobs that start at `start` (flat, indexed by job)."""
    program = compute(header, start, options)
    passes = PIPELINE if header.updates == "flush" else WITH_VERSIONS
    for one in over(passes, "lower", len(passes)):
        program = one(program, options)
    program = program.project()  # not nested: the global program is a third of the memory
    return free(program, options)
