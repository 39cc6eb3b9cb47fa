"""A run with tensor shards in terms of the model that has none: its record, and what one process has to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from mpirun.engine.setup import Setup
from mpirun.model.dataflow import Dataflow, Value
from mpirun.verify.record import Parameters, Record, tensor_bytes
from schedgen.ir.header import Header
from schedgen.ir.tensor_parallel import TensorParallel


def without_shards(setup: Setup, header: Header) -> tuple[Setup, Header]:
    """The set-up and the header of the model's stages, of which a schedule has shards."""
    stages = header.model_stages
    plain = replace(
        header,
        scheme={**header.scheme, "stages": stages},
        graph=header.unsharded_graph,
        tensor_parallel=TensorParallel(1, (), stages),
    )
    shapes = [setup.shapes[stage] for stage in header.first_shards]
    of_schedule = setup.dataflows[0].reads
    reads = [
        [x._replace(stage=header.model_stage(x.stage)) if isinstance(x, Value) else x for x in of_schedule[stage]]
        for stage in header.first_shards
    ]
    dataflows = [Dataflow(reads, plain, [shape.outputs for shape in shapes])] * len(setup.dataflows)
    return setup._replace(model=setup.unsharded_model, shapes=shapes, dataflows=dataflows), plain


def of_whole(values: Mapping[tuple[int, str], Tensor], tensor: TensorParallel) -> Parameters:
    """Of stages that are not split, what their first replica has."""
    T = tensor.degree
    return {(s // T, name): x for (s, name), x in values.items() if s % T == 0 and not tensor.split[s]}


def join_shards(setup: Setup, header: Header, record: Record) -> Record | str:
    """The record of the model's stages; a sentence where shards differ in what should be copies."""
    tensor = header.tensor_parallel
    differing: list[str] = []

    def joined(values: Parameters) -> Parameters:
        parameters: Parameters = {}
        for (stage, name), value in values.items():
            key = (stage // tensor.degree, name)
            sharded = setup.shapes[stage].sharded_dims.get(name) if tensor.split[stage] else None
            if sharded is not None:
                parameters.setdefault(key, sharded.join([values[shard, name] for shard in tensor.siblings(stage)]))
            elif tensor_bytes(parameters.setdefault(key, value)) != tensor_bytes(value):
                shard = stage % tensor.degree
                differing.append(f"{name} of stage {key[0]} is another in shard {shard} than in the first that has it")
        return parameters

    gradients = [joined(step) for step in record.gradients]
    record = Record(record.losses, gradients, joined(record.parameters), buffers=of_whole(record.buffers, tensor))
    return differing[0] if differing else record
