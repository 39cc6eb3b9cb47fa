"""bytes_under_way, compared with a slow count of every transfer."""

from __future__ import annotations

import numpy as np
from drawn_programs import cases
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_memory_plan import random_bytes

from schedgen.ir.accesses import accesses
from schedgen.ir.effects import Effect
from schedgen.ir.instructions import Kind, Op
from schedgen.ir.program import Program
from schedgen.simulator.buffer_sizes import bytes_under_way, message_bytes, summed_bytes


def own_rows(program, rank):
    return Program(program.header, program.rows.take(slice(*program.bounds[rank : rank + 2].tolist())))


def slow(program, sizes):
    """Every transfer counts in the rows between its own and the first later one that waits for it."""
    found = [0] * len(program)
    touched = list(zip(*(column.tolist() for column in accesses(program)), strict=True))
    for k, (row, effect, *name) in enumerate(touched):
        i = program.instruction(row)
        if i.op == Op.ALLREDUCE and i.kind == Kind.DW:
            size, waits = summed_bytes(program, sizes)[row], set(Effect)
        elif effect in (Effect.SEND, Effect.RECEIVE):
            size = message_bytes(program, sizes, np.array([row]))[0]
            waits = {Effect.CHANGE, Effect.END} if effect == Effect.SEND else set(Effect)
        else:
            continue
        later = (other for other, what, *its in touched[k + 1 :] if its == name and what in waits)
        for between in range(row + 1, next(later, len(program))):
            found[between] += size
    return found


@settings(max_examples=examples(40))
@given(st.data(), cases())
def test_every_transfer_counts_until_somebody_waits_for_it(data, case):
    program = case.compile()
    header = program.header
    rank = data.draw(st.integers(0, header.workers - 1))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    own, sizes = own_rows(program, rank), random_bytes(rng, header.stages, len(header.graph.edges))
    assert bytes_under_way(own, sizes).tolist() == slow(own, sizes)
