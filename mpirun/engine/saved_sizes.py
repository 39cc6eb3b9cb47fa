"""The sizes of what forwards save and ranks lend to one another: whoever receives it has to know them beforehand."""

from __future__ import annotations

from mpi4py import MPI

from mpirun.data.microbatches import Microbatch
from mpirun.data.values import copy_of, to_device
from mpirun.engine.core.context import Context
from mpirun.engine.core.forward import Forward
from mpirun.model.module_tensors import buffer_copies, set_buffers
from mpirun.model.rng import GeneratorsKept
from schedgen.ir.instructions import Instruction, Op


def saved_sizes(comm: MPI.Intracomm, context: Context, example: Microbatch) -> dict[int, list[int]]:
    """By stage, the bytes of each storage that its forwards save, where a rank lends them. Collective.

    That rank tries the forward once, on zeros and the data of `example`.
    """
    saves = {(i.stage, i.mb): i for i in context.instructions if i.op in (Op.FWD, Op.RECOMPUTE)}  # the last counts
    own = {stage: _tried(context, saves[stage, mb], example) for stage, mb in dict(sorted(context.lent)).items()}
    return {stage: sizes for of_rank in comm.allgather(own) for stage, sizes in of_rank.items()}


def _tried(context: Context, i: Instruction, example: Microbatch) -> list[int]:
    forward, device = Forward(context, i), context.device.torch
    bundles = [context.dataflow.x(p, i.stage) for p in context.header.graph.producers[i.stage]]
    batch, before = to_device(copy_of(example), device), buffer_copies(forward.stage.module)
    forward.weights, forward.inputs = None, lambda: [spec.zeros(device) for each in bundles for spec in each.specs]
    forward.read, forward.put = forward.read and (lambda: batch), lambda outputs: None
    if i.stage in context.slots.fetched:  # another interpreter, or the script, may have moved `data`
        forward.stage.use_weights()
    with GeneratorsKept():
        forward()
    sizes = [storage.size for storage in context.pending.pop((i.stage, i.mb)).tensors.storages.values()]
    set_buffers(forward.stage.module, before)
    forward.stage.give_back()
    del forward.run  # its method: in a circle the graph would live on until it is found
    return sizes
