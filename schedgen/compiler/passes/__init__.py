"""The passes, in the order in which `lower` runs them: each maps a program and the placed scheme to a program.

Jobs come from `emit_jobs`. Then the passes insert into the global time order. A SEND and its RECV are always inserted
together, so the order can be executed one instruction at a time even if every SEND blocks until it is matched; moving a
RECV to an earlier place (`receive_early`) keeps that true. `free` and `offload` come last, on the lists of
the ranks.
"""

from __future__ import annotations

from schedgen.compiler.passes.evict import evict
from schedgen.compiler.passes.gradient_reduction import gradient_reduction, optimizer_step, tied_gradients
from schedgen.compiler.passes.owner_sums import owner_sums
from schedgen.compiler.passes.send_recv import receive_early, send_recv
from schedgen.compiler.passes.slice_allreduce import slice_allreduce
from schedgen.compiler.passes.weight_fetch import weight_fetch
from schedgen.compiler.passes.weight_versions import weight_versions

PIPELINE = (
    weight_fetch, slice_allreduce, send_recv, gradient_reduction, owner_sums, tied_gradients, optimizer_step, evict,
    receive_early,
)  # fmt: skip
FORWARDS = (weight_fetch, slice_allreduce, send_recv, receive_early)  # for forwards alone
WITH_VERSIONS = (weight_versions, send_recv, evict, receive_early)  # where weights change without a flush
