"""The passes, in the order in which `lower` runs them: each takes a program and the placed scheme, and gives a program.

Jobs come from `emit_jobs`. Then the passes insert into the global order of time, a SEND and its RECV always together,
so that executing that order one instruction after another works even if every SEND blocks until it is matched; moving
a RECV or a FETCH_W to an earlier place (`prefetch`) keeps that true. `free` comes last, on the lists of the ranks.
"""

from __future__ import annotations

from schedgen.compiler.passes.gradient_reduction import gradient_reduction
from schedgen.compiler.passes.optimizer_step import optimizer_step
from schedgen.compiler.passes.prefetch import prefetch
from schedgen.compiler.passes.send_recv import send_recv
from schedgen.compiler.passes.shard_allreduce import shard_allreduce
from schedgen.compiler.passes.tied_gradients import tied_gradients
from schedgen.compiler.passes.weight_fetch import weight_fetch
from schedgen.compiler.passes.weight_versions import weight_versions

PIPELINE = (weight_fetch, shard_allreduce, send_recv, gradient_reduction, tied_gradients, optimizer_step, prefetch)
FORWARDS = (weight_fetch, shard_allreduce, send_recv, prefetch)  # for forwards alone
WITH_VERSIONS = (weight_versions, send_recv, prefetch)  # where weights change without a flush; they do not travel
