"""A run with tensor slices in terms of the model without slices: its record, and what one process has to run."""

from __future__ import annotations

from dataclasses import replace

from mpirun.engine.setup import Setup
from mpirun.model.dataflow import Dataflow, Value
from mpirun.verify.record import Parameters, Record
from schedgen.ir.header import Header
from schedgen.ir.tensor_parallel import TensorParallel


def without_slices(setup: Setup, header: Header, record: Record) -> tuple[Setup, Header, Record]:
    """A run's record, and the setup of its reference.

    In canonical mode the reference has slices and adds them up, as the ranks do; else it runs the model without slices.
    """
    if not header.tensor_parallel or setup.canonical:
        return setup, header, record
    return *_setup_of_model(setup, header), _joined(setup, header, record)


def _setup_of_model(setup: Setup, header: Header) -> tuple[Setup, Header]:
    stages = header.model_stages
    plain = replace(
        header,
        scheme={**header.scheme, "stages": stages},
        graph=header.model_graph,
        compute=header.compute[:, header.first_slices],
        tensor_parallel=TensorParallel(1, (), stages),
    )
    shapes = [setup.shapes[stage] for stage in header.first_slices]
    of_schedule = setup.dataflow.reads
    reads = [
        [x._replace(stage=header.model_stage(x.stage)) if isinstance(x, Value) else x for x in of_schedule[stage]]
        for stage in header.first_slices
    ]
    dataflow = Dataflow(reads, plain, [shape.outputs for shape in shapes])
    return replace(setup, model=setup.unsliced_model, shapes=shapes, dataflow=dataflow), plain


def _joined(setup: Setup, header: Header, record: Record) -> Record:
    tensor = header.tensor_parallel

    def joined(values: Parameters) -> Parameters:
        parameters: Parameters = {}
        for (stage, name), value in values.items():
            key = (header.model_stage(stage), name)
            dim = setup.shapes[stage].sliced_dims.get(name) if tensor.sliced[stage] else None
            if dim is None:
                parameters[key] = value  # the same in all slices
            elif key not in parameters:
                parameters[key] = dim.join([values[slice, name] for slice in tensor.slices_of(stage)])
        return parameters

    buffers = {  # each slice of a sliced stage has its own
        (header.model_stage(stage), name): x
        for (stage, name), x in record.buffers.items()
        if header.is_first_slice(stage) and not tensor.sliced[stage]
    }
    gradients = [joined(step) for step in record.gradients]
    return Record(record.losses, gradients, joined(record.parameters), buffers)
