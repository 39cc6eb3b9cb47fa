"""The passes, in the order in which `lower` runs them: each maps a program and the placed scheme to a program.

Jobs come from `emit_jobs`. Then the passes insert into the global time order. A SEND and its RECV are always inserted
together, so the order can be executed one instruction at a time even if every SEND blocks until it is matched; moving a
RECV to an earlier place (`receive_early`) keeps that true. `free` and
`offload` come last, on the lists of the ranks.
"""

from __future__ import annotations

from schedgen.compiler.passes.gradient_reduction import gradient_reduction, optimizer_step, tied_gradients
from schedgen.compiler.passes.send_recv import receive_early, send_recv
from schedgen.compiler.passes.slice_allreduce import slice_allreduce
from schedgen.compiler.passes.weight_fetch import weight_fetch
from schedgen.compiler.passes.weight_versions import weight_versions

PIPELINE = (weight_fetch, slice_allreduce, send_recv, gradient_reduction, tied_gradients, optimizer_step, receive_early)
FORWARDS = (weight_fetch, slice_allreduce, send_recv, receive_early)  # for forwards alone
WITH_VERSIONS = (weight_versions, send_recv, receive_early)  # where weights, which are not sent, change without a flush
